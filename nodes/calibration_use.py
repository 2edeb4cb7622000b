"""What a user should hear of a calibration before the model is sampled with it."""

from __future__ import annotations

from ..trtllm_core.api import Plan
from ..trtllm_core.skip_rule import skip_rule
from .hook.layers import Layer, find_layers
from .hook.run import PatchRun


def warn_of_calibration(
    run: PatchRun, role: str, decided: Plan, layers: tuple[Layer, ...], model: str
) -> None:
    """Log, once each, what speaks against the curve of `role`; nothing for a role without one."""
    settings, _ = run.settings_for(role)
    skip, calibration = decided.spec.skip_softmax, settings.calibration
    if skip is None or skip.target_sparsity is None or calibration is None:
        return
    sizes = [layer.head_dim for layer in layers if role in layer.roles]
    order = "cubes" if run.cubes else "sequential"
    rule = skip_rule(
        decided.active.backend, run.device, sizes[0] if sizes else None, order, decided.spec.quant
    )
    names = [layer.name for layer in layers]
    for text in calibration.warnings(skip.target_sparsity, used=rule, layers=names, model=model):
        run.say(text)


def model_name(model) -> str:
    """What tells a MODEL's architecture and size apart, such as "WAN21_T2V, 60 attention layers, width 5120"."""
    network = model.model.diffusion_model
    name = f"{type(model.model.model_config).__name__}, {len(find_layers(network))} attention layers"
    width = getattr(network, "dim", None) or getattr(network, "hidden_size", None)
    return f"{name}, width {width}" if isinstance(width, int) else name
