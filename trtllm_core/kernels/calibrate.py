"""The calibration kernel: for every trial threshold at once, how many tiles Skip-Softmax would skip.

One program walks the KV tiles of one query tile of one head, or of neighbouring ones that visit
them in the same order, so that a K tile is loaded once for 128 rows. It needs Q K^T and nothing after
it: a tile's rise, the largest of its rows' (tile maximum - running maximum before), decides for all
thresholds, and in a dense pass the running maximum does not depend on them.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from ..device import on_device_of

PROGRAM_ROWS = 128
SHARED_BYTES = 96 * 1024  # what Q and the K tiles in flight may take: Ampere and Ada GeForce have 99 KB


@triton.jit
def count_kernel(
    query, key, log_thresholds, counts, scale, q_length, k_length,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, GROUPS: tl.constexpr, TRIALS: tl.constexpr, PADDED_TRIALS: tl.constexpr,
    OWN_FIRST: tl.constexpr,
):
    """counts: int64 [TRIALS], added to. Lengths and strides (of tokens, heads, batches) in elements.

    BLOCK_M x BLOCK_N: a tile. TILES: query tiles of a program. GROUPS: query heads to a key head.
    """
    ROWS: tl.constexpr = TILES * BLOCK_M
    first_row = tl.program_id(0) * ROWS
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED_DIM)
    # Rows and keys past the end are copies of the last one. In its tile they change no maximum, and no
    # mask is needed; query tiles of nothing else are not counted.
    row = tl.minimum(first_row + tl.arange(0, ROWS), q_length - 1).to(tl.int64)
    is_tile = first_row + tl.arange(0, TILES) * BLOCK_M < q_length
    q_pointers = query + batch * q_batch + head * q_head + (row * q_token)[:, None] + column[None, :]
    key += batch * k_batch + (head // GROUPS) * k_head
    if HEAD_DIM == PADDED_DIM:
        q = tl.load(q_pointers)
    else:
        q = tl.load(q_pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    trial = tl.arange(0, PADDED_TRIALS)
    # Past TRIALS -inf, which no rise is below
    logs = tl.load(log_thresholds + trial, mask=trial < TRIALS, other=-float("inf"))

    k_tiles = tl.cdiv(k_length, BLOCK_N)
    first = 0
    if OWN_FIRST:
        first = first_row // BLOCK_N
    running = tl.full([ROWS], -float("inf"), tl.float32)
    skipped = tl.zeros([PADDED_TRIALS], tl.int32)
    for step in range(0, k_tiles):
        tile = first + step
        tile = tl.where(tile >= k_tiles, tile - k_tiles, tile)
        token = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), k_length - 1).to(tl.int64)
        k_pointers = key + (token * k_token)[None, :] + column[:, None]
        if HEAD_DIM == PADDED_DIM:
            k = tl.load(k_pointers)
        else:
            k = tl.load(k_pointers, mask=(column < HEAD_DIM)[:, None], other=0.0)
        peak = tl.max(tl.dot(q, k), 1)
        # [TILES]; +inf at the first KV tile, which is never counted. Also for one query tile: Triton
        # 3.6 fails to compile the reduction to a scalar for compute capability 10.0.
        rise = tl.max(tl.reshape(peak - running, (TILES, BLOCK_M)), 1) * scale
        rise = tl.where(is_tile, rise, float("inf"))
        skipped += tl.sum((rise[:, None] < logs[None, :]).to(tl.int32), 0)
        running = tl.maximum(running, peak)
    tl.atomic_add(counts + trial, skipped.to(tl.int64), mask=trial < TRIALS, sem="relaxed")


def supports(query: torch.Tensor, key: torch.Tensor, tile: tuple[int, int]) -> bool:
    """Whether the kernel can count this call; what it cannot, the reference does."""
    powers_of_two = all(n >= 16 and n & (n - 1) == 0 for n in tile)
    rows, keys = tile
    options = launch_options(query.shape[-1])
    shared = 2 * (max(rows, PROGRAM_ROWS) + options["num_stages"] * keys) * padded(query.shape[-1])
    return (
        query.dtype == key.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.stride(-1) == key.stride(-1) == 1
        and powers_of_two
        and shared <= SHARED_BYTES
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def count_skipped_tiles(query, key, scale, thresholds, tile, kv_order) -> torch.Tensor:
    """int64 [len(thresholds)] on query's device; arguments as calibration_counts.count_skipped_tiles.

    float16 or bfloat16, any strides with a contiguous last dimension. Launches one kernel, waits
    for nothing.
    """
    batch, q_length, heads, head_dim = query.shape
    k_length = key.shape[1]
    rows, keys = tile
    counts = torch.zeros(len(thresholds), dtype=torch.int64, device=query.device)
    own_first = kv_order == "own_first" and q_length == k_length
    together = tiles_together(tile, own_first)
    with on_device_of(query):
        count_kernel[(math.ceil(q_length / (rows * together)), heads, batch)](
            query, key, _logs(tuple(thresholds), query.device), counts, scale, q_length, k_length,
            query.stride(0), query.stride(1), query.stride(2),
            key.stride(0), key.stride(1), key.stride(2),
            BLOCK_M=rows, BLOCK_N=keys, TILES=together, HEAD_DIM=head_dim, PADDED_DIM=padded(head_dim),
            GROUPS=heads // key.shape[2], TRIALS=len(thresholds), PADDED_TRIALS=padded(len(thresholds)),
            OWN_FIRST=own_first, **launch_options(head_dim),
        )
    return counts


def tiles_together(tile: tuple[int, int], own_first: bool) -> int:
    """How many neighbouring query tiles one program takes: those that begin at the same KV tile."""
    rows, keys = tile
    together = max(1, PROGRAM_ROWS // rows)
    return together if not own_first or keys % (rows * together) == 0 else 1


def padded(size: int) -> int:
    """The next power of two, at least 16, which a tensor core's product needs."""
    return max(16, 1 << (size - 1).bit_length())


def launch_options(head_dim: int) -> dict:
    """Warps, and how many K tiles are in flight."""
    return {"num_warps": 8, "num_stages": 1 if head_dim > 128 else 2}


@functools.lru_cache(maxsize=16)
def _logs(thresholds: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([math.log(t) for t in thresholds], dtype=torch.float32, device=device)
