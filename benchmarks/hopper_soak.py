"""Many launches of mixed shapes, modes and thresholds of the Hopper kernels, checked on sampled rows.

    python benchmarks/hopper_soak.py [--launches 10000] [--seed 0]

Every launch writes into NaN and counts its non-finite numbers on the device; one in `--check` launches is compared
with float64 attention that skips by the same rule, on a block of 64 rows. Prints one line a thousand launches and fails at the first wrong one.
"""

import argparse
import itertools
import math
import pathlib
import random
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from trtllm_core.kernels import tile_count  # noqa: E402
from trtllm_core.kernels.hopper import hopper_attention, hopper_config  # noqa: E402
from trtllm_core.specs import AttnQuantSpec  # noqa: E402

QUANTS = (None, None, AttnQuantSpec(dtype_qk="fp8_e4m3"), AttnQuantSpec(dtype_qk="int8"))
THRESHOLDS = (None, 0.0, 1e-9, 0.001, 0.01, 0.05, 2.0)
EXACT = 0.01  # relative L2 error at which a 16-bit launch is wrong: a few times its rounding
SAGE = 0.08  # the same under SAGE; where its rounding moves a tile across λ, more by
MOVED = {None: 0.0, 0.0: 0.0, 1e-9: 0.0, 0.001: 0.02, 0.01: 0.06, 0.05: 0.25, 2.0: math.inf}
MARGIN = 0.005  # relative, of λ: what the kernel's float32 scores may decide either way


def inputs(rng, generator):
    """Query, key, value and key lengths of a random shape; some of them strided views."""
    head_dim, dtype = rng.choice((64, 128)), rng.choice((torch.bfloat16, torch.float16))
    batch, kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 5)), rng.choice((1, 1, 2))
    tokens = rng.choice((1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 500, 1024, 2000, 4097, rng.randint(1, 6000)))
    key_tokens = tokens if rng.random() < 0.7 else rng.randint(1, 3000)
    heads = kv_heads * group

    def tensor(count, number, low_rank):
        x = torch.randn(batch, count, number, head_dim, device="cuda", generator=generator)
        if rng.random() < 0.5:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        if low_rank:  # neighbours resemble each other, so that tiles differ and some are skipped
            phase = torch.arange(count, device="cuda")[:, None, None] * 0.02 * frequencies
            x = 0.3 * x + 6 * torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(head_dim / 4)
        return x.to(dtype)

    frequencies = torch.randn(head_dim // 2, device="cuda", generator=generator)
    query, key, value = tensor(tokens, heads, True), tensor(key_tokens, kv_heads, True), tensor(key_tokens, kv_heads, False)
    lengths = None
    if (head_dim, dtype) == (128, torch.bfloat16) and rng.random() < 0.5:  # elsewhere it would double the compilations
        lengths = torch.tensor([rng.randint(1, key_tokens) for _ in range(batch)], dtype=torch.int32, device="cuda")
    return query, key, value, lengths


def block_error(out, query, key, value, lengths, threshold, order, quant, rng):
    """Relative L2 error of 64 rows of one batch entry and head against float64 attention with the same tiles skipped."""
    head_dim = query.shape[3]
    config = hopper_config(head_dim, quant, threshold is not None)
    b, h = rng.randrange(query.shape[0]), rng.randrange(query.shape[2])
    row = 64 * rng.randrange(-(-query.shape[1] // 64))
    length = key.shape[1] if lengths is None else int(lengths[b])
    kv_head = h // (query.shape[2] // key.shape[2])
    q, k, v = query[b, row : row + 64, h].double(), key[b, :length, kv_head].double(), value[b, :length, kv_head].double()
    scores, v, result = (q @ k.T / math.sqrt(head_dim)).cpu(), v.cpu(), out[b, row : row + 64, h].double().cpu()
    tiles = -(-length // config.keys)
    first = 0
    if order == "own_first" and query.shape[1] == key.shape[1]:
        program = 64 * config.consumers
        first = min(row // program * program // config.keys, tiles - 1)
    visits = [(first + i) % tiles for i in range(tiles)]
    near = (1.0,) if not threshold else (1.0, 1 - MARGIN, 1 + MARGIN)
    expected = (skipping(scores, v, visits, config.keys, threshold and threshold * factor) for factor in near)
    return min(((result - rows).norm() / rows.norm()).item() for rows in expected)


def skipping(scores, values, visits, keys, threshold):
    """Attention of one block of rows in float64 that leaves out every tile whose maxima are all below λ of the row's."""
    kept = torch.zeros(scores.shape[1], dtype=torch.bool)
    running = torch.full(scores.shape[:1], -math.inf, dtype=scores.dtype)
    for tile in visits:
        part = slice(tile * keys, (tile + 1) * keys)
        tile_max = scores[:, part].amax(1)
        if threshold and (tile_max - running).max() < math.log(threshold):
            continue
        kept[part] = True
        running = torch.maximum(running, tile_max)
    return scores[:, kept].softmax(-1) @ values[kept]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--check", type=int, default=20, help="compare one launch in this many with float64")
    parser.add_argument("--repeat", type=int, default=25, help="launches per set of inputs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    bad = torch.zeros(1, dtype=torch.int64, device="cuda")
    began, worst, checked, launches = time.time(), 0.0, 0, 0
    modes = list(itertools.product(QUANTS, THRESHOLDS))
    while launches < options.launches:
        query, key, value, lengths = inputs(rng, generator)
        out = torch.empty(query.shape, dtype=query.dtype, device="cuda")
        for quant, threshold in rng.sample(modes, min(options.repeat, len(modes))):
            skipped = torch.zeros(1, dtype=torch.int64, device="cuda")
            order = rng.choice(("own_first", "sequential"))
            out.fill_(math.nan)
            hopper_attention(
                query, key, value, threshold=threshold, quant=quant, key_lengths=lengths, kv_order=order,
                skipped=skipped, out=out,
            )  # fmt: skip
            bad += (~torch.isfinite(out)).sum()
            launches += 1
            if launches % options.check == 0:
                total = tile_count(
                    (64, hopper_config(query.shape[3], quant, threshold is not None).keys), batch=query.shape[0],
                    heads=query.shape[2], query_length=query.shape[1],
                    key_length=key.shape[1] if lengths is None else lengths.tolist(),
                )  # fmt: skip
                limit = EXACT if quant is None else SAGE + MOVED[threshold]
                error = block_error(out, query, key, value, lengths, threshold, order, quant, rng)
                checked += 1
                if math.isfinite(limit):
                    worst = max(worst, error / limit)
                if not error < limit or bad.item() or not 0 <= skipped.item() < max(total, 1):
                    sys.exit(
                        f"launch {launches}: error {error:.3e} (limit {limit:.3e}), {bad.item()} non-finite, skipped "
                        f"{skipped.item()} of {total}: {tuple(query.shape)} {tuple(key.shape)} {query.dtype} "
                        f"{quant} λ={threshold} {order} lengths={lengths}"
                    )
            if launches % 1000 == 0:
                torch.cuda.synchronize()
                print(f"{launches} launches, {checked} checked, worst error {worst:.2f} of its limit, {time.time() - began:.0f} s", flush=True)
    if bad.item():
        sys.exit(f"{bad.item()} non-finite numbers in {launches} launches")
    print(f"{launches} launches without a hang or a wrong row on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
