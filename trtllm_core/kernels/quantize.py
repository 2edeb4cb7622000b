"""Launch the SAGE quantization kernels: Q and K in int8 or e4m3, V in e4m3 where the GPU has FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .configs import padded_head_dim
from .quantize_kernels import (
    STATISTICS,
    finish_kernel,
    quantize_tokens_kernel,
    quantize_value_kernel,
    statistics_kernel,
)

CHUNK = 1024  # tokens per program of the statistics pass
BLOCK = 128  # tokens per program of the quantization passes; V's copy is padded to whole blocks
QK_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


class Quantized(NamedTuple):
    """What the attention kernel reads under SAGE; see the kernels for the layouts. value None: V stays as it is."""

    query: torch.Tensor
    key: torch.Tensor
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor | None
    value_scale: torch.Tensor | None
    value_mean: torch.Tensor


def channel_statistics(key, value, key_lengths, *, smooth_key: bool, fp8_value: bool):
    """(key_mean, value_mean, value_scale), each float32 [batch, kv heads, head_dim] or None.

    With neither flag only value_mean is made, and it is 0 where a channel of V is finite and NaN elsewhere: added to a
    result that skipped tiles, it keeps what dense attention does with such a V.
    """
    batch, key_length, heads, head_dim = value.shape
    padded_dim = padded_head_dim(head_dim)
    chunks = triton.cdiv(key_length, CHUNK)
    shape = (batch, heads, head_dim)
    partial = value.new_empty((batch, heads, chunks, STATISTICS.value, head_dim), dtype=torch.float32)
    key_mean = value.new_empty(shape, dtype=torch.float32) if smooth_key else None
    value_mean = value.new_empty(shape, dtype=torch.float32)
    value_scale = value.new_empty(shape, dtype=torch.float32) if fp8_value else None
    statistics_kernel[(chunks, heads, batch)](
        key, value, partial, key_lengths, *key.stride()[:3], *value.stride()[:3], key_length,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, CHUNK=CHUNK, BLOCK=64, KEY=smooth_key,
        LENGTHS=key_lengths is not None, num_warps=4,
    )
    finish_kernel[(batch * heads,)](
        partial, key_mean, value_mean, value_scale, chunks, HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
        KEY=smooth_key, FP8_VALUE=fp8_value, num_warps=1,
    )
    return key_mean, value_mean, value_scale


def _quantize_tokens(tensor, mean, dtype, tokens, lengths):
    """([batch, heads, length, head_dim] in `dtype`, float32 scales [batch, heads, groups of `tokens`])."""
    batch, length, heads, head_dim = tensor.shape
    groups = triton.cdiv(length, tokens)
    out = tensor.new_empty((batch, heads, length, head_dim), dtype=dtype)
    scale = tensor.new_empty((batch, heads, groups), dtype=torch.float32)
    quantize_tokens_kernel[(triton.cdiv(length, BLOCK), heads, batch)](
        tensor, mean, out, scale, lengths, *tensor.stride()[:3], length, groups,
        HEAD_DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim), BLOCK=BLOCK, TOKENS=tokens,
        MEAN=mean is not None, LENGTHS=lengths is not None, num_warps=8,
    )
    return out, scale


def _quantize_value(value, mean, scale, lengths):
    """e4m3 [batch, kv heads, head_dim, tokens padded to whole blocks]."""
    batch, length, heads, head_dim = value.shape
    padded_length = triton.cdiv(length, BLOCK) * BLOCK
    out = value.new_empty((batch, heads, head_dim, padded_length), dtype=torch.float8_e4m3fn)
    quantize_value_kernel[(padded_length // BLOCK, heads, batch)](
        value, mean, scale, out, lengths, *value.stride()[:3], length, padded_length,
        HEAD_DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim), BLOCK=BLOCK,
        LENGTHS=lengths is not None, num_warps=8,
    )
    return out


def quantize(query, key, value, quant, key_lengths, *, fp8_value: bool) -> Quantized:
    """Quantize Q and K as `quant` says, and V to e4m3 if `fp8_value`; all [batch, tokens, heads, head_dim]."""
    dtype = QK_TYPES[quant.dtype_qk]
    key_mean, value_mean, value_scale = channel_statistics(
        key, value, key_lengths, smooth_key=True, fp8_value=fp8_value
    )
    query_out, query_scale = _quantize_tokens(query, None, dtype, quant.q_block_size, None)
    key_out, key_scale = _quantize_tokens(key, key_mean, dtype, quant.k_block_size, key_lengths)
    value_out = _quantize_value(value, value_mean, value_scale, key_lengths) if fp8_value else None
    return Quantized(query_out, key_out, query_scale, key_scale, value_out, value_scale, value_mean)
