"""What is in effect on a patched model, in the words that stand on the Patch node."""

from __future__ import annotations

from ..trtllm_core.api import Plan
from ..trtllm_core.specs import AttentionSpec
from .hook.layers import Layer
from .hook.run import PatchRun


def describe_role(run: PatchRun, role: str, decided: Plan, layers: tuple[Layer, ...]) -> str:
    """One line: the role's backend and why, then what is lossy about it and where."""
    settings, _ = run.settings_for(role)
    line = f"{role}: {decided.active.backend}"
    if decided.dense.backend != decided.active.backend:
        line += f", dense steps {decided.dense.backend}"
    line += f" ({_why(decided, settings.spec, settings is run.default)})"
    parts = list(_lossy(settings.spec))
    own = [layer for layer in layers if role in layer.roles]
    ignored = sum(run.ignores(settings, layer.name) for layer in own)
    if ignored:
        parts.append(f"{ignored} of {len(own)} layers dense")
    return "; ".join([line, *parts])


def _why(decided: Plan, spec: AttentionSpec, by_patch: bool) -> str:
    if spec.backend is not None:
        return "chosen here" if by_patch else "chosen by an Attention Role"
    return decided.active.selection.detail or "auto"


def _lossy(spec: AttentionSpec):
    quant, skip = spec.quant, spec.skip_softmax
    if quant is not None and quant.is_sage:
        yield f"SAGE {quant.dtype_qk}, blocks of {quant.q_block_size} and {quant.k_block_size}"
    if skip is None:
        return
    if skip.target_sparsity is None:
        yield f"Skip-Softmax λ {skip.threshold:g}"
    else:
        yield f"Skip-Softmax to {skip.target_sparsity:.0%}, calibrated"
    if skip.disabled_until_timestep:
        yield f"dense while t > {skip.disabled_until_timestep:g}"
