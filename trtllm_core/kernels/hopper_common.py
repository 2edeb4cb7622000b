"""What the Hopper kernels share: barriers, the visit order, votes, and the warp that loads.

A program is one tile of query rows of one head: consumer warpgroups of 64 rows each, and one producer
warp that feeds K and V tiles through two rings of shared memory by the tensor memory accelerator.
Tile number i of the visit goes through slot i % stages of a ring; each slot has a barrier that the load
completes ("full") and one that the consumers complete ("free").
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_compat import tma_load

PROPAGATE_NAN = gl.constexpr(tl.PropagateNan.ALL)

# $2 and $3 are a thread's two rows; setp.*u is true for NaN too. Named barriers 8 to 10 are the turns,
# 12 to 14 the votes; the compiler's own are 0 to 6.
_WARP_VOTE = gl.constexpr(
    "{ .reg .pred p; setp.gtu.f32 p, $2, 0f00000000; setp.gtu.or.f32 p, $3, 0f00000000, p;"
    " vote.sync.any.pred vote_result, p, 0xffffffff; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; }"
)
_WARPGROUP_VOTES = gl.constexpr(
    tuple(
        "{ .reg .pred p, q; setp.geu.f32 p, $2, $4; setp.geu.or.f32 p, $3, $4, p;"
        f" bar.red.or.pred q, {12 + consumer}, 128, p;"
        " vote.sync.any.pred vote_result, q, 0xffffffff; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; }"
        for consumer in range(3)
    )
)
_TURN_WAIT = gl.constexpr(tuple(f"bar.sync {8 + consumer}, 256; mov.u32 $0, 0;" for consumer in range(3)))
_TURN_GIVE = gl.constexpr(tuple(f"bar.arrive {8 + consumer}, 256; mov.u32 $0, 0;" for consumer in range(3)))


@gluon.jit
def _statement(CODE: gl.constexpr):
    gl.inline_asm_elementwise(CODE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def declare_vote_result():
    """Declare the PTX predicate through which a vote becomes a scalar: Gluon's own way is a reduction through shared memory."""
    _statement(".reg .pred vote_result; mov.u32 $0, 0;")


@gluon.jit
def _vote_result():
    return gl.inline_asm_elementwise("selp.u32 $0, 1, 0, vote_result;", "=r", [], dtype=gl.int32, is_pure=False, pack=1) != 0


@gluon.jit
def any_positive_in_warp(rows):
    """Whether one of this warp's 16 rows is > 0 or NaN. Warps may differ: branch on it around plain arithmetic only."""
    gl.inline_asm_elementwise(_WARP_VOTE, "=f,=f,f,f", [rows], dtype=gl.float32, is_pure=False, pack=2)
    return _vote_result()


@gluon.jit
def any_at_least(rows, threshold, CONSUMER: gl.constexpr):
    """Whether one of the warpgroup's 64 rows is >= threshold or NaN: one hardware barrier with a reduction."""
    CODE: gl.constexpr = _WARPGROUP_VOTES[CONSUMER]
    thresholds = gl.full_like(rows, 0.0) + threshold
    gl.inline_asm_elementwise(CODE, "=f,=f,f,f,f,f", [rows, thresholds], dtype=gl.float32, is_pure=False, pack=2)
    return _vote_result()


@gluon.jit
def turn_wait(CONSUMER: gl.constexpr):
    """Wait until the previous consumer has issued its matrix product, so that softmaxes and products interleave."""
    CODE: gl.constexpr = _TURN_WAIT[CONSUMER]
    _statement(CODE)


@gluon.jit
def turn_give(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    CODE: gl.constexpr = _TURN_GIVE[(CONSUMER + 1) % CONSUMERS]
    _statement(CODE)


@gluon.jit
def _maximum_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=PROPAGATE_NAN)


@gluon.jit
def max_or_nan(x, AXIS: gl.constexpr):
    """Maximum along an axis. NaN wins, so that a tile with a NaN score is never skipped."""
    return gl.reduce(x, AXIS, _maximum_or_nan)


@gluon.jit
def tile_index(visit, first, tiles):
    """KV tile of a visit: from `first` on, wrapping around."""
    index = first + visit
    return gl.where(index >= tiles, index - tiles, index)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _load(descriptor, slots, full, slot, coordinates):
    mbarrier.expect(full.index(slot), descriptor.block_type.nbytes)
    tma_load(descriptor, coordinates, full.index(slot), slots.index(slot))


@gluon.jit
def _load_tokens(descriptor, slots, full, slot, batch, token, head):
    """Tokens of a [batch, tokens, heads, head_dim] tensor."""
    _load(descriptor, slots, full, slot, [batch, token, head, 0])


@gluon.jit
def _load_values(descriptor, slots, full, slot, batch, token, head, TRANSPOSED: gl.constexpr):
    """The same; TRANSPOSED: of a [batch, heads, head_dim, tokens] tensor."""
    if TRANSPOSED:
        _load(descriptor, slots, full, slot, [batch, head, 0, token])
    else:
        _load(descriptor, slots, full, slot, [batch, token, head, 0])


@gluon.jit
def produce(
    query, key, value, q_slots, k_slots, v_slots, wanted, barriers, batch, row, q_head, kv_head, first, tiles,
    KEYS: gl.constexpr, V_TRANSPOSED: gl.constexpr, ON_DEMAND: gl.constexpr,
):  # fmt: skip
    """Load Q once and every K tile in visit order; every V tile too, or with ON_DEMAND those that a consumer voted for."""
    q_full, k_full, k_free, v_full, v_free = barriers
    CONSUMERS: gl.constexpr = q_slots.shape[0]
    K_STAGES: gl.constexpr = k_slots.shape[0]
    V_STAGES: gl.constexpr = v_slots.shape[0]
    for c in gl.static_range(CONSUMERS):
        _load_tokens(query, q_slots, q_full, c, batch, row + c * 64, q_head)
    if not ON_DEMAND:
        _load_tokens(key, k_slots, k_full, 0, batch, first * KEYS, kv_head)
        for i in range(tiles):
            following = i + 1
            if following < tiles:
                slot = following % K_STAGES
                mbarrier.wait(k_free.index(slot), ((following // K_STAGES) & 1) ^ 1)
                token = tile_index(following, first, tiles) * KEYS
                _load_tokens(key, k_slots, k_full, slot, batch, token, kv_head)
            slot = i % V_STAGES
            mbarrier.wait(v_free.index(slot), ((i // V_STAGES) & 1) ^ 1)
            token = tile_index(i, first, tiles) * KEYS
            _load_values(value, v_slots, v_full, slot, batch, token, kv_head, V_TRANSPOSED)
    else:
        # V of tile i is loaded at the first vote for it, or ahead of the votes if tile i - 1 was wanted. Its two
        # barriers advance once per tile either way. K of tile i + K_STAGES is held back until tile i - 1 is over,
        # so that with V_STAGES == K_STAGES + 1 a consumer is never more than one phase ahead of a V barrier,
        # where one parity would be taken for another.
        gl.static_assert(V_STAGES == K_STAGES + 1)
        FLAGS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        for i in gl.static_range(K_STAGES):
            if i < tiles:
                token = tile_index(i, first, tiles) * KEYS
                _load_tokens(key, k_slots, k_full, i, batch, token, kv_head)
        loaded = tiles < 0
        for i in range(tiles):
            slot = i % K_STAGES
            v_slot = i % V_STAGES
            token = tile_index(i, first, tiles) * KEYS
            for c in gl.static_range(CONSUMERS):
                mbarrier.wait(k_free.index(slot * CONSUMERS + c), (i // K_STAGES) & 1)
                vote = gl.max(wanted.index(slot * CONSUMERS + c).load(FLAGS), 0) > 0
                if vote and not loaded:
                    _load_values(value, v_slots, v_full, v_slot, batch, token, kv_head, V_TRANSPOSED)
                loaded = loaded | vote
                if c == 0:
                    wish = vote
                else:
                    wish = wish | vote
            if not loaded:
                mbarrier.arrive(v_full.index(v_slot), count=1)
            before = (i + V_STAGES - 1) % V_STAGES
            phase = ((i + V_STAGES - 1) // V_STAGES - 1) & 1
            mbarrier.wait(v_free.index(before), phase, pred=i > 0)
            mbarrier.wait(v_full.index(before), phase, pred=i > 0)
            loaded = wish & (i + 1 < tiles)
            if loaded:
                token = tile_index(i + 1, first, tiles) * KEYS
                _load_values(value, v_slots, v_full, (i + 1) % V_STAGES, batch, token, kv_head, V_TRANSPOSED)
            if i + K_STAGES < tiles:
                token = tile_index(i + K_STAGES, first, tiles) * KEYS
                _load_tokens(key, k_slots, k_full, slot, batch, token, kv_head)
        # a load ahead of the last votes may still be under way, and shared memory is the next program's after this one
        mbarrier.wait(v_full.index((tiles - 1) % V_STAGES), ((tiles - 1) // V_STAGES) & 1)
