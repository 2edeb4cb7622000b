"""TRTLLM Attention Patch: the node that makes a model's attention run on a chosen backend."""

from __future__ import annotations

import logging

import torch
from comfy_api.latest import io

from ..trtllm_core.api import TOKEN_ORDERS
from ..trtllm_core.device import Device
from ..trtllm_core.layer_names import LayerPatterns
from ..trtllm_core.specs import nearest
from .calibration_use import model_name, warn_of_calibration
from .effect import describe_role
from .hook.install import install
from .hook.layers import ROLE_CATEGORIES, Layer, find_layers
from .hook.progress import Progress
from .hook.run import PatchRun
from .schema import Quant, RolesType, SkipSoftmaxType, StatsType, backend_input, schema
from .status import show
from .wires import Roles, RoleSettings, StatsHolder

log = logging.getLogger("trtllm_attention")


class TRTLLMAttentionPatch(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMAttentionPatch",
            "TRTLLM Attention Patch",
            "Runs the model's attention on a chosen backend, with Skip-Softmax sparsity and SAGE "
            "quantization where they are wired. Put it last before the sampler.",
            search_aliases=("skip softmax", "sage attention", "flash attention", "tensorrt-llm"),
            inputs=[
                io.Model.Input("model", tooltip="The model to patch; the original stays untouched."),
                backend_input(
                    "auto takes the best backend of this GPU that can do all that is wired. A "
                    "backend chosen by name runs, or the node says every reason why it cannot."
                ),
                io.Combo.Input(
                    "token_order",
                    options=list(TOKEN_ORDERS),
                    default="cubes",
                    tooltip="cubes: Skip-Softmax works on compact 3-D cubes of the video and starts "
                    "at each tile's own place; exact, and skips more at the same error. "
                    "sequential: TensorRT-LLM's own order.",
                ),
                Quant.Input(
                    "quant", optional=True, tooltip="SAGE Quant: INT8 or FP8 attention. None: off."
                ),
                SkipSoftmaxType.Input(
                    "skip_softmax",
                    optional=True,
                    tooltip="Skip-Softmax: leave out tiles that do not matter. None: off.",
                ),
                RolesType.Input(
                    "roles",
                    optional=True,
                    tooltip="Settings for single roles (self, cross, ...); each replaces everything "
                    "wired here for its role.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                StatsType.Output(display_name="stats", tooltip="What the runs did; for a report."),
                io.String.Output(
                    display_name="config", tooltip="The same settings as vLLM-Omni's JSON."
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            not_idempotent=True,  # the model writes to this very node, so another may not take it from the cache
        )

    @classmethod
    def validate_inputs(cls, backend):
        return True  # a saved name that is not known here loads; running it says what is wrong

    @classmethod
    def execute(
        cls, model, backend, token_order, quant=None, skip_softmax=None, roles=None
    ) -> io.NodeOutput:
        default = RoleSettings.of(backend, quant, skip_softmax)
        holder = StatsHolder()
        progress = Progress(cls.hidden.unique_id)
        run = PatchRun(
            default,
            dict((roles or Roles()).by_role),
            Device.current(model.load_device),
            token_order=token_order,
            holder=holder,
            count_tiles=_is_linked(cls.hidden, output=1),
            progress=progress,
        )
        patched = install(model, run)
        layers = find_layers(patched.get_model_object("diffusion_model"))
        lines = _plan_roles(run, layers, _compute_dtype(model), model_name(model))
        _warn_of_unmatched_patterns(run, layers)
        _warn_of_unmatched_roles(run, layers)
        _warn_of_large_thresholds(run)
        text = progress.heading = "\n".join(lines)
        show(cls.hidden.unique_id, text)
        return io.NodeOutput(patched, holder, run.config.to_json(), ui={"text": [text]})


def _plan_roles(run: PatchRun, layers: tuple[Layer, ...], dtype, model: str) -> list[str]:
    """Plan every role the model is known to have, so that a refusal comes before sampling."""
    sizes: dict[str, int | None] = {}
    for layer in layers:
        for role in layer.roles:
            sizes.setdefault(role, layer.head_dim)
    lines = []
    for role, size in (sizes or {"self": None}).items():
        decided = run.plan_role(role, size, dtype)
        if not run.has_calibration_for(role):
            raise ValueError(
                f"role {role}: target_sparsity needs a calibration of this model; wire Load "
                "Calibration into Skip-Softmax, or switch its mode to threshold"
            )
        warn_of_calibration(run, role, decided, layers, model)
        lines.append(describe_role(run, role, decided, layers))
    return lines


def _warn_of_unmatched_patterns(run: PatchRun, layers: tuple[Layer, ...]) -> None:
    names = [layer.name for layer in layers]
    if not names:
        return
    for settings in (run.default, *run.by_role.values()):
        for pattern in LayerPatterns(settings.ignore).unmatched(names):
            run.say(f"ignore pattern {pattern!r} matches no layer; known: {_summary(names)}")


def _warn_of_unmatched_roles(run: PatchRun, layers: tuple[Layer, ...]) -> None:
    """Say which wired roles no attention of a known model has; a category such as cross stands for its roles."""
    known = {role for layer in layers for role in layer.roles}
    if not known:
        return
    categories = {ROLE_CATEGORIES.get(role, role) for role in known}
    for role in run.by_role.keys() - known - categories:
        run.say(
            f"role {role!r} matches no attention of this model{nearest(role, known)}; "
            f"its roles: {', '.join(sorted(known))}"
        )


def _warn_of_large_thresholds(run: PatchRun) -> None:
    for settings in (run.default, *run.by_role.values()):
        skip = settings.spec.skip_softmax
        if skip is not None and (skip.threshold or 0) > 1:
            run.say(
                f"skip_softmax.threshold={skip.threshold:g} is above 1: even tiles that raise a row's maximum are "
                "skipped; useful values are between 0 and 1"
            )


def _summary(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", ... {names[-1]} ({len(names)} layers)" if len(names) > 6 else "")


def _compute_dtype(model) -> torch.dtype | None:
    """The dtype the model computes in, or None where its weights do not say."""
    base = model.model
    dtype = getattr(base, "manual_cast_dtype", None) or base.get_dtype()
    return dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else None


def _is_linked(hidden, output: int) -> bool:
    """Whether any node of the running prompt takes output number `output` of this one."""
    me = str(hidden.unique_id)
    for node in (hidden.prompt or {}).values():
        for value in node.get("inputs", {}).values():
            if isinstance(value, list) and len(value) == 2 and [str(value[0]), value[1]] == [me, output]:
                return True
    return False
