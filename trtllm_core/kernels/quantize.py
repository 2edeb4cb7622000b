"""Launch the SAGE quantization kernels: K smoothing, K in int8 or e4m3, V in e4m3 where the GPU has FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .quantize_kernels import STATISTICS, finish_kernel, quantize_kernel, statistics_kernel

CHUNK = 1024  # tokens per program of the statistics pass
BLOCK = 128  # tokens per program of the quantization pass; V's copy is padded to whole blocks
KEY_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


class Quantized(NamedTuple):
    """K and V as the attention kernel reads them under SAGE; see `quantize_kernel` for the layouts."""

    key: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor | None
    value_scale: torch.Tensor | None
    value_mean: torch.Tensor


def _token_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of [batch, tokens, heads, head_dim] over batch, tokens and heads."""
    return tensor.stride()[:3]


def channel_statistics(key, value, key_lengths, *, smooth_key: bool, fp8_value: bool):
    """(key_mean, value_mean, value_scale), each float32 [batch, kv heads, head_dim] or None.

    With neither flag only value_mean is made, and it is 0 where a channel of V is finite and NaN elsewhere: added to a
    result that skipped tiles, it keeps what dense attention does with such a V.
    """
    batch, key_length, heads, head_dim = value.shape
    padded_dim = triton.next_power_of_2(head_dim)
    chunks = triton.cdiv(key_length, CHUNK)
    new = value.new_empty
    partial = new((batch, heads, chunks, STATISTICS.value, head_dim), dtype=torch.float32)
    shape = (batch, heads, head_dim)
    key_mean = new(shape, dtype=torch.float32) if smooth_key else None
    value_mean = new(shape, dtype=torch.float32)
    value_scale = new(shape, dtype=torch.float32) if fp8_value else None
    statistics_kernel[(chunks, heads, batch)](
        key, value, partial, key_lengths, *_token_strides(key), *_token_strides(value), key_length,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, CHUNK=CHUNK, BLOCK=64, KEY=smooth_key,
        LENGTHS=key_lengths is not None, num_warps=4,
    )
    finish_kernel[(batch * heads,)](
        partial, key_mean, value_mean, value_scale, chunks, HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
        KEY=smooth_key, FP8_VALUE=fp8_value, num_warps=1,
    )
    return key_mean, value_mean, value_scale


def quantize_key_value(key, value, dtype_qk, k_block_size, key_lengths, *, fp8_value: bool) -> Quantized:
    """Quantize K (and V to e4m3 if `fp8_value`); key, value [batch, tokens, kv heads, head_dim], any outer strides."""
    batch, key_length, heads, head_dim = key.shape
    key_mean, value_mean, value_scale = channel_statistics(
        key, value, key_lengths, smooth_key=True, fp8_value=fp8_value
    )
    padded_length = triton.cdiv(key_length, BLOCK) * BLOCK
    key_groups = triton.cdiv(key_length, k_block_size)
    key_out = key.new_empty((batch, heads, key_length, head_dim), dtype=KEY_TYPES[dtype_qk])
    key_scale = key.new_empty((batch, heads, key_groups), dtype=torch.float32)
    value_out = None
    if fp8_value:
        value_out = key.new_empty((batch, heads, head_dim, padded_length), dtype=torch.float8_e4m3fn)
    quantize_kernel[(padded_length // BLOCK, heads, batch)](
        key, value, key_mean, value_mean, value_scale, key_out, key_scale, value_out, key_lengths,
        *_token_strides(key), *_token_strides(value), key_length, padded_length, key_groups,
        HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim), BLOCK=BLOCK, K_BLOCK=k_block_size,
        FP8_VALUE=fp8_value, LENGTHS=key_lengths is not None, num_warps=8,
    )
    return Quantized(key_out, key_scale, value_out, value_scale, value_mean)
