"""FLASHINFER_ATTN: FlashInfer's dense single_prefill_with_kv_cache, and its FP8 kernel on sm_120.

The FP8 kernel (`quant.dtype_qk="fp8_e4m3"`, RTX 50 and RTX PRO) is written from FlashInfer 0.7.4's
source and was not run: no such GPU was at hand.
"""

from __future__ import annotations

import torch

from ..device import Device
from ..masks import MaskReader, as_4d
from ..specs import FLASHINFER_DTYPES, AttnQuantSpec
from . import HALF, AttentionCall, Request, Requirements, Unavailable, import_names, last_contiguous
from ._flashinfer import COMPILER, FLASHINFER, build, key_lengths, mismatches, sequences, too_old

REQUIREMENTS = Requirements(
    backend="FLASHINFER_ATTN",
    summary="FlashInfer single_prefill_with_kv_cache",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dims=(64, 128, 256),
    mask="any",
    skip_softmax=True,
    quant_dtypes=(*FLASHINFER_DTYPES, "fp8_e4m3"),
    options=("dtype_vo", "flashinfer_backend"),
    packages=(FLASHINFER,),
)

FP8_CAPABILITY = (12, 0)
FP8_VERSION = "0.7.4"
FP8_BACKEND = "cute-dsl-prims"
KERNELS = ("auto", "fa2", "fa3")
TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# Filled by `load`.
_prefill = _choose = _fp8_prefill = None
_prepared: set[tuple] = set()
_masks = MaskReader()


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """What the quant block may not ask for, and what only the FP8 kernel can do."""
    quant = request.spec.quant or AttnQuantSpec()
    found = list(mismatches(device))
    is_fp8 = quant.dtype_qk == "fp8_e4m3"
    if is_fp8:
        found += _fp8_refusals(request, device)
    elif request.spec.skip_softmax is not None:
        found.append(
            "its only kernel with Skip-Softmax is the FP8 one on sm_120 (set quant.dtype_qk='fp8_e4m3')"
        )
    kernels = (FP8_BACKEND,) if is_fp8 else KERNELS
    if quant.flashinfer_backend not in (None, *kernels):
        choices = " or ".join(repr(k) for k in kernels)
        found.append(f"quant.flashinfer_backend={quant.flashinfer_backend!r} must be {choices} here")
    if quant.flashinfer_backend == "fa3" and device.capability not in (None, (9, 0)):
        found.append("quant.flashinfer_backend='fa3' needs sm_90")
    if quant.flashinfer_backend == "fa3" and request.mask != "none":
        found.append("quant.flashinfer_backend='fa3' drops a mask (leave it to auto, or choose 'fa2')")
    pair = (quant.dtype_qk, quant.dtype_vo)
    if not is_fp8 and None not in pair and quant.dtype_qk != quant.dtype_vo:
        found.append(
            f"quant.dtype_qk={quant.dtype_qk!r} and quant.dtype_vo={quant.dtype_vo!r} must be the "
            "same: FlashInfer reads K and V as one dtype"
        )
    return tuple(found)


def _fp8_refusals(request: Request, device: Device) -> list[str]:
    found = []
    if device.capability != FP8_CAPABILITY:
        found.append(f"quant.dtype_qk='fp8_e4m3' has a kernel on sm_120 only, this is {device.label}")
    if request.mask != "none":
        found.append("its FP8 kernel takes no mask")
    if request.spec.quant.dtype_vo is not None:
        found.append("its FP8 kernel has an FP8 V (remove quant.dtype_vo)")
    return found + list(too_old("quant.dtype_qk='fp8_e4m3'", FP8_VERSION, device))


def load(device: Device) -> None:
    """Import the prefill function; of the FP8 kernel only where it can run."""
    global _prefill, _choose, _fp8_prefill
    backend = REQUIREMENTS.backend
    (_prefill,) = import_names(backend, "flashinfer.prefill", "single_prefill_with_kv_cache")
    (_choose,) = import_names(backend, "flashinfer.utils", "determine_attention_backend")
    if device.capability == FP8_CAPABILITY and device.has("flashinfer", FP8_VERSION):
        module = "flashinfer.attention.cute_dsl"
        try:
            (_fp8_prefill,) = import_names(backend, module, "sm120_fmha_fp8_ragged_prefill")
        except Unavailable:
            _fp8_prefill = None  # it needs nvidia-cutlass-dsl; `run` says so where it is asked for


def run(call: AttentionCall) -> torch.Tensor:
    """[batch, query tokens, heads, head_dim] in the dtype it was computed in."""
    quant = call.quant or AttnQuantSpec()
    if quant.dtype_qk == "fp8_e4m3":
        return _run_fp8(call)
    dtype = TORCH_DTYPES.get(quant.dtype_qk or quant.dtype_vo, call.query.dtype)
    keep = None if call.mask is None else _keep(call)
    kernel = _prepared_kernel(call, dtype, quant.flashinfer_backend)
    rows = []
    for row, length in enumerate(key_lengths(call)):
        if length == 0:
            rows.append(torch.zeros_like(call.query[row], dtype=dtype))
            continue
        query, key, value = (
            last_contiguous(x).to(dtype) for x in (call.query[row], call.key[row, :length], call.value[row, :length])
        )
        features = {} if keep is None else {"custom_mask": keep[row, :, :length]}
        rows.append(_prefill(query, key, value, sm_scale=call.scale, backend=kernel, **features))
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _prepared_kernel(call: AttentionCall, dtype: torch.dtype, asked: str | None) -> str:
    """The kernel family for `call`, compiled if this machine lacks it."""
    kernel, masked = asked or "auto", call.mask is not None
    if kernel == "auto":
        kernel = _choose(call.query.device, 0, False, masked, dtype, dtype)
    if masked and kernel == "fa3":
        raise ValueError("FlashInfer's fa3 kernels drop a mask: leave quant.flashinfer_backend to auto")
    head_dim = call.query.shape[-1]
    key = (kernel, dtype, head_dim, masked)
    if key not in _prepared:
        token = torch.zeros(1, 1, head_dim, dtype=dtype, device=call.query.device)
        features = {}
        if masked:
            features["custom_mask"] = torch.ones(1, 1, dtype=torch.bool, device=token.device)
        build(
            REQUIREMENTS.backend,
            f"{kernel} kernels for {'masks, ' if masked else ''}{str(dtype).removeprefix('torch.')}, head size {head_dim}",
            lambda: _prefill(token, token, token, backend=kernel, **features),
            COMPILER,
        )
        _prepared.add(key)
    return kernel


def _keep(call: AttentionCall) -> torch.Tensor:
    """The mask as bool [batch, query tokens, key tokens]; ValueError where a boolean cannot say it."""
    mask = as_4d(call.mask)
    if mask.shape[1] > 1 and mask.stride(1) != 0:
        raise ValueError("FLASHINFER_ATTN takes one mask for all heads, this one differs by head")
    if mask.dtype != torch.bool:
        if not _masks.is_boolean(call.mask):
            raise ValueError("FLASHINFER_ATTN takes masks that hide or show, not ones that add a bias")
        mask = mask == 0
    batch, tokens = call.query.shape[0], (call.query.shape[1], call.key.shape[1])
    return mask[:, 0].expand(batch, *tokens)


def _run_fp8(call: AttentionCall) -> torch.Tensor:
    """The FP8 kernel, λ given directly. Not run on any GPU.

    It takes no scale per head, and one read on the host would wait for the GPU. So q and k are
    brought to the same range, a factor into one and out of the other, and V's scale per channel is
    multiplied into the output. K's mean over the tokens is taken off, which the softmax cannot see.
    """
    if _fp8_prefill is None:
        reason = "flashinfer has no FP8 kernel for sm_120 here (pip install 'nvidia-cutlass-dsl>=4.7')"
        raise Unavailable(REQUIREMENTS.backend, (reason,))
    groups = call.query.shape[2] // call.key.shape[2]
    key = call.key - call.key.mean(1, keepdim=True, dtype=torch.float32).to(call.key.dtype)
    query_peak = call.query.abs().amax((1, 3), keepdim=True).unflatten(2, (-1, groups)).amax(3)
    ratio = (key.abs().amax((1, 3), keepdim=True) / query_peak.clamp_min(1e-6)).float().sqrt()
    ratio = ratio.clamp_min(1e-6)
    value_scale = call.value.abs().amax(1, keepdim=True).float().clamp_min(1e-6) / 448.0
    call.query = (call.query * ratio.repeat_interleave(groups, 2)).to(torch.float8_e4m3fn)
    call.key = (key / ratio).to(torch.float8_e4m3fn)
    output_dtype = call.value.dtype
    call.value = (call.value / value_scale).to(torch.float8_e4m3fn)
    out = torch.empty(call.query.shape, dtype=output_dtype, device=call.query.device)
    for part in sequences(call, out):
        features = {"skip_softmax_threshold": call.threshold} if call.threshold else {}
        _fp8_prefill(
            part.query,
            part.key,
            part.value,
            part.out,
            part.starts(part.query_length),
            part.starts(part.key_length),
            max_seqlen_q=part.query_length,
            sm_scale=call.scale,
            **features,
        )
    return out.mul_(value_scale.repeat_interleave(groups, 2))
