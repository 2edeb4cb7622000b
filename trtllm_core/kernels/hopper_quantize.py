"""SAGE quantization for the Hopper kernels: Q and K to INT8 or FP8, V to FP8, in fused passes.

Statistics read K and V once: the mean of K per channel, which is subtracted from K (it adds the same to all
scores of a row, so softmax does not see it), and mean and range of V per channel; a mean that is large beside
the spread is subtracted before V is quantized and added to the output. Rounding errors of V are carried to the
next key. Both are as in the portable kernels, and quantize_kernels.py says why. The quantizing passes read each
tensor once more.
Every reduction keeps NaN, so that a NaN input gives NaN scales and outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .quantize_kernels import E4M3_V_MAX, diffuse_to_e4m3, mean_and_largest

TILE = 128  # tokens of a program, and what padded lengths are a multiple of
CHUNK = 1024  # tokens of a program of the statistics pass
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}
STORAGE = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
SMALLEST_RANGE = 1e-12  # an all-zero group gets a scale that is neither 0 nor denormal


class QuantizedTensors(NamedTuple):
    """query, key: [batch, heads, tokens, head_dim]; value: [batch, kv heads, head_dim, padded tokens], keys renamed
    within each 16 as the FP8 left operand wants them (hopper_attention._as_operand).

    query_scale: [batch, heads, tokens], softmax scale and log2 e included; key_scale: [batch, kv heads, padded groups];
    value_scale, value_mean: [batch, kv heads, head_dim]; all float32.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    value_mean: torch.Tensor


@triton.jit
def _maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _length(key_lengths, batch, tokens):
    if key_lengths is None:
        return tokens
    else:
        return tl.minimum(tl.load(key_lengths + batch), tokens)


@triton.jit
def _rows(tensor, stride_batch, stride_token, stride_head, batch, head, tokens, HEAD_DIM: tl.constexpr):
    """Pointers to [len(tokens), head_dim] values of one head."""
    base = tensor + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return base + tokens.to(tl.int64)[:, None] * stride_token + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def statistics_kernel(
    key, value, partial, key_lengths, tokens,
    key_batch, key_token, key_head, value_batch, value_token, value_head,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial[batch, head, chunk] = sum of K, sum, maximum of V and of -V over a chunk of tokens, per channel."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    length = _length(key_lengths, batch, tokens)
    channels = tl.arange(0, HEAD_DIM)
    key_sum = tl.zeros([HEAD_DIM], tl.float32)
    value_sum = tl.zeros([HEAD_DIM], tl.float32)
    value_high = tl.full([HEAD_DIM], -float("inf"), tl.float32)
    value_low = tl.full([HEAD_DIM], -float("inf"), tl.float32)
    for first in range(0, CHUNK, BLOCK):
        token = chunk * CHUNK + first + tl.arange(0, BLOCK)
        valid = (token < length)[:, None]
        k = tl.load(_rows(key, key_batch, key_token, key_head, batch, head, token, HEAD_DIM), mask=valid, other=0.0)
        v = tl.load(_rows(value, value_batch, value_token, value_head, batch, head, token, HEAD_DIM), mask=valid, other=0.0)
        v = v.to(tl.float32)
        key_sum += tl.sum(k.to(tl.float32), 0)
        value_sum += tl.sum(v, 0)
        high = tl.reduce(tl.where(valid, v, -float("inf")), 0, _maximum_or_nan)
        low = tl.reduce(tl.where(valid, -v, -float("inf")), 0, _maximum_or_nan)
        value_high = _maximum_or_nan(value_high, high)
        value_low = _maximum_or_nan(value_low, low)
    heads = tl.num_programs(1)
    partial += ((batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk) * (4 * HEAD_DIM) + channels
    tl.store(partial, key_sum)
    tl.store(partial + HEAD_DIM, value_sum)
    tl.store(partial + 2 * HEAD_DIM, value_high)
    tl.store(partial + 3 * HEAD_DIM, value_low)


@triton.jit
def finish_kernel(partial, key_mean, value_mean, value_scale, key_lengths, tokens, heads, chunks, smallest, HEAD_DIM: tl.constexpr):
    """Means and V's scale of one head from its chunks' partial statistics."""
    head = tl.program_id(0)
    length = tl.maximum(_length(key_lengths, head // heads, tokens), 1)
    channels = tl.arange(0, HEAD_DIM)
    partial += head.to(tl.int64) * chunks * (4 * HEAD_DIM) + channels
    key_sum = tl.zeros([HEAD_DIM], tl.float32)
    value_sum = tl.zeros([HEAD_DIM], tl.float32)
    value_high = tl.full([HEAD_DIM], -float("inf"), tl.float32)
    value_low = tl.full([HEAD_DIM], -float("inf"), tl.float32)
    for _ in range(chunks):
        key_sum += tl.load(partial)
        value_sum += tl.load(partial + HEAD_DIM)
        value_high = _maximum_or_nan(value_high, tl.load(partial + 2 * HEAD_DIM))
        value_low = _maximum_or_nan(value_low, tl.load(partial + 3 * HEAD_DIM))
        partial += 4 * HEAD_DIM
    mean, largest = mean_and_largest(value_sum / length, -value_low, value_high)
    offset = head * HEAD_DIM + channels
    tl.store(key_mean + offset, key_sum / length)
    tl.store(value_mean + offset, mean + largest * 0.0)  # NaN where V is not finite
    tl.store(value_scale + offset, _maximum_or_nan(largest, smallest) / E4M3_V_MAX)


@triton.jit
def quantize_tokens_kernel(
    source, mean, quantized, scales, key_lengths, tokens,
    stride_batch, stride_token, stride_head, scale_stride, multiplier, largest, smallest,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Q or K: GROUP tokens share a scale. quantized: [batch, heads, tokens, head_dim], scales: [batch, heads, scale_stride].

    mean: subtracted, float32 [batch, heads, head_dim], or None. PER_TOKEN stores the scale of every token, times
    multiplier; otherwise that of every group, for whole tiles.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2)
    flat = (batch * tl.num_programs(1) + head).to(tl.int64)
    length = _length(key_lengths, batch, tokens)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = (token < length)[:, None]
    x = tl.load(_rows(source, stride_batch, stride_token, stride_head, batch, head, token, HEAD_DIM), mask=valid, other=0.0)
    x = x.to(tl.float32)
    if mean is not None:
        x = tl.where(valid, x - tl.load(mean + flat * HEAD_DIM + tl.arange(0, HEAD_DIM))[None, :], 0.0)
    GROUPS: tl.constexpr = TILE // GROUP
    widest = tl.reduce(tl.reshape(tl.reduce(tl.abs(x), 1, _maximum_or_nan), [GROUPS, GROUP]), 1, _maximum_or_nan)
    scale = _maximum_or_nan(widest, smallest) / largest
    per_token = tl.reshape(tl.broadcast_to(scale[:, None], [GROUPS, GROUP]), [TILE])
    x = x * (1.0 / per_token)[:, None]
    if quantized.dtype.element_ty == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # rounds to the nearest integer, ties to even
    target = quantized + flat * tokens * HEAD_DIM + token.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(target, x.to(quantized.dtype.element_ty), mask=(token < tokens)[:, None])
    if PER_TOKEN:
        tl.store(scales + flat * scale_stride + token, per_token * multiplier, mask=token < tokens)
    else:
        tl.store(scales + flat * scale_stride + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), scale * multiplier)


@triton.jit
def quantize_values_kernel(
    source, mean, scales, quantized, key_lengths, tokens,
    stride_batch, stride_token, stride_head, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """V, transposed: quantized [batch, heads, head_dim, padded tokens]; about 0 past the end.

    Position 4 c + 2 g + e of each 16 holds key 8 g + 2 c + e.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2)
    flat = (batch * tl.num_programs(1) + head).to(tl.int64)
    padded = (tl.num_programs(0) * TILE).to(tl.int64)
    length = _length(key_lengths, batch, tokens)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channels = tl.arange(0, HEAD_DIM)
    valid = (token < length)[:, None]
    x = tl.load(_rows(source, stride_batch, stride_token, stride_head, batch, head, token, HEAD_DIM), mask=valid, other=0.0)
    x = x.to(tl.float32) - tl.load(mean + flat * HEAD_DIM + channels)[None, :]
    x = tl.where(valid, x / tl.load(scales + flat * HEAD_DIM + channels)[None, :], 0.0)
    rounded = diffuse_to_e4m3(x, TILE, HEAD_DIM)
    rounded = rounded.reshape(TILE // 16, 2, 4, 2, HEAD_DIM).permute(0, 2, 1, 3, 4).reshape(TILE, HEAD_DIM)
    target = quantized + (flat * HEAD_DIM + channels[:, None]) * padded + token[None, :]
    tl.store(target, tl.trans(rounded))


@triton.jit
def nan_channels_kernel(
    value, marks, key_lengths, tokens, stride_batch, stride_token, stride_head,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write NaN into marks [batch, heads, head_dim] where a channel of V has a number that is not finite."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    length = _length(key_lengths, batch, tokens)
    largest = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, CHUNK, BLOCK):
        token = tl.program_id(0) * CHUNK + first + tl.arange(0, BLOCK)
        valid = (token < length)[:, None]
        x = tl.load(_rows(value, stride_batch, stride_token, stride_head, batch, head, token, HEAD_DIM), mask=valid, other=0.0)
        largest = _maximum_or_nan(largest, tl.reduce(tl.abs(x.to(tl.float32)), 0, _maximum_or_nan))
    marks += (batch * tl.num_programs(1) + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(marks, largest * float("nan"), mask=(largest < float("inf")) == 0)


def nan_channels(value, key_lengths=None):
    """float32 [batch, heads, head_dim]: 0, or NaN where that channel of V holds NaN or inf among its keys.

    Dense attention gives NaN there; Skip-Softmax may never load the number. Reads V once.
    """
    batch, tokens, heads, head_dim = value.shape
    marks = torch.zeros((batch, heads, head_dim), dtype=torch.float32, device=value.device)
    nan_channels_kernel[(triton.cdiv(tokens, CHUNK), heads, batch)](
        value, marks, key_lengths, tokens, *value.stride()[:3],
        HEAD_DIM=head_dim, CHUNK=CHUNK, BLOCK=64, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return marks


def quantize_for_hopper(query, key, value, *, dtype_qk, q_block_size, k_block_size, multiplier, key_lengths=None):
    """Quantized copies and scales of query [batch, tokens, heads, head_dim] and of key and value, any outer strides.

    multiplier: softmax scale * log2 e, folded into the scales of Q. key_lengths: int32 [batch] or None; K and V
    beyond are treated as absent. Memory: half of the three tensors; for scales about 4 bytes a token and head.
    """
    batch, query_tokens, heads, head_dim = query.shape
    tokens, kv_heads = key.shape[1], key.shape[2]
    largest, storage = LARGEST[dtype_qk], STORAGE[dtype_qk]
    chunks = triton.cdiv(tokens, CHUNK)
    tiles = triton.cdiv(tokens, TILE)
    new = query.new_empty
    partial = new((batch, kv_heads, chunks, 4, head_dim), dtype=torch.float32)
    key_mean, value_mean, value_scale = new((3, batch, kv_heads, head_dim), dtype=torch.float32).unbind()
    statistics_kernel[(chunks, kv_heads, batch)](
        key, value, partial, key_lengths, tokens, *key.stride()[:3], *value.stride()[:3],
        HEAD_DIM=head_dim, CHUNK=CHUNK, BLOCK=64, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    finish_kernel[(batch * kv_heads,)](
        partial, key_mean, value_mean, value_scale, key_lengths, tokens, kv_heads, chunks, SMALLEST_RANGE,
        HEAD_DIM=head_dim, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    del partial
    query_quantized = new((batch, heads, query_tokens, head_dim), dtype=storage)
    query_scale = new((batch, heads, query_tokens), dtype=torch.float32)
    quantize_tokens_kernel[(triton.cdiv(query_tokens, TILE), heads, batch)](
        query, None, query_quantized, query_scale, None, query_tokens, *query.stride()[:3],
        query_tokens, multiplier, largest, SMALLEST_RANGE,
        HEAD_DIM=head_dim, TILE=TILE, GROUP=q_block_size, PER_TOKEN=True, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    key_quantized = new((batch, kv_heads, tokens, head_dim), dtype=storage)
    key_scale = new((batch, kv_heads, tiles * TILE // k_block_size), dtype=torch.float32)
    quantize_tokens_kernel[(tiles, kv_heads, batch)](
        key, key_mean, key_quantized, key_scale, key_lengths, tokens, *key.stride()[:3],
        key_scale.shape[2], 1.0, largest, SMALLEST_RANGE,
        HEAD_DIM=head_dim, TILE=TILE, GROUP=k_block_size, PER_TOKEN=False, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    value_quantized = new((batch, kv_heads, head_dim, tiles * TILE), dtype=torch.float8_e4m3fn)
    quantize_values_kernel[(tiles, kv_heads, batch)](
        value, value_mean, value_scale, value_quantized, key_lengths, tokens, *value.stride()[:3],
        HEAD_DIM=head_dim, TILE=TILE, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return QuantizedTensors(
        query_quantized, key_quantized, value_quantized, query_scale, key_scale, value_scale, value_mean
    )
