"""One attention call: ComfyUI's arguments in, the planned backend, ComfyUI's layout out.

`LayerAttention` is made per layer and role when a model is patched; calling it costs a look-up and
a comparison. Whatever it cannot do goes on untouched to whoever would have done it.
"""

from __future__ import annotations

import logging

import torch

from ...trtllm_core.api import Plan, Refused, threshold_of
from ...trtllm_core.backends import AttentionCall
from ..wires import RoleSettings
from .run import PatchRun

log = logging.getLogger("trtllm_attention")

ARGUMENTS = (
    "q",
    "k",
    "v",
    "heads",
    "mask",
    "attn_precision",
    "skip_reshape",
    "skip_output_reshape",
)
# keywords that this pack reads, or that cannot change the result
UNDERSTOOD = frozenset(ARGUMENTS) | {
    "scale",
    "enable_gqa",
    "low_precision_attention",
    "transformer_options",
    "preferred_attention",
    "_inside_attn_wrapper",
}


class LayerAttention:
    """The attention of one layer in one role of a patched model.

    Called with `decline`, which computes the call as ComfyUI would have without this pack, and the
    call's own arguments.
    """

    __slots__ = ("run", "layer", "role", "settings", "ignored", "lossy", "_plans")

    def __init__(self, run: PatchRun, layer: str, role: str, settings: RoleSettings, ignored: bool):
        self.run = run
        self.layer = layer
        self.role = role
        self.settings = settings
        self.ignored = ignored
        self.lossy = settings.spec.is_lossy
        self._plans: dict[tuple, tuple[Plan | None, str]] = {}
        run.sites.append(self)

    def forget_plans(self) -> None:
        """Plan anew at the next call, because a backend failed."""
        self._plans.clear()

    def __call__(self, decline, args: tuple, kwargs: dict):
        """Compute the call, or return `decline()` with the reason counted."""
        run = self.run
        extra = kwargs.keys() - UNDERSTOOD
        if extra:
            return run.declined(self, "keyword " + ", ".join(sorted(extra)), decline)
        if self.lossy and kwargs.get("low_precision_attention") is False:
            return run.declined(self, "the model asks for exact attention here", decline)
        arguments = dict(zip(ARGUMENTS, args))
        arguments.update(kwargs)
        if torch.is_grad_enabled() and any(peek(arguments[name]).requires_grad for name in "qkv"):
            return run.declined(self, "gradients are asked for, which not every kernel has", decline)
        heads = arguments["heads"]
        split = not arguments.get("skip_reshape", False)
        query = peek(arguments["q"])
        dim = query.shape[-1] // heads if split else query.shape[-1]
        key_width = peek(arguments["k"]).shape[-1 if split else 1]
        key_heads = key_width // dim if split else key_width
        mask = as_four(arguments.get("mask"))
        mask_kind = "none" if mask is None else run.mask_kind(mask)
        plan, refusal = self._plan(query.device, dim, query.dtype, key_heads != heads, mask_kind, mask)
        if plan is None:
            return run.declined(self, refusal, decline)
        batch, query_length = query.shape[0], query.shape[1 if split else 2]
        del query
        call = AttentionCall(
            query=as_tokens(take(arguments.pop("q")), heads, dim, split),
            key=as_tokens(take(arguments.pop("k")), key_heads, dim, split),
            value=as_tokens(take(arguments.pop("v")), key_heads, dim, split),
            scale=dim**-0.5 if arguments.get("scale") is None else arguments["scale"],
            mask=mask,
            quant=plan.spec.quant,
            kv_order=run.kv_order,
        )
        run.observe(self, call)
        order = self._prepare_skipping(plan, call)
        times = None if run.stats is None else run.stats.times
        device = call.query.device
        started = None if times is None else times.start(device)
        try:
            out = plan.run(call, order=order, masks=run.masks, layer=self.layer)
        except (torch.OutOfMemoryError, Refused):
            raise  # ComfyUI frees memory and says so; a refusal is the user's to read
        except Exception as error:  # whatever a kernel raises, sampling goes on
            reason = run.failed(plan, call, error)
            given = args[0] if args else kwargs["q"]
            if hasattr(given, "take") and hasattr(given, "peek"):
                raise  # the inputs were consumed: nothing can be computed from them
            if run.stats is not None:
                run.stats.decline(reason)
            return decline()
        if started is not None:
            times.stop((self.layer, self.role, run.clock.step), started, device)
        if arguments.get("skip_output_reshape", False):
            return out.transpose(1, 2)
        return out.reshape(batch, query_length, heads * dim)

    def _prepare_skipping(self, plan: Plan, call: AttentionCall):
        """Set λ and the tile counter where this call skips; returns the token order, or None."""
        run = self.run
        clock = run.clock
        sparse = plan.is_sparse(clock.timestep, self.ignored)
        route = plan.active if sparse else plan.dense
        order = None
        stats = run.stats
        site = None
        if stats is not None:
            site = stats.site(self.layer, self.role, clock.step, clock.timestep)
            site.calls += 1
            work = 4 * call.query.numel() * call.key.shape[1]
            site.work += work
            site.backends[route.label(call)] += 1
        if sparse:
            call.threshold = threshold_of(plan.spec, call.key.shape[1], self.settings.calibration)
            order = run.token_order(call.query, call.key)
            if site is not None:
                site.sparse_calls += 1
                site.sparse_work += work
                if stats.count_tiles and route.tile_count is not None:
                    call.skipped = stats.counter(site, call.query.device)
                    site.total_tiles += route.tile_count(call)
        return order

    def _plan(self, device, head_dim, dtype, gqa, mask_kind, mask) -> tuple[Plan | None, str]:
        """The plan for calls of this shape on this device, or None and why there is none."""
        key = (device, head_dim, dtype, gqa, mask_kind)
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = self.run.plan_call(self, *key, mask)
        return known


def peek(tensor):
    """The tensor, or the one that a container of later ComfyUI versions holds."""
    return tensor.peek() if hasattr(tensor, "peek") else tensor


def take(tensor):
    """Like `peek`, but empties a container, so that its tensor can be freed once it was read."""
    return tensor.take() if hasattr(tensor, "take") and hasattr(tensor, "peek") else tensor


def as_tokens(x: torch.Tensor, heads: int, dim: int, split: bool) -> torch.Tensor:
    """[B, L, H*D] (split) or [B, H, L, D] as a view [B, L, H, D]."""
    return x.view(x.shape[0], x.shape[1], heads, dim) if split else x.transpose(1, 2)


def as_four(mask: torch.Tensor | None) -> torch.Tensor | None:
    """ComfyUI's 2-, 3- or 4-D mask as [B, H or 1, Lq or 1, Lk]."""
    if mask is None:
        return None
    if mask.ndim == 2:
        mask = mask.unsqueeze(0)
    if mask.ndim == 3:
        mask = mask.unsqueeze(1)
    return mask
