"""How a MODEL is patched, and undone: object patches, one override, two keyed wrappers.

Every attention module of a known family gets its `forward` wrapped by an object patch, which
ComfyUI itself removes with the model clone; the wrapper hands its own attention calls, and only
those, an override that knows where it is. Other calls meet a general override that finds the layer
from what the model publishes.
"""

from __future__ import annotations

import inspect

import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.patcher_extension import CallbacksMP, WrappersMP

from .layers import UNKNOWN_ROLE, family_of, find_layers
from .override import LayerAttention, peek
from .run import PatchRun

KEY = "trtllm_attention"
PREVIOUS = "trtllm_previous_override"
CALLS = "trtllm_calls"


def install(model, run: PatchRun):
    """A clone of `model` whose attention runs under `run`; an earlier patch of ours is replaced."""
    patched = model.clone()
    options = patched.model_options["transformer_options"]
    diffusion_model = patched.get_model_object("diffusion_model")
    family = family_of(diffusion_model)
    if family is not None:
        run.extra_tokens_lead = family.extra_tokens_lead(diffusion_model)
        run.mask_free = family.mask_free
    earlier = _earlier_patch(options.get("optimized_attention_override"))
    if earlier is not None:
        run.say("this Attention Patch replaces an earlier one on the same model, which is not in effect")
        earlier.holder.replaced = True
        if earlier.progress is not None:
            earlier.progress.replaced()
    overrides = {}
    for layer in find_layers(diffusion_model):
        key = f"diffusion_model.{layer.path}.forward"
        original = _unwrapped(patched.get_model_object(key))
        overrides[layer.path] = _layer_override([_site(run, layer.name, role) for role in layer.roles])
        patched.add_object_patch(key, _wrap_forward(original, overrides[layer.path]))
    _follow_to_other_gpus(patched, overrides)
    previous = _foreign(options.get("optimized_attention_override"))
    options["optimized_attention_override"] = _general_override(run, previous)
    for kind, wrapper in (
        (WrappersMP.OUTER_SAMPLE, _outer_sample(run)),
        (WrappersMP.APPLY_MODEL, _apply_model(run, diffusion_model)),
    ):
        patched.remove_wrappers_with_key(kind, KEY)
        patched.add_wrapper_with_key(kind, KEY, wrapper)
    return patched


def _follow_to_other_gpus(patched, overrides: dict[str, object]) -> None:
    """Wrap the modules of clones for other GPUs, which later versions of ComfyUI make, where they are.

    Such a clone has modules of its own, but its object patches are copies, around the first GPU's.
    """

    def wrap_own_modules(model, clone):
        for path, override in overrides.items():
            key = f"diffusion_model.{path}.forward"
            original = getattr(clone.object_patches.get(key), "trtllm_original", None)
            if inspect.ismethod(original):
                module = clone.model.diffusion_model.get_submodule(path)
                clone.add_object_patch(key, _wrap_forward(original.__func__.__get__(module), override))

    for name in ("ON_DEEPCLONE_MULTIGPU", "ON_MATCH_MULTIGPU_CLONES"):
        kind = getattr(CallbacksMP, name, None)
        if kind is not None:
            patched.remove_callbacks_with_key(kind, KEY)
            patched.add_callback_with_key(kind, KEY, wrap_own_modules)


def _wrap_forward(original, override):
    """`original`, a module's forward, with `override` in its transformer_options."""
    parameters = list(inspect.signature(original).parameters)
    position = parameters.index("transformer_options") if "transformer_options" in parameters else None

    def forward(*args, **kwargs):
        positional = position is not None and position < len(args)
        given = args[position] if positional else kwargs.get("transformer_options")
        options = dict(given or ())
        options[PREVIOUS] = _foreign(options.get("optimized_attention_override"))
        options[CALLS] = []
        options["optimized_attention_override"] = override
        if positional:
            args = (*args[:position], options, *args[position + 1 :])
        else:
            kwargs["transformer_options"] = options
        return original(*args, **kwargs)

    forward.trtllm_original = original
    return forward


def _layer_override(sites: list[LayerAttention]):
    """The override inside one layer's forward: its n-th call has the layer's n-th role."""
    last = len(sites) - 1

    def find_site(args, kwargs):
        calls = kwargs["transformer_options"][CALLS]
        calls.append(None)
        return sites[min(len(calls) - 1, last)]

    return _as_override(find_site, lambda kwargs: kwargs["transformer_options"][PREVIOUS])


def _general_override(run: PatchRun, previous):
    """The override for calls outside every known layer."""
    sites: dict[tuple[str, str], LayerAttention] = {}

    def find_site(args, kwargs):
        layer = _published_layer(kwargs.get("transformer_options") or {})
        role = _safe_role(args, kwargs, run)
        found = sites.get((layer, role))
        if found is None:
            found = sites[layer, role] = _site(run, layer, role)
        return found

    override = _as_override(find_site, lambda kwargs: previous)
    override.trtllm_previous = previous
    override.trtllm_run = run
    return override


def _as_override(find_site, find_previous):
    """An override, and its form for calls that bring their tensors in containers.

    Kept out of compiled graphs: a traced override would freeze the gate at the step of the trace.
    """

    @torch.compiler.disable
    def override(func, *args, **kwargs):
        def decline():
            previous = find_previous(kwargs)
            if previous is None:
                return func(*args, **kwargs)
            return previous(func, *args, **kwargs)

        return find_site(args, kwargs)(decline, args, kwargs)

    @torch.compiler.disable
    def container_function(*args, **kwargs):
        def decline():
            previous = find_previous(kwargs)
            if previous is None:
                return optimized_attention(*args, **kwargs)
            if hasattr(previous, "container_function"):
                return previous.container_function(*args, **kwargs)
            tensors = tuple(container.take() for container in args[:3])
            return previous(inspect.unwrap(optimized_attention), *tensors, *args[3:], **kwargs)

        return find_site(args, kwargs)(decline, args, kwargs)

    override.container_function = container_function
    override.trtllm_previous = None
    return override


def _site(run: PatchRun, layer: str, role: str) -> LayerAttention:
    settings, _ = run.settings_for(role)
    return LayerAttention(run, layer, role, settings, run.ignores(settings, layer))


def _unwrapped(forward):
    """`forward` without a wrapper of ours: the last patch on a model is the one that counts."""
    return getattr(forward, "trtllm_original", forward)


def _earlier_patch(override) -> PatchRun | None:
    """The run of an earlier patch of ours, or None; a Calibrate counts as one."""
    return getattr(override, "trtllm_run", None)


def _foreign(override):
    """The override that was there before any of ours."""
    while hasattr(override, "trtllm_previous"):
        override = override.trtllm_previous
    return override


def _published_layer(options: dict) -> str:
    """A layer name from what the model says of its blocks, or "unknown"."""
    kind, index = options.get("block_type"), options.get("block_index")
    if kind is None or index is None:
        block = options.get("block")
        return f"{block[0]}_blocks.{block[1]}" if block else UNKNOWN_ROLE
    return f"{kind}_blocks.{index}"


def _safe_role(args: tuple, kwargs: dict, run: PatchRun) -> str:
    """"self" where keys and queries are as many and cannot be the context's, else "unknown"."""
    if len(args) < 4:
        return UNKNOWN_ROLE
    axis = 2 if kwargs.get("skip_reshape", False) else 1
    length = peek(args[0]).shape[axis]
    same = length == peek(args[1]).shape[axis]
    return "self" if same and length != run.clock.context_length else UNKNOWN_ROLE


def _outer_sample(run: PatchRun):
    def outer_sample(executor, noise, latent_image, sampler, sigmas, *args, **kwargs):
        run.start(sigmas)
        completed = False
        try:
            out = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
            completed = True
            return out
        finally:
            run.finish(completed)

    return outer_sample


def _apply_model(run: PatchRun, diffusion_model):
    patch = _patch_size(diffusion_model)

    def apply_model(executor, x, t, c_concat=None, c_crossattn=None, *args, **kwargs):
        run.tick(executor.class_obj.model_sampling, t)
        run.clock.grid = _grid(x, patch)
        run.clock.context_length = None if c_crossattn is None else c_crossattn.shape[1]
        return executor(x, t, c_concat, c_crossattn, *args, **kwargs)

    return apply_model


def _patch_size(diffusion_model) -> tuple[int, int, int] | None:
    size = getattr(diffusion_model, "patch_size", None)
    if isinstance(size, (tuple, list)) and len(size) == 3:
        return tuple(size)
    return None


def _grid(x, patch) -> tuple[int, int, int] | None:
    """(frames, rows, columns) of the tokens a latent [B, C, T, H, W] becomes, padding included."""
    if patch is None or getattr(x, "ndim", 0) != 5:
        return None
    return tuple(-(-size // p) for size, p in zip(x.shape[2:], patch))
