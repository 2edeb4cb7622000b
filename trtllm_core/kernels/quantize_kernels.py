"""Fused SAGE quantization: one pass over K and V for statistics, one over Q, K and V for the copies.

K loses its mean over tokens, per head and channel (SageAttention, arXiv 2410.02367): every score of a query changes by
the same amount, which softmax does not see. V loses its mean too where it is large beside the spread (mean_and_largest),
and gets it back in the result, since a row of probabilities sums to one.
"""

import triton
import triton.language as tl

from .attention_kernel import _nan_maximum

INT8_MAX = tl.constexpr(127.0)
E4M3_MAX = tl.constexpr(448.0)
# an e4m3 number with room for a carried rounding error, at most 16 up there
E4M3_V_MAX = tl.constexpr(416.0)
# Added to every quantization scale: a block of zeros then divides by something, and NaN still comes through.
TINY = tl.constexpr(1e-30)
# x + ROUND - ROUND rounds |x| < 2^22 to the nearest even integer.
ROUND = tl.constexpr(12582912.0)
# rows of a statistics buffer: mean of K, mean, minimum and maximum of V, and a poison (0, or NaN if V is not finite)
STATISTICS = tl.constexpr(5)


@triton.jit
def _nan_minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absolute_maximum(x, AXIS: tl.constexpr):
    """max |x| along AXIS; NaN if any is NaN."""
    return tl.reduce(tl.abs(x), AXIS, _nan_maximum)


@triton.jit
def quantize_to(x, scale, TYPE: tl.constexpr):
    """x / scale in int8 (to nearest even) or e4m3; |x / scale| must not exceed the type's largest value."""
    x = x / scale
    if TYPE == tl.int8:
        quantized = ((x + ROUND) - ROUND).to(TYPE)
    else:
        quantized = x.to(TYPE)
    return quantized


@triton.jit
def mean_and_largest(mean, lowest, highest):
    # What is taken off V before it goes to e4m3, and the largest number left, per channel. The mean goes only where that
    # makes every V smaller. A token far from the others, which may never be attended to, can dominate the mean (text
    # tokens in cross-attention are such); taken off a small V it would leave nothing but rounding.
    left = _nan_maximum(highest - mean, mean - lowest)
    smaller = left <= 0.5 * tl.abs(mean)
    return tl.where(smaller, mean, 0.0), tl.where(smaller, left, _nan_maximum(highest, -lowest))


@triton.jit
def _taking_over(x, error):
    # x and the error of the key before it, unless that is large beside x: a small V next to a large one would drown
    return x + tl.where(tl.abs(error) <= 0.25 * tl.abs(x), error, 0.0)


@triton.jit
def diffuse_to_e4m3(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # [ROWS, COLUMNS] to e4m3, where each of four consecutive rows takes over the rounding error of the one before:
    # neighbouring keys get like probabilities, so most of an error meets its opposite in the sum over keys. Float64 errors
    # with and without, and what the limit of the carry is for: benchmarks/value_rounding.py.
    four = x.reshape(ROWS // 4, 4, COLUMNS).permute(0, 2, 1).reshape(ROWS // 4, COLUMNS, 2, 2)
    even, odd = tl.split(four)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    y0 = x0.to(tl.float8e4nv)
    x1 = _taking_over(x1, x0 - y0.to(tl.float32))
    y1 = x1.to(tl.float8e4nv)
    x2 = _taking_over(x2, x1 - y1.to(tl.float32))
    y2 = x2.to(tl.float8e4nv)
    x3 = _taking_over(x3, x2 - y2.to(tl.float32))
    four = tl.join(tl.join(y0, y2), tl.join(y1, x3.to(tl.float8e4nv)))
    return four.reshape(ROWS // 4, COLUMNS, 4).permute(0, 2, 1).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=["key_length"])
def statistics_kernel(
    key, value, partial, key_lengths,
    key_stride_batch, key_stride_row, key_stride_head,
    value_stride_batch, value_stride_row, value_stride_head,
    key_length,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    KEY: tl.constexpr, LENGTHS: tl.constexpr,
):
    """Statistics of tokens [program 0 * CHUNK, + CHUNK) of kv head `program 1`, batch `program 2`.

    partial: float32 [batch, kv heads, chunks, STATISTICS, HEAD_DIM]; sums come divided by the number of tokens.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    if LENGTHS:
        key_length = tl.load(key_lengths + batch)
    share = 1.0 / key_length.to(tl.float32)
    column = tl.arange(0, PADDED_DIM)
    real = column < HEAD_DIM
    key += batch * key_stride_batch + head * key_stride_head
    value += batch * value_stride_batch + head * value_stride_head
    key_sum = tl.zeros([PADDED_DIM], tl.float32)
    value_sum = tl.zeros([PADDED_DIM], tl.float32)
    poison = tl.zeros([PADDED_DIM], tl.float32)
    lowest = tl.full([PADDED_DIM], float("inf"), tl.float32)
    highest = tl.full([PADDED_DIM], -float("inf"), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = (row < key_length)[:, None]
        mask = inside & real[None, :]
        row = row.to(tl.int64)[:, None]
        if KEY:
            k = tl.load(key + row * key_stride_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
            key_sum += tl.sum(k * share, 0)
        v = tl.load(value + row * value_stride_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value_sum += tl.sum(v * share, 0)
        poison += tl.sum(v * 0.0, 0)
        lowest = _nan_minimum(lowest, tl.reduce(tl.where(inside, v, float("inf")), 0, _nan_minimum))
        highest = _nan_maximum(highest, tl.reduce(tl.where(inside, v, -float("inf")), 0, _nan_maximum))
    partial += (((batch * tl.num_programs(1) + head) * tl.num_programs(0) + chunk) * STATISTICS) * HEAD_DIM + column
    tl.store(partial, key_sum, mask=real)
    tl.store(partial + HEAD_DIM, value_sum, mask=real)
    tl.store(partial + 2 * HEAD_DIM, lowest, mask=real)
    tl.store(partial + 3 * HEAD_DIM, highest, mask=real)
    tl.store(partial + 4 * HEAD_DIM, poison, mask=real)


@triton.jit(do_not_specialize=["chunks"])
def finish_kernel(partial, key_mean, value_mean, value_scale, chunks, HEAD_DIM: tl.constexpr,
                  PADDED_DIM: tl.constexpr, KEY: tl.constexpr, FP8_VALUE: tl.constexpr):
    """Reduce `partial` over chunks for (batch, kv head) `program 0`; key_mean, value_mean, value_scale [.., HEAD_DIM].

    Without FP8_VALUE nothing is taken off V, so value_mean is only the poison.
    """
    pair = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_DIM)
    real = column < HEAD_DIM
    key_sum = tl.zeros([PADDED_DIM], tl.float32)
    value_sum = tl.zeros([PADDED_DIM], tl.float32)
    poison = tl.zeros([PADDED_DIM], tl.float32)
    lowest = tl.full([PADDED_DIM], float("inf"), tl.float32)
    highest = tl.full([PADDED_DIM], -float("inf"), tl.float32)
    partial += pair * chunks * STATISTICS * HEAD_DIM + column
    for _ in range(chunks):
        key_sum += tl.load(partial, mask=real, other=0.0)
        value_sum += tl.load(partial + HEAD_DIM, mask=real, other=0.0)
        lowest = _nan_minimum(lowest, tl.load(partial + 2 * HEAD_DIM, mask=real, other=0.0))
        highest = _nan_maximum(highest, tl.load(partial + 3 * HEAD_DIM, mask=real, other=0.0))
        poison += tl.load(partial + 4 * HEAD_DIM, mask=real, other=0.0)
        partial += STATISTICS * HEAD_DIM
    output = pair * HEAD_DIM + column
    if KEY:
        tl.store(key_mean + output, key_sum, mask=real)
    if FP8_VALUE:
        value_sum, largest = mean_and_largest(value_sum, lowest, highest)
        tl.store(value_mean + output, value_sum + poison, mask=real)
        tl.store(value_scale + output, largest / E4M3_V_MAX + TINY, mask=real)
    else:
        tl.store(value_mean + output, poison, mask=real)


@triton.jit(do_not_specialize=["length", "groups"])
def quantize_tokens_kernel(
    source, mean, out, out_scale, lengths,
    stride_batch, stride_row, stride_head, length, groups,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    MEAN: tl.constexpr, LENGTHS: tl.constexpr,
):
    """Q or K: tokens [program 0 * BLOCK, + BLOCK) of head `program 1`, batch `program 2`, less `mean`.

    Every TOKENS tokens share a scale.
    out: int8 or e4m3 [batch, heads, length, HEAD_DIM]; out_scale: float32 [batch, heads, groups].
    """
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + head
    real_length = length
    if LENGTHS:
        real_length = tl.load(lengths + batch)
    column = tl.arange(0, PADDED_DIM)
    real = (column < HEAD_DIM)[None, :]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row64 = row.to(tl.int64)[:, None]
    mask = (row < real_length)[:, None] & real
    source += batch * stride_batch + head * stride_head
    x = tl.load(source + row64 * stride_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if MEAN:
        x -= tl.load(mean + pair * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)[None, :]
        x = tl.where(mask, x, 0.0)
    TYPE: tl.constexpr = out.dtype.element_ty
    GROUPS: tl.constexpr = BLOCK // TOKENS
    x = x.reshape(GROUPS, TOKENS, PADDED_DIM)
    largest = tl.reduce(absolute_maximum(x, 2), 1, _nan_maximum)
    scale = largest / (INT8_MAX if TYPE == tl.int8 else E4M3_MAX) + TINY
    x = quantize_to(x, scale[:, None, None], TYPE).reshape(BLOCK, PADDED_DIM)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    tl.store(out_scale + pair * groups + group, scale, mask=group < groups)
    tl.store(out + (pair * length + row64) * HEAD_DIM + column[None, :], x, mask=(row < length)[:, None] & real)


@triton.jit(do_not_specialize=["length"])
def quantize_value_kernel(
    value, mean, scale, out, lengths,
    stride_batch, stride_row, stride_head, length, padded_length,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, LENGTHS: tl.constexpr,
):
    """V: tokens [program 0 * BLOCK, + BLOCK) of kv head `program 1`, batch `program 2`, (v - mean) / scale per channel.

    out: e4m3 [batch, kv heads, HEAD_DIM, padded_length], about zero past the end, keys 8g+2c+e of each 16 at 4c+2g+e.
    """
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    channel = (batch * tl.num_programs(1) + head) * HEAD_DIM + tl.arange(0, PADDED_DIM)
    if LENGTHS:
        length = tl.load(lengths + batch)
    column = tl.arange(0, PADDED_DIM)
    real = column < HEAD_DIM
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < length)[:, None] & real[None, :]
    value += batch * stride_batch + head * stride_head
    v = tl.load(value + row.to(tl.int64)[:, None] * stride_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    v -= tl.load(mean + channel, mask=real, other=0.0)[None, :]
    v = tl.where(mask, v, 0.0)
    v = v / tl.load(scale + channel, mask=real, other=1.0)[None, :]
    v = diffuse_to_e4m3(v, BLOCK, PADDED_DIM)
    v = v.reshape(BLOCK // 16, 2, 4, 2, PADDED_DIM).permute(0, 2, 1, 3, 4).reshape(BLOCK, PADDED_DIM)
    tl.store(out + channel[:, None] * padded_length + row[None, :], v.T,
             mask=real[:, None] & (row < padded_length)[None, :])
