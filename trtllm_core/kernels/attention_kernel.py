"""The attention kernel: dense, Skip-Softmax, SAGE, and Skip-Softmax with SAGE, by compile-time switches.

One program computes BLOCK_M query rows of one head against the KV tiles of its sequence, with the running softmax
of Milakov and Gimelshein (arXiv 1805.02867) tiled as in FlashAttention-2 (arXiv 2307.08691), in base 2. What it adds:

Skip-Softmax. After Q K^T of a tile, one vote per program: unless some valid row has
tile_max - running_max >= log2(threshold), the tile's softmax, V load and P V are skipped and nothing changes.
A comparison with NaN keeps the tile. The first visited tile always counts.

SAGE. Q, K and V come quantized from `quantize`. FP8 P is exp2(x - max + 8), in (0, 256], so that e4m3's normal range
reaches 2^-14 of a row's maximum.
"""

import triton
import triton.language as tl

# FP8 probabilities are stored times 2^8: the largest power of two that e4m3 (up to 448) holds.
FP8_SHIFT = tl.constexpr(8.0)

@triton.jit
def _nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _declare_vote():
    # the PTX register that _any_reaches collects in
    tl.inline_asm_elementwise(".reg .u32 reaches; mov.u32 reaches, 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32,
                              is_pure=False, pack=1)


@triton.jit
def _any_reaches(rise, threshold, HARDWARE_VOTE: tl.constexpr):
    # whether any element of rise is not below the threshold; NaN is not
    if HARDWARE_VOTE:
        # Each element sets the thread's register; then one barrier reduction over the program and one vote that makes
        # the outcome uniform for the compiler. tl.min takes shuffles, two trips through shared memory and three
        # barriers, which the tile's softmax must wait for: 6% of a call on an H200.
        tl.inline_asm_elementwise(
            "{ .reg .pred low; setp.lt.f32 low, $1, $2; @!low mov.u32 reaches, 1; mov.u32 $0, 0; }",
            "=r,f,f", [rise, threshold], dtype=tl.int32, is_pure=False, pack=1)
        any_reaches = tl.inline_asm_elementwise(
            "{ .reg .pred mine, any; setp.ne.u32 mine, reaches, 0; bar.red.or.pred any, 15, mine; "
            "vote.sync.any.pred mine, any, 0xffffffff; selp.u32 $0, 1, 0, mine; mov.u32 reaches, 0; }",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        any_reaches = tl.min((rise < threshold).to(tl.int32), 0) == 0
    return any_reaches != 0


@triton.jit
def _load_rows(source, batch, head, first, length, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               PADDED: tl.constexpr, TMA: tl.constexpr):
    # [ROWS, PADDED]: rows first.. of one head, zero past `length` and past COLUMNS
    if TMA:
        tile = source.load([batch, head, first, 0]).reshape(ROWS, PADDED)
    else:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, PADDED)
        pointers = source + first.to(tl.int64) * stride + (row[:, None] * stride + column[None, :])
        mask = (row < length - first)[:, None]
        if COLUMNS != PADDED:
            mask = mask & (column < COLUMNS)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def _load_value(source, batch, head, first, length, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                PADDED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr):
    # [ROWS, PADDED]; an FP8 V is stored [head_dim, tokens], padded with zeros to whole tiles
    if not TRANSPOSED:
        tile = _load_rows(source, batch, head, first, length, stride, ROWS, COLUMNS, PADDED, TMA)
    elif TMA:
        tile = source.load([batch, head, 0, first]).reshape(PADDED, ROWS).T
    else:
        row = tl.arange(0, PADDED)
        pointers = source + (row.to(tl.int64) * stride)[:, None] + (first + tl.arange(0, ROWS))[None, :]
        if COLUMNS == PADDED:
            tile = tl.load(pointers).T
        else:
            tile = tl.load(pointers, mask=(row < COLUMNS)[:, None], other=0.0).T
    return tile


@triton.jit
def _scores(query, key, key_scale, first, key_length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            K_BLOCK: tl.constexpr):
    # [BLOCK_M, BLOCK_N] float32: Q K^T, times the keys' scales under SAGE
    scores = tl.dot(query, key.T).to(tl.float32)
    if K_BLOCK > 0:
        GROUPS: tl.constexpr = BLOCK_N // K_BLOCK
        group = first // K_BLOCK + tl.arange(0, GROUPS)
        scale = tl.load(key_scale + group, mask=group * K_BLOCK < key_length, other=0.0)
        scores = scores.reshape(BLOCK_M, GROUPS, K_BLOCK) * scale[None, :, None]
        scores = scores.reshape(BLOCK_M, BLOCK_N)
    return scores


@triton.jit
def _update(accumulator, row_sum, row_max, scores, tile_max, row_scale, value, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, FP8_VALUE: tl.constexpr):
    # one step of the running softmax; row_scale [BLOCK_M, 1] or a scalar takes scores to exponents of 2
    new_max = _nan_maximum(row_max, tile_max)
    # a row that has seen only -inf: its exponents are -inf, not -inf + inf
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = tl.math.exp2(row_max - shift)
    if FP8_VALUE:
        probability = tl.math.exp2(scores * row_scale - (shift - FP8_SHIFT)[:, None])
    else:
        probability = tl.math.exp2(scores * row_scale - shift[:, None])
    row_sum = row_sum * rescale + tl.sum(probability, 1)
    accumulator = accumulator * rescale[:, None]
    if FP8_VALUE:
        # keys 8g+2c+e of each 16 go to 4c+2g+e, where `quantize` stored V's: a thread's accumulator registers then
        # are the tensor core's 8-bit operand as they stand, and P needs no exchange between threads
        GROUPS: tl.constexpr = BLOCK_N // 16
        probability = probability.reshape(BLOCK_M, GROUPS, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)
        # Hopper's tensor cores add FP8 products with fewer bits than float32: only within a tile
        accumulator += tl.dot(probability.to(value.dtype), value)
    else:
        accumulator = tl.dot(probability.to(value.dtype), value, accumulator)
    return accumulator, row_sum, new_max


# token counts change from call to call: compiled once for all of them
@triton.jit(do_not_specialize=["query_length", "key_length", "query_groups", "key_groups"])
def attention_kernel(
    query, key, value, output,
    query_scale, key_scale, value_scale, value_mean, key_lengths, skipped,
    query_stride_batch, query_stride_head, query_stride_row,
    key_stride_batch, key_stride_head, key_stride_row,
    value_stride_batch, value_stride_head, value_stride_row,
    query_length, key_length, query_groups, key_groups, scale, threshold,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, FP8_VALUE: tl.constexpr,
    SKIP: tl.constexpr, OWN_FIRST: tl.constexpr, COUNT: tl.constexpr, LENGTHS: tl.constexpr, TMA: tl.constexpr,
    HARDWARE_VOTE: tl.constexpr,
):
    """Attention of query rows [program 0 * BLOCK_M, + BLOCK_M) of head `program 1` of batch `program 2`.

    query, key, value: pointers with strides, or with TMA descriptors of [batch, heads, tokens, HEAD_DIM] with blocks of
        one tile; under SAGE query and key in int8 or e4m3. With FP8_VALUE value is [batch, heads, HEAD_DIM, tokens].
    output: [batch, tokens, heads, HEAD_DIM], contiguous.
    query_scale, key_scale: float32 [batch, heads, groups], one per Q_BLOCK or K_BLOCK tokens; K_BLOCK 0: no SAGE.
    value_scale, value_mean: float32 [batch, kv heads, HEAD_DIM], applied to the result; value_scale with FP8_VALUE,
        value_mean also with SKIP.
    key_lengths: int32 [batch] with LENGTHS. skipped: int64 [1] with COUNT. GROUP: query heads per kv head.
    scale: of the scores, times log2(e); above 0, since row maxima are taken before it. threshold: log2 of λ.
    """
    if HARDWARE_VOTE:
        _declare_vote()
    head = tl.program_id(1)
    batch = tl.program_id(2)
    heads = tl.num_programs(1)
    key_head = head // GROUP
    kv_heads = heads // GROUP
    if LENGTHS:
        key_length = tl.load(key_lengths + batch)
    tiles = tl.cdiv(key_length, BLOCK_N)

    # 64-bit before the first multiplication by a stride
    batch64 = batch.to(tl.int64)
    if not TMA:
        key += batch64 * key_stride_batch + key_head.to(tl.int64) * key_stride_head
        value += batch64 * value_stride_batch + key_head.to(tl.int64) * value_stride_head
    if K_BLOCK > 0:
        key_scale += (batch64 * kv_heads + key_head) * key_groups

    if not TMA:
        query += batch64 * query_stride_batch + head.to(tl.int64) * query_stride_head
    first_row = tl.program_id(0) * BLOCK_M
    q = _load_rows(query, batch, head, first_row, query_length, query_stride_row, BLOCK_M, HEAD_DIM, PADDED_DIM, TMA)
    row_scale = scale
    row_scale_column = scale
    if K_BLOCK > 0:
        group = (first_row + tl.arange(0, BLOCK_M)) // Q_BLOCK
        query_scale += (batch64 * heads + head) * query_groups + group
        row_scale = tl.load(query_scale, mask=group < query_groups, other=0.0) * scale
        row_scale_column = row_scale[:, None]

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if SKIP:
        # rows past the end have no vote: nothing exceeds their maximum
        row_max = tl.where(tl.arange(0, BLOCK_M) < query_length - first_row, row_max, float("inf"))
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    within = tl.arange(0, BLOCK_N)

    start = 0
    if OWN_FIRST:
        start = tl.minimum(first_row // BLOCK_N, tiles - 1)
    count = 0
    for i in tl.range(0, tiles):
        tile = start + i
        tile = tl.where(tile >= tiles, tile - tiles, tile)
        first = tile * BLOCK_N
        k = _load_rows(key, batch, key_head, first, key_length, key_stride_row, BLOCK_N, HEAD_DIM, PADDED_DIM, TMA)
        scores = _scores(q, k, key_scale, first, key_length, BLOCK_M, BLOCK_N, K_BLOCK)
        # a branch for the one ragged tile: a mask in every tile costs a fifth of the arithmetic
        if tile == tiles - 1:
            scores = tl.where((first + within < key_length)[None, :], scores, -float("inf"))
        tile_max = tl.reduce(scores, 1, _nan_maximum) * row_scale
        if SKIP:
            # the first tile's row_max is -inf: it always counts
            if _any_reaches(tile_max - row_max, threshold, HARDWARE_VOTE):
                v = _load_value(value, batch, key_head, first, key_length, value_stride_row, BLOCK_N, HEAD_DIM,
                                PADDED_DIM, FP8_VALUE, TMA)
                accumulator, row_sum, row_max = _update(accumulator, row_sum, row_max, scores, tile_max,
                                                        row_scale_column, v, BLOCK_M, BLOCK_N, FP8_VALUE)
            else:
                count += 1
        else:
            v = _load_value(value, batch, key_head, first, key_length, value_stride_row, BLOCK_N, HEAD_DIM,
                            PADDED_DIM, FP8_VALUE, TMA)
            accumulator, row_sum, row_max = _update(accumulator, row_sum, row_max, scores, tile_max,
                                                    row_scale_column, v, BLOCK_M, BLOCK_N, FP8_VALUE)
    if COUNT:
        tl.atomic_add(skipped, count.to(tl.int64), sem="relaxed")

    result = accumulator / row_sum[:, None]
    row = first_row + tl.arange(0, BLOCK_M)
    column = tl.arange(0, PADDED_DIM)
    channel = (batch64 * kv_heads + key_head) * HEAD_DIM + column
    if FP8_VALUE:
        result *= tl.load(value_scale + channel, mask=column < HEAD_DIM, other=0.0)[None, :]
    if FP8_VALUE or SKIP:
        result += tl.load(value_mean + channel, mask=column < HEAD_DIM, other=0.0)[None, :]
    output += ((batch64 * query_length + row) * heads + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(output, result.to(output.dtype.element_ty),
             mask=(row < query_length)[:, None] & (column < HEAD_DIM)[None, :])
