"""Attention for compute capability 9.0 in Gluon: dense, Skip-Softmax, SAGE, and both at once.

A program is 192 (or 128) query rows of one head: consumer warpgroups of 64 rows, and one producer warp
(hopper_common.produce). For every KV tile a consumer multiplies Q by K, decides (Skip-Softmax), does the
online softmax in registers and multiplies by V. Three consumers keep the tensor cores busy while one of
them is in its softmax, and read each K and V tile from L2 a third less often than two.

Scores are kept in units of log2: exp(x) = exp2(x * log2 e), with log2 e folded into the scale.
The output accumulator is rescaled only when a row maximum of the warp rose.
SAGE: Q and K in INT8 or FP8 with a scale per row of Q and per group of keys; P in FP8 as exp2(x - max + 8),
in (0, 256]; V in FP8 with a scale and a mean per channel. The tensor cores add FP8 products with fewer bits
than float32, so each tile's P V is added to the output in float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_common import (
    PROPAGATE_NAN,
    any_at_least,
    any_positive_in_warp,
    declare_vote_result,
    make_barriers,
    max_or_nan,
    produce,
    tile_index,
    turn_give,
    turn_wait,
)
from .hopper_compat import tma_store, warpgroup_barrier

_P_EXPONENT = gl.constexpr(8.0)
_TO_E4M3 = gl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)


@gluon.constexpr_function
def _grouped_layout(keys, group):
    """Layout of a [64, keys] accumulator seen as [64, keys // group, group]."""
    columns = [1, 8]
    while columns[-1] * 2 < keys:
        columns.append(columns[-1] * 2)

    def split(column):
        return [0, column // group, column % group]

    registers = [split(1), [8, 0, 0]] + [split(column) for column in columns[1:]]
    lanes = [split(2), split(4), [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, keys // group, group])


@gluon.jit
def _scaled(scores, key_scales, SCORES: gl.constexpr, GROUP: gl.constexpr):
    """Scores [64, keys] times one scale per GROUP of keys."""
    KEYS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = _grouped_layout(KEYS, GROUP)
    grouped = gl.convert_layout(scores.reshape([64, KEYS // GROUP, GROUP]), LAYOUT, assert_trivial=True)
    grouped = grouped * key_scales[None, :, None]
    return gl.convert_layout(grouped.reshape([64, KEYS]), SCORES, assert_trivial=True)


@gluon.jit
def _group_max(scores, key_scales, ROWS: gl.constexpr):
    """Row maxima of scores [64, keys] times one scale per 16 keys, without scaling every score."""
    KEYS: gl.constexpr = scores.shape[1]
    parts = scores.reshape([64, KEYS // 16, 2, 4, 2])
    parts = max_or_nan(max_or_nan(parts, 4), 2)
    scales = gl.convert_layout(key_scales, gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout)))
    return gl.convert_layout(max_or_nan(max_or_nan(parts * scales[None, :, None], 1), 1), ROWS)


@gluon.jit
def _grouped_exponents(scores, row_scale, key_scales, reference, SCORES: gl.constexpr):
    """scores * row_scale * key_scales - reference, one key scale per 16 keys."""
    KEYS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = _grouped_layout(KEYS, 16)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    grouped = gl.convert_layout(scores.reshape([64, KEYS // 16, 16]), LAYOUT, assert_trivial=True)
    both = gl.convert_layout(row_scale, ROWS)[:, None] * key_scales[None, :]
    grouped = grouped * both[:, :, None] - gl.convert_layout(reference, ROWS)[:, None, None]
    return gl.convert_layout(grouped.reshape([64, KEYS]), SCORES, assert_trivial=True)


@gluon.jit
def _as_operand(weights, DTYPE: gl.constexpr, QUANTIZED: gl.constexpr, OPERAND: gl.constexpr):
    """Softmax weights [64, keys] in float32 as the left operand of P V.

    An FP8 operand holds four neighbouring keys where the accumulator holds two. Instead of moving values
    between threads, the keys are renamed within each 16; V was stored in the same order.
    """
    if QUANTIZED:
        KEYS: gl.constexpr = weights.shape[1]
        renamed = weights.reshape([64, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, KEYS])
        renamed = gl.convert_layout(renamed, OPERAND, assert_trivial=True)
        return gl.inline_asm_elementwise(_TO_E4M3, "=r,f,f,f,f", [renamed], dtype=gl.float8e4nv, is_pure=True, pack=4)
    else:
        return gl.convert_layout(weights.to(DTYPE), OPERAND)


@gluon.jit
def _clear_rows(tile, valid):
    """Zero the rows of a [keys, head_dim] tile from `valid` on: a weight of 0 times NaN would be NaN.

    Every consumer writes the same values, so that none waits for another.
    """
    KEYS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for first in gl.static_range(0, KEYS, 16):
        rows = tile.slice(first, 16)
        kept = first + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT)) < valid
        values = rows.load(LAYOUT)
        rows.store(gl.where(kept[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    warpgroup_barrier()


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, output, q_slots, k_slots, v_slots, o_slots, wanted, barriers, q_scales, k_scales, v_scales, v_means, skipped,
    batch, row, q_head, first, tiles, key_length, query_length, scale, threshold,
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, KEY_GROUP: gl.constexpr, SKIP: gl.constexpr, ON_DEMAND: gl.constexpr, TURNS: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    q_full, k_full, k_free, v_full, v_free = barriers
    CONSUMERS: gl.constexpr = q_slots.shape[0]
    K_STAGES: gl.constexpr = k_slots.shape[0]
    V_STAGES: gl.constexpr = v_slots.shape[0]
    DTYPE: gl.constexpr = q_slots.dtype
    QUANTIZED: gl.constexpr = DTYPE.primitive_bitwidth == 8
    SCORE_DTYPE: gl.constexpr = gl.int32 if DTYPE == gl.int8 else gl.float32
    FOLDED: gl.constexpr = QUANTIZED and KEY_GROUP == 16
    DEPTH: gl.constexpr = 32 if QUANTIZED else 16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, DEPTH])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, DEPTH])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4 if QUANTIZED else 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUTPUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    FLAGS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

    q = q_slots.index(CONSUMER).reshape([64, HEAD_DIM])
    no_scores = gl.zeros([64, KEYS], SCORE_DTYPE, SCORES)
    no_output = gl.zeros([64, HEAD_DIM], gl.float32, OUTPUT)
    accumulated = no_output
    total = gl.zeros([64], gl.float32, ROWS)
    # a row past the end has an infinite maximum: it never votes
    rows = row + CONSUMER * 64 + gl.arange(0, 64, layout=ROWS)
    running = gl.where(rows < query_length, -float("inf"), float("inf"))
    if QUANTIZED:
        GROUPS: gl.constexpr = KEYS // KEY_GROUP
        KEY_SCALES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, _grouped_layout(KEYS, KEY_GROUP)))
        row_scale = gl.load(q_scales + rows, mask=rows < query_length, other=1.0)
        k_scales += gl.arange(0, GROUPS, layout=KEY_SCALES)
    skips = tiles * 0
    mbarrier.wait(q_full.index(CONSUMER), 0)
    if TURNS and CONSUMER == CONSUMERS - 1:
        turn_give(CONSUMER, CONSUMERS)
    for i in range(tiles):
        k_slot = i % K_STAGES
        v_slot = i % V_STAGES
        tile = tile_index(i, first, tiles)
        if FOLDED:
            key_scales = gl.load(k_scales + tile * GROUPS)
        mbarrier.wait(k_full.index(k_slot), (i // K_STAGES) & 1)
        if TURNS:
            turn_wait(CONSUMER)
        token = warpgroup_mma(
            q, k_slots.index(k_slot).reshape([KEYS, HEAD_DIM]).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        if TURNS:
            turn_give(CONSUMER, CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=[token])
        if QUANTIZED:
            scores = scores.to(gl.float32)
            if not FOLDED:
                scores = _scaled(scores, gl.load(k_scales + tile * GROUPS), SCORES, KEY_GROUP)
        if (tile + 1) * KEYS > key_length:
            keys = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
            scores = gl.where((keys < key_length)[None, :], scores, -float("inf"))
        if FOLDED:
            tile_max = _group_max(scores, key_scales, ROWS) * row_scale
        elif QUANTIZED:
            tile_max = max_or_nan(scores, 1) * row_scale
        else:
            tile_max = max_or_nan(scores, 1) * scale
        if SKIP:
            keep = any_at_least(tile_max - running, threshold, CONSUMER)
            if ON_DEMAND:
                vote = k_slot * CONSUMERS + CONSUMER
                wanted.index(vote).store(gl.full([32], 0, gl.int32, FLAGS) + keep.to(gl.int32))
                mbarrier.arrive(k_free.index(vote), count=1)
            else:
                mbarrier.arrive(k_free.index(k_slot), count=1)
        else:
            keep = True
            mbarrier.arrive(k_free.index(k_slot), count=1)
        if keep:
            raised = gl.maximum(running, tile_max, propagate_nan=PROPAGATE_NAN)
            # all keys -inf so far: 0 in place of the maximum keeps exp2 from inf - inf
            reference = gl.where(raised == -float("inf"), 0.0, raised)
            if FOLDED:
                exponents = _grouped_exponents(scores, row_scale, key_scales, reference - _P_EXPONENT, SCORES)
            elif QUANTIZED:
                exponents = scores * row_scale[:, None] - (reference - _P_EXPONENT)[:, None]
            else:
                exponents = scores * scale - reference[:, None]
            weights = gl.exp2(exponents)
            if QUANTIZED:
                shrink = gl.exp2(running - reference)
                total = total * shrink + gl.sum(weights, 1)
            else:
                rose = any_positive_in_warp(raised - running)
                if rose:
                    shrink = gl.exp2(running - reference)
                    total = total * shrink
                    accumulated = accumulated * gl.convert_layout(shrink, OUTPUT_ROWS)[:, None]
                total += gl.sum(weights, 1)
            running = raised
            operand = _as_operand(weights, DTYPE, QUANTIZED, OPERAND)
            mbarrier.wait(v_full.index(v_slot), (i // V_STAGES) & 1)
            if QUANTIZED:
                v = v_slots.index(v_slot).reshape([HEAD_DIM, KEYS]).permute((1, 0))
                product = warpgroup_mma(operand, v, no_output, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
                accumulated = accumulated * gl.convert_layout(shrink, OUTPUT_ROWS)[:, None] + product
            else:
                v = v_slots.index(v_slot).reshape([KEYS, HEAD_DIM])
                if CLEAR:
                    if (tile + 1) * KEYS > key_length:
                        _clear_rows(v, key_length - tile * KEYS)
                product = warpgroup_mma(operand, v, accumulated, is_async=True)
                accumulated = warpgroup_mma_wait(0, deps=[product])
        else:
            skips += 1
            if not ON_DEMAND:
                mbarrier.wait(v_full.index(v_slot), (i // V_STAGES) & 1)
        mbarrier.arrive(v_free.index(v_slot), count=1)

    result = accumulated / gl.convert_layout(total, OUTPUT_ROWS)[:, None]
    if QUANTIZED:
        channels = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUTPUT))
        result = result * gl.load(v_scales + channels)[None, :]
    if v_means is not None:
        channels = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUTPUT))
        result = result + gl.load(v_means + channels)[None, :]
    o_slot = o_slots.index(CONSUMER)
    o_slot.reshape([64, HEAD_DIM]).store(result.to(o_slots.dtype))
    fence_async_shared()
    tma_store(output, [batch, row + CONSUMER * 64, q_head, 0], o_slot)
    if SKIP and skipped is not None:
        if row + CONSUMER * 64 < query_length:
            gl.atomic_add(skipped, skips.to(gl.int64))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["query_length", "key_length", "heads_per_kv", "own_first"])
def attention_kernel(
    query, key, value, output, q_scales, k_scales, v_scales, v_means, key_lengths, skipped,
    query_length, key_length, heads_per_kv, own_first, scale, threshold,
    CONSUMERS: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, KEY_GROUP: gl.constexpr,
    SKIP: gl.constexpr, ON_DEMAND: gl.constexpr, TURNS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of one query tile of one head of one batch item.

    query, key, output: descriptors of [batch, tokens, heads, head_dim], one consumer's or one tile's rows;
    value: the same, or of [batch, heads, head_dim, tokens] if they are 8 bits wide (quantize_for_hopper).
    q_scales [batch, heads, query_length]: softmax scale and log2 e included; k_scales [batch, kv heads,
    groups of whole tiles]; v_scales [batch, kv heads, head_dim]; None unless 8 bits wide. v_means: added to the output,
    [batch, kv heads, head_dim] or None.
    key_lengths: int32 [batch] or None; skipped: int64 [1] or None; own_first: 0 or 1.
    scale: softmax scale * log2 e; threshold: log2 of lambda. Grid: query tiles, heads, batch.
    """
    declare_vote_result()
    QUANTIZED: gl.constexpr = query.dtype.primitive_bitwidth == 8
    q_head = gl.program_id(1)
    batch = gl.program_id(2)
    heads = gl.num_programs(1)
    kv_head = q_head // heads_per_kv
    kv = (batch * (heads // heads_per_kv) + kv_head).to(gl.int64)
    if v_means is not None:
        v_means += kv * HEAD_DIM
    q_slots = gl.allocate_shared_memory(query.dtype, [CONSUMERS] + query.block_type.shape, query.layout)
    k_slots = gl.allocate_shared_memory(key.dtype, [K_STAGES] + key.block_type.shape, key.layout)
    v_slots = gl.allocate_shared_memory(value.dtype, [V_STAGES] + value.block_type.shape, value.layout)
    if QUANTIZED:
        o_slots = gl.allocate_shared_memory(output.dtype, [CONSUMERS] + output.block_type.shape, output.layout)
        q_scales += (batch * heads + q_head).to(gl.int64) * query_length
        k_scales += kv * (gl.cdiv(key_length, KEYS) * (KEYS // KEY_GROUP))
        v_scales += kv * HEAD_DIM
    else:
        o_slots = q_slots
    wanted = gl.allocate_shared_memory(gl.int32, [K_STAGES * CONSUMERS, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if ON_DEMAND:
        k_free = make_barriers(K_STAGES * CONSUMERS, 1)
    else:
        k_free = make_barriers(K_STAGES, CONSUMERS)
    barriers = (
        make_barriers(CONSUMERS, 1), make_barriers(K_STAGES, 1), k_free, make_barriers(V_STAGES, 1), make_barriers(V_STAGES, CONSUMERS),
    )  # fmt: skip
    fence_async_shared()
    CLEAR: gl.constexpr = key_lengths is not None
    if key_lengths is not None:
        key_length = gl.minimum(gl.load(key_lengths + batch), key_length)
    tiles = gl.maximum((key_length + KEYS - 1) // KEYS, 1)
    row = gl.program_id(0) * (64 * CONSUMERS)
    first = gl.where(own_first != 0, gl.minimum(row // KEYS, tiles - 1), 0)
    # the argument tuples are spelled out: a tuple bound to a name would turn its constexprs into run-time values
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), output, q_slots, k_slots, v_slots, o_slots, wanted, barriers, q_scales, k_scales, v_scales, v_means, skipped, batch, row, q_head, first, tiles, key_length, query_length, scale, threshold, HEAD_DIM, KEYS, KEY_GROUP, SKIP, ON_DEMAND, TURNS, CLEAR)),
            (_consume, (gl.constexpr(1), output, q_slots, k_slots, v_slots, o_slots, wanted, barriers, q_scales, k_scales, v_scales, v_means, skipped, batch, row, q_head, first, tiles, key_length, query_length, scale, threshold, HEAD_DIM, KEYS, KEY_GROUP, SKIP, ON_DEMAND, TURNS, CLEAR)),
            (_consume, (gl.constexpr(2), output, q_slots, k_slots, v_slots, o_slots, wanted, barriers, q_scales, k_scales, v_scales, v_means, skipped, batch, row, q_head, first, tiles, key_length, query_length, scale, threshold, HEAD_DIM, KEYS, KEY_GROUP, SKIP, ON_DEMAND, TURNS, CLEAR)),
            (produce, (query, key, value, q_slots, k_slots, v_slots, wanted, barriers, batch, row, q_head, kv_head, first, tiles, KEYS, QUANTIZED, ON_DEMAND)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), output, q_slots, k_slots, v_slots, o_slots, wanted, barriers, q_scales, k_scales, v_scales, v_means, skipped, batch, row, q_head, first, tiles, key_length, query_length, scale, threshold, HEAD_DIM, KEYS, KEY_GROUP, SKIP, ON_DEMAND, TURNS, CLEAR)),
            (_consume, (gl.constexpr(1), output, q_slots, k_slots, v_slots, o_slots, wanted, barriers, q_scales, k_scales, v_scales, v_means, skipped, batch, row, q_head, first, tiles, key_length, query_length, scale, threshold, HEAD_DIM, KEYS, KEY_GROUP, SKIP, ON_DEMAND, TURNS, CLEAR)),
            (produce, (query, key, value, q_slots, k_slots, v_slots, wanted, barriers, batch, row, q_head, kv_head, first, tiles, KEYS, QUANTIZED, ON_DEMAND)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
