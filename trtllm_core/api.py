"""Attention under a spec: decide once, then call.

`plan` makes every decision that needs no tensor: which backend, whether its library loads, whether
its kernel is right on this GPU. `Plan.run` then only computes. `attention` is both in one call, for
scripts; a sampler's hook keeps the plan.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .backends import AttentionCall, Requirements, Unavailable, load_module
from .calibration import Calibration
from .device import Device, on_device_of
from .gate import TimestepGate
from .masks import MaskReader, mask_refusal
from .selector import Selection, dense_companion, select
from .selfcheck import self_check
from .specs import AttentionSpec, number, one_of
from .token_order import TokenOrder

log = logging.getLogger("trtllm_attention")

TOKEN_ORDERS = ("cubes", "sequential")


class Refused(ValueError):
    """Input that the chosen backend cannot honour, or a setting that lacks what it needs."""


@dataclass(frozen=True)
class Route:
    """A backend that was selected, loaded and checked, ready to run."""

    selection: Selection
    requirements: Requirements
    compute: Callable[[AttentionCall], torch.Tensor]
    tile_count: Callable[[AttentionCall], int] | None
    variant: Callable[[AttentionCall], str] | None

    @property
    def backend(self) -> str:
        return self.selection.backend

    def label(self, call: AttentionCall) -> str:
        """What runs `call`, for reports: the backend, and which of its kernels if it has several."""
        return self.backend if self.variant is None else f"{self.backend}/{self.variant(call)}"


@dataclass(frozen=True)
class Plan:
    """Everything about one attention role that is decided before sampling.

    active runs calls as the spec asks; dense runs those that Skip-Softmax sits out, because the
    gate is closed or the layer is ignored (SAGE, if asked for, stays on).
    """

    spec: AttentionSpec
    role: str
    active: Route
    dense: Route
    gate: TimestepGate

    def is_sparse(self, timestep: float | None, ignored: bool = False) -> bool:
        """Whether a call at `timestep` skips tiles."""
        if self.spec.skip_softmax is None or ignored:
            return False
        return not self.gate.is_dense(timestep)

    def run(
        self,
        call: AttentionCall,
        *,
        order: TokenOrder | None = None,
        masks: MaskReader | None = None,
        layer: str | None = None,
    ) -> torch.Tensor:
        """Compute `call`, whose threshold says whether it skips. Returns query's dtype.

        order permutes the tokens on the way in and back on the way out, unless that would move keys
        that are padding; call.mask is turned into lengths or refused (ValueError) by what the backend
        can honour.
        """
        route = self.dense if call.threshold is None else self.active
        dtype = call.query.dtype
        if call.mask is not None and route.requirements.mask != "any":
            _use_mask(call, route, masks or MaskReader(), layer or self.role)
        if dtype not in route.requirements.dtypes or dtype != call.value.dtype or dtype != call.key.dtype:
            _cast(call, _compute_dtype(call, route.requirements))
        if order is not None and _moves_padding(order, call):
            order = None
        with on_device_of(call.query):  # not every library sees to it, and SageAttention leaves another GPU current
            if order is None:
                return route.compute(call).to(dtype)
            if call.mask is not None:
                call.mask = order.apply_to_mask(call.mask)
            call.query, call.key = order.apply(call.query), order.apply(call.key)
            call.value = order.apply(call.value)
            return order.undo(route.compute(call)).to(dtype)


def plan(
    spec: AttentionSpec,
    device: Device,
    *,
    role: str = "self",
    source: str = "platform default",
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gqa: bool = False,
    mask: str = "none",
    mask_free: bool = True,
) -> Plan:
    """Select, load and check the backends that `spec` needs on `device`.

    mask: "none", "padding" or "any", the most general mask this role will bring; mask_free: whether
    the model never brings any. What cannot be known yet (None) refuses nothing. Raises `backends.Unavailable` with every reason.
    """
    known = {"head_dim": head_dim, "role": role, "dtype": dtype, "gqa": gqa}
    known.update(mask=mask, mask_free=mask_free)
    choose = functools.partial(select, spec, source=source, **known)
    active = _ready(choose, device, spec, head_dim, dtype)
    dense = active
    if spec.skip_softmax is not None:
        choose = functools.partial(dense_companion, spec, source=source, **known)
        dense = _ready(choose, device, AttentionSpec(quant=spec.quant), head_dim, dtype)
    gate = TimestepGate(spec.skip_softmax.disabled_until_timestep if spec.skip_softmax else 0.0)
    return Plan(spec, role, active, dense, gate)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    spec: AttentionSpec | None = None,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    timestep: float | None = None,
    layer: str | None = None,
    calibration: Calibration | None = None,
    grid: tuple[int, int, int] | None = None,
    token_order: str = "cubes",
) -> torch.Tensor:
    """Attention as `spec` asks (default: the platform's best dense backend).

    query [B, Lq, Hq, D]; key, value [B, Lk, Hkv, D], Hq a multiple of Hkv; mask broadcasts to
    [B, Hq, Lq, Lk], boolean (True attends) or additive. timestep: normalized t for the gate.
    layer: this site's name, for `calibration` and messages. grid: (frames, rows, columns) of video
    tokens in query and key, which lets Skip-Softmax work on compact cubes of them.
    Returns [B, Lq, Hq, D] in query's dtype. Raises `backends.Unavailable` (a RuntimeError) when
    the spec cannot be served, ValueError for input that does not fit it.
    """
    spec = spec or AttentionSpec()
    one_of("token_order", token_order, TOKEN_ORDERS)
    if timestep is not None:
        number("timestep", timestep, 0, 1)
    if key.shape[1] == 0:
        raise ValueError("key has no tokens: attention over nothing is undefined")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise ValueError("not every backend has gradients: call this under torch.no_grad()")
    call = AttentionCall(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=mask,
        quant=spec.quant,
        kv_order="own_first" if token_order == "cubes" else "sequential",
    )
    decided = _cached_plan(
        spec,
        Device.current(query.device),
        head_dim=query.shape[-1],
        dtype=value.dtype,
        gqa=query.shape[2] != key.shape[2],
        mask=_mask_kind(mask, key.shape[1]),
    )
    order = None
    ignored = calibration is not None and layer is not None and calibration.ignores(layer)
    if decided.is_sparse(timestep, ignored):
        call.threshold = threshold_of(spec, key.shape[1], calibration)
        if grid is not None and token_order == "cubes" and query.shape[1] == key.shape[1]:
            order = _order_of(grid, query)
    return decided.run(call, order=order, layer=layer)


def threshold_of(
    spec: AttentionSpec, key_length: int, calibration: Calibration | None
) -> float:
    """λ for a call over `key_length` keys, direct or from the calibrated curve.

    Raises Refused, a ValueError, if the spec asks for a sparsity and there is no curve.
    """
    skip = spec.skip_softmax
    if skip.threshold is not None:
        return skip.threshold
    if calibration is None:
        raise Refused(
            f"skip_softmax.target_sparsity={skip.target_sparsity:g} needs a calibration of this "
            "model; without one set skip_softmax.threshold (try 0.01)"
        )
    return calibration.threshold(skip.target_sparsity, key_length)


def _order_of(grid: tuple[int, int, int], query: torch.Tensor) -> TokenOrder:
    """The cube order of `grid`; tokens beyond it are taken to come first."""
    extra = query.shape[1] - math.prod(grid)
    if extra < 0:
        raise ValueError(f"grid={grid} has more tokens than query: {query.shape[1]}")
    return TokenOrder(grid, lead=extra, device=query.device)


_cached_plan = functools.lru_cache(maxsize=256)(plan)


def _ready(choose, device, spec, head_dim, dtype) -> Route:
    """The first choice that loads and computes the right numbers on this machine."""
    dropped: list[tuple[str, str]] = []  # no exceptions: their tracebacks hold the caller's tensors
    while True:
        selection = choose(device)
        module = load_module(selection.backend)
        try:
            module.load(device)
            self_check(module, device, spec, head_dim, dtype)
        except Unavailable as error:
            # an explicit choice is refused by the next round, with this among its reasons
            device = device.with_broken(selection.backend, "; ".join(error.reasons))
            dropped.append((selection.backend, str(error)))
            continue
        for backend, reason in dropped:
            if not any(backend in warning for warning in selection.warnings):
                _say_once(f"{reason}. {selection.backend} is used instead")
        return Route(
            selection,
            module.REQUIREMENTS,
            module.run,
            getattr(module, "tile_count", None),
            getattr(module, "variant", None),
        )


@functools.cache
def _say_once(text: str) -> None:
    log.warning(text)


def _mask_kind(mask: torch.Tensor | None, key_length: int) -> str:
    if mask is None:
        return "none"
    return "any" if MaskReader().key_lengths(mask, key_length) is None else "padding"


def _use_mask(call: AttentionCall, route: Route, masks: MaskReader, layer: str) -> None:
    lengths = None
    if route.requirements.mask == "padding":
        lengths = masks.key_lengths(call.mask, call.key.shape[1])
    if lengths is None:
        raise Refused(mask_refusal(route.backend, layer, call.mask))
    numbers = masks.host_key_lengths(call.mask, call.key.shape[1])
    if lengths.numel() == 1:
        lengths, numbers = lengths.expand(call.query.shape[0]), numbers * call.query.shape[0]
    call.key_lengths, call.host_key_lengths, call.mask = lengths.contiguous(), numbers, None


def _moves_padding(order: TokenOrder, call: AttentionCall) -> bool:
    """Whether keys that `call`'s lengths cut off from the end would not be at the end in `order`."""
    lengths = call.host_key_lengths
    return call.key_lengths is not None and (lengths is None or min(lengths) < order.end)


def _compute_dtype(call: AttentionCall, requirements: Requirements) -> torch.dtype:
    """Of the dtypes q, k and v come in, the first that the backend takes; else its own."""
    for tensor in (call.value, call.key, call.query):
        if tensor.dtype in requirements.dtypes and tensor.dtype != torch.float32:
            return tensor.dtype
    return requirements.compute_dtype(call.query.dtype)


def _cast(call: AttentionCall, dtype: torch.dtype) -> None:
    call.query, call.key, call.value = (x.to(dtype) for x in (call.query, call.key, call.value))
