"""Attention Config: vLLM-Omni's JSON or flags as wires."""

from __future__ import annotations

from comfy_api.latest import io

from ..trtllm_core.config import AttentionConfig, environment
from ..trtllm_core.specs import AttentionSpec
from .schema import (
    BackendType,
    CalibrationType,
    IgnoreType,
    Quant,
    RolesType,
    SkipSoftmaxType,
    schema,
)
from .wires import Roles, RoleSettings, SkipSoftmax

EXAMPLE = '{"default": {"backend": "auto", "skip_softmax": {"threshold": 0.01}}}'


class TRTLLMAttentionConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMAttentionConfig",
            "Attention Config (JSON)",
            "Reads vLLM-Omni's attention configuration, as JSON, dotted flags or a whole command "
            "line, and gives the same settings as wires for the patch. The environment variable "
            "DIFFUSION_ATTENTION_BACKEND counts where nothing here names a backend.",
            search_aliases=("vllm", "vllm-omni", "json"),
            inputs=[
                io.String.Input(
                    "config",
                    default=EXAMPLE,
                    multiline=True,
                    tooltip="JSON such as the default, or --diffusion-attention-config flags.",
                ),
                CalibrationType.Input(
                    "calibration", optional=True, tooltip="The curve that target_sparsity asks for."
                ),
                IgnoreType.Input("ignore", optional=True, tooltip="Layers that stay dense."),
            ],
            outputs=[
                BackendType.Output(display_name="backend"),
                Quant.Output(display_name="quant"),
                SkipSoftmaxType.Output(display_name="skip_softmax"),
                RolesType.Output(display_name="roles"),
            ],
        )

    @classmethod
    def execute(cls, config, calibration=None, ignore=None) -> io.NodeOutput:
        parsed = AttentionConfig.parse(config, environment())
        patterns = ignore.patterns if ignore else ()
        default = parsed.default or AttentionSpec()
        roles = Roles(
            tuple(
                (role, _settings(spec, calibration, patterns))
                for role, spec in parsed.per_role.items()
            )
        )
        return io.NodeOutput(
            default.backend or "auto",
            default.quant,
            _skip_softmax(default, calibration, patterns),
            roles,
        )


def _skip_softmax(spec: AttentionSpec, calibration, patterns) -> SkipSoftmax | None:
    if spec.skip_softmax is None:
        return None
    curve = calibration if spec.skip_softmax.target_sparsity is not None else None
    return SkipSoftmax(spec.skip_softmax, curve, patterns)


def _settings(spec: AttentionSpec, calibration, patterns) -> RoleSettings:
    skip = _skip_softmax(spec, calibration, patterns)
    return RoleSettings.of(spec.backend or "auto", spec.quant, skip)
