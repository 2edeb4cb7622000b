"""TRITON_ATTN: our own kernels, Ampere and later; on Hopper the warp-specialized ones where they can run."""

from __future__ import annotations

import functools
import logging

import torch

from ..device import UNKNOWN_VERSION, Device
from ..kernels import hopper, tile_shape, triton_attention
from ..kernels import tile_count as count_tiles
from ..specs import SAGE_DTYPES, AttnQuantSpec
from . import HALF, AttentionCall, Package, Request, Requirements, Unavailable, last_contiguous

log = logging.getLogger("trtllm_attention")

REQUIREMENTS = Requirements(
    backend="TRITON_ATTN",
    summary="this pack's Triton kernels",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dims=(64, 80, 96, 128, 256),
    mask="padding",
    skip_softmax=True,
    quant_dtypes=SAGE_DTYPES,
    options=("q_block_size", "k_block_size"),
    packages=(Package("triton", "pip install triton, on Windows triton-windows"),),
)

PORTABLE, HOPPER = "portable", "hopper"
# Fewer keys than this run in 16 bits where SAGE is asked for: quantizing then costs more than it saves, and the errors of
# few keys do not average out; a block of them is shorter still. `python benchmarks/short_keys.py`, 75,600 queries x 40 heads x 128 on an H200, Hopper kernels, dense / INT8 / FP8 in ms:
# 512 keys 1.72 / 2.16 / 2.02, 1,024 keys 2.85 / 2.90 / 2.72, 2,048 keys 5.25 / 5.20 / 4.46. The portable kernels:
# 1.90 / 2.17 / 2.16, 3.39 / 3.36 / 3.22, 6.30 / 5.57 / 5.34.
FEWEST_SAGE_KEYS = 1024


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """FP8 products need the tensor cores of Ada or later."""
    quant = request.spec.quant
    is_fp8 = quant is not None and quant.dtype_qk == "fp8_e4m3"
    if is_fp8 and device.capability is not None and device.capability < (8, 9):
        return ("quant.dtype_qk='fp8_e4m3' needs sm_89 or newer (use 'int8')",)
    return ()


def load(device: Device) -> None:
    try:
        import triton  # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise Unavailable(REQUIREMENTS.backend, (f"Triton cannot be imported: {error}",)) from error


def run(call: AttentionCall) -> torch.Tensor:
    quant = _quant(call)
    attention = hopper.hopper_attention if kernels(call) == HOPPER else triton_attention
    query, key, value = map(last_contiguous, (call.query, call.key, call.value))
    return attention(
        query,
        key,
        value,
        scale=call.scale,
        threshold=call.threshold,
        quant=quant,
        key_lengths=call.key_lengths,
        kv_order=call.kv_order,
        skipped=call.skipped,
    )


def variant(call: AttentionCall) -> str:
    """What runs `call`, for reports: the kernels, and whether SAGE sits out."""
    return kernels(call) if _quant(call) is call.quant else f"{kernels(call)} without SAGE"


def kernels(call: AttentionCall) -> str:
    """Which kernels run `call`: "hopper" or "portable"; of float32 inputs, what runs them once they are cast."""
    dtype = REQUIREMENTS.compute_dtype(call.query.dtype)
    reasons = _hopper_reasons(call.query.device, dtype, call.query.shape[3], _quant(call))
    return PORTABLE if reasons else HOPPER


def tile_count(call: AttentionCall) -> int:
    """How many (query tile, KV tile) pairs `call` consists of, padding of key_lengths included."""
    head_dim, quant, skip = call.query.shape[3], _quant(call), call.threshold is not None
    if kernels(call) == HOPPER:
        tile = hopper.tile_shape(head_dim, quant, skip=skip)
    else:
        tile = tile_shape(torch.cuda.get_device_capability(call.query.device), head_dim, quant, skip=skip)
    batch, query_length, heads, _ = call.query.shape
    return count_tiles(
        tile, batch=batch, heads=heads, query_length=query_length, key_length=call.key.shape[1]
    )


def _quant(call: AttentionCall) -> AttnQuantSpec | None:
    """call.quant, or None where SAGE sits out for want of keys, said once."""
    quant = call.quant
    if quant is None or not quant.is_sage or call.key.shape[1] >= FEWEST_SAGE_KEYS:
        return quant
    _say_short()
    return None


@functools.cache
def _triton_version() -> str:
    import triton

    return getattr(triton, "__version__", UNKNOWN_VERSION)


@functools.cache
def _hopper_reasons(device, dtype, head_dim, quant) -> tuple[str, ...]:
    """Why the Hopper kernels do not run such a call; said once where only Triton is in the way."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    reasons = hopper.unsupported(capability, dtype, head_dim, quant, _triton_version())
    if reasons and capability == (9, 0):
        log.info("TRITON_ATTN uses its portable kernels for head size %d: %s", head_dim, "; ".join(reasons))
    return reasons


@functools.cache
def _say_short() -> None:
    log.warning(
        "TRITON_ATTN: calls with fewer than %d keys, such as cross-attention over text, run without SAGE, which would "
        "be slower and less exact there", FEWEST_SAGE_KEYS,
    )  # fmt: skip
