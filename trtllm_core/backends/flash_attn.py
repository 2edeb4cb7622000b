"""FLASH_ATTN: FlashAttention 4 on Blackwell, else FlashAttention 3 on Hopper, else 2."""

from __future__ import annotations

import logging

import torch

from ..device import Device, capability_of
from . import HALF, AttentionCall, Package, Request, Requirements, Unavailable, import_names
from ._flash import FlashLibrary, by_cache, by_used_lengths

log = logging.getLogger("trtllm_attention")

BLACKWELL = ((10, 0), (10, 3), (12, 0), (12, 1))
HOPPER = ((9, 0),)
FA4_HEAD_DIM_MAX = 128

REQUIREMENTS = Requirements(
    backend="FLASH_ATTN",
    summary="FlashAttention 4, 3 or 2",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dim_multiple=8,
    head_dim_max=256,
    mask="padding",
    any_package=(
        # earlier betas failed to compile on Blackwell
        Package("flash-attn-4", "pip install flash-attn-4", "4.0.0b18", BLACKWELL),
        Package("flash-attn-3", "build it from flash-attention/hopper", None, HOPPER),
        Package("fa3-fwd", "pip install fa3-fwd", None, HOPPER),
        Package("flash-attn", "pip install flash-attn --no-build-isolation"),
    ),
)

# By compute capability, in the order of preference; filled by `load`.
_libraries: dict[tuple[int, int] | None, tuple[FlashLibrary, ...]] = {}


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """FlashAttention 4 alone does not cover the wide heads."""
    wide = request.head_dim is not None and request.head_dim > FA4_HEAD_DIM_MAX
    usable = [p.name for p in REQUIREMENTS.any_package if p.reason(device) is None]
    if wide and usable == ["flash-attn-4"]:
        return (
            f"flash-attn-4 covers head sizes up to {FA4_HEAD_DIM_MAX}, and flash-attn, which goes "
            f"to {REQUIREMENTS.head_dim_max}, is not installed",
        )
    return ()


def load(device: Device) -> None:
    """Import the best library, and the next one where the best does not cover every head size."""
    if device.capability in _libraries:
        return
    found, missing, broken = [], [], []
    for package in REQUIREMENTS.any_package:
        if not package.is_for(device):
            continue
        reason = package.reason(device)
        if reason is not None:
            missing.append(reason)
            continue
        try:
            found.append(_LOADERS[package.name]())
        except Unavailable as error:
            broken += error.reasons
            continue
        if found[-1].head_dim_max >= REQUIREMENTS.head_dim_max:
            break
    if not found:
        raise Unavailable(REQUIREMENTS.backend, (*broken, *missing))
    for reason in broken:
        log.warning("FLASH_ATTN runs %s: %s", found[0].name, reason)
    _libraries[device.capability] = tuple(found)


def library(call: AttentionCall) -> FlashLibrary:
    """The library that runs `call`."""
    head_dim = call.query.shape[-1]
    for candidate in _libraries[capability_of(call.query)]:
        if head_dim <= candidate.head_dim_max:
            return candidate
    raise Unavailable(REQUIREMENTS.backend, (f"no loaded library covers head size {head_dim}",))


def run(call: AttentionCall) -> torch.Tensor:
    return library(call).run(call)


def _flash_attention_2() -> FlashLibrary:
    dense, cached = _import("flash_attn.flash_attn_interface", "flash_attn_with_kvcache")
    return FlashLibrary("FlashAttention 2", dense, by_cache(cached))


def _flash_attention_3() -> FlashLibrary:
    dense, cached = _import("flash_attn_interface", "flash_attn_with_kvcache")
    return FlashLibrary("FlashAttention 3", dense, by_cache(cached))


def _fa3_fwd() -> FlashLibrary:
    """FlashAttention 3, forward only, as the wheel on PyPI."""
    dense, cached = _import("fa3_fwd_interface", "flash_attn_with_kvcache")
    return FlashLibrary("FlashAttention 3 (fa3-fwd)", dense, by_cache(cached))


def _flash_attention_4() -> FlashLibrary:
    dense, ragged = _import("flash_attn.cute", "flash_attn_varlen_func")
    return FlashLibrary("FlashAttention 4", dense, by_used_lengths(ragged), FA4_HEAD_DIM_MAX)


def _import(module: str, ragged: str) -> tuple:
    return import_names(REQUIREMENTS.backend, module, "flash_attn_func", ragged)


_LOADERS = {
    "flash-attn-4": _flash_attention_4,
    "flash-attn-3": _flash_attention_3,
    "fa3-fwd": _fa3_fwd,
    "flash-attn": _flash_attention_2,
}
