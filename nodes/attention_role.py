"""Attention Role: other settings for one kind of attention."""

from __future__ import annotations

from comfy_api.latest import io

from ..trtllm_core.config import AttentionConfig
from .schema import Quant, RolesType, SkipSoftmaxType, backend_input, schema
from .wires import Roles, RoleSettings


class TRTLLMAttentionRole(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMAttentionRole",
            "Attention Role",
            "Settings for one role, such as cross. They replace all that is wired into the patch for "
            "that role: nothing is inherited. Chain several through roles.",
            search_aliases=("per role", "cross attention", "override"),
            inputs=[
                io.String.Input(
                    "role",
                    default="cross",
                    tooltip="self, cross, or a role of one model, such as wan.image_cross or "
                    "hunyuan_video.token_refiner. The exact role wins over its category.",
                ),
                backend_input("The backend of this role; auto lets the platform choose."),
                Quant.Input("quant", optional=True, tooltip="SAGE for this role. None: off."),
                SkipSoftmaxType.Input(
                    "skip_softmax", optional=True, tooltip="Skip-Softmax for this role. None: off."
                ),
                RolesType.Input("roles", optional=True, tooltip="Roles set before this one."),
            ],
            outputs=[RolesType.Output(display_name="roles")],
        )

    @classmethod
    def validate_inputs(cls, backend):
        return True

    @classmethod
    def execute(cls, role, backend, quant=None, skip_softmax=None, roles=None) -> io.NodeOutput:
        name = role.strip()
        settings = RoleSettings.of(backend, quant, skip_softmax)
        AttentionConfig(per_role={name: settings.spec})  # refuses what is no role's name
        return io.NodeOutput((roles or Roles()).with_role(name, settings))
