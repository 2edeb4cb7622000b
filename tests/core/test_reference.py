"""The reference against a second implementation: loops over single rows and tiles in float64."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from trtllm_core import reference
from trtllm_core.specs import AttnQuantSpec


def loop_attention(q, k, v, scale, mask, threshold, tile, own_first):
    """One head, row by row: q [Lq, D], k and v [Lk, D], mask [Lq, Lk] additive. Returns out, kept."""
    rows, keys = tile
    q_tiles, k_tiles = math.ceil(len(q) / rows), math.ceil(len(k) / keys)
    kept = {}
    out = torch.zeros_like(q)
    for i in range(q_tiles):
        block = range(i * rows, min((i + 1) * rows, len(q)))
        first = i * rows // keys if own_first else 0
        peak = {r: -math.inf for r in block}
        used = {r: [] for r in block}
        for n in range(k_tiles):
            j = (first + n) % k_tiles
            columns = list(range(j * keys, min((j + 1) * keys, len(k))))
            scores = {r: q[r] @ k[columns].T * scale + mask[r, columns] for r in block}
            rises = [float(scores[r].max()) - peak[r] for r in block]
            below = threshold and all(rise < math.log(threshold) for rise in rises)
            kept[i, j] = n == 0 or not below
            if kept[i, j]:
                for r in block:
                    peak[r] = max(peak[r], float(scores[r].max()))
                    used[r] += columns
        for r in block:
            weights = (q[r] @ k[used[r]].T * scale + mask[r, used[r]]).softmax(-1)
            out[r] = torch.nan_to_num(weights) @ v[used[r]]
    return out, kept


def random_case(seed):
    rng = random.Random(seed)
    heads = rng.choice([1, 2])
    groups = rng.choice([1, 2])
    self_attention = rng.random() < 0.6
    q_length = rng.choice([1, 5, 16, 17, 33, 50])
    k_length = q_length if self_attention else rng.choice([1, 7, 24, 31, 40])
    generator = torch.Generator().manual_seed(seed)
    dim = rng.choice([8, 16])

    def draw(length, count):
        return torch.randn(2, length, count, dim, generator=generator, dtype=torch.float64) * 2

    return dict(
        query=draw(q_length, heads * groups),
        key=draw(k_length, heads),
        value=draw(k_length, heads),
        scale=rng.choice([None, 0.5, 1.7]),
        threshold=rng.choice([None, 0.0, 1e-9, 0.02, 0.5, 2.0]),
        tile=rng.choice([(16, 8), (8, 16), (16, 16), (5, 7)]),
        kv_order=rng.choice(["own_first", "sequential"]),
        mask=rng.choice(["none", "key", "bool"]),
        generator=generator,
    )


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_row_by_row_loops(seed):
    case = random_case(seed)
    generator, kind = case.pop("generator"), case.pop("mask")
    query, key, value = case["query"], case["key"], case["value"]
    mask, additive = None, torch.zeros(2, query.shape[1], key.shape[1], dtype=torch.float64)
    if kind == "key":
        mask = torch.randn(2, 1, 1, key.shape[1], generator=generator, dtype=torch.float64)
        additive = additive + mask[:, 0]
    if kind == "bool":
        mask = torch.rand(2, 1, query.shape[1], key.shape[1], generator=generator) < 0.8
        mask[..., 0] = True
        additive = additive.masked_fill(~mask[:, 0], -math.inf)

    out, stats = reference.attention(**case, mask=mask)

    groups = query.shape[2] // key.shape[2]
    scale = case["scale"] or query.shape[-1] ** -0.5
    own = case["kv_order"] == "own_first" and query.shape[1] == key.shape[1]
    for b in range(2):
        for h in range(query.shape[2]):
            expected, kept = loop_attention(
                query[b, :, h], key[b, :, h // groups], value[b, :, h // groups],
                scale, additive[b], case["threshold"], case["tile"], own,
            )
            torch.testing.assert_close(out[b, :, h], expected, rtol=1e-9, atol=1e-9)
            assert kept == {
                (i, j): bool(stats.kept[b, h, i, j])
                for i in range(stats.kept.shape[2]) for j in range(stats.kept.shape[3])
            }
    assert stats.total == stats.kept.numel()
    assert stats.skipped == int((~stats.kept).sum())


def structured(length=300, dim=64, heads=3, seed=0):
    """q, k, v whose tokens attend near themselves, so that far tiles really are skipped."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(length)[:, None] / 40
    frequency = torch.randn(1, dim // 2, generator=generator)
    features = torch.cat([(position * frequency).cos(), (position * frequency).sin()], -1)
    noise = lambda: 0.3 * torch.randn(1, length, heads, dim, generator=generator)
    q, k = (features[None, :, None] * 1.6 + noise() for _ in range(2))
    return q, k, torch.randn(1, length, heads, dim, generator=generator)


def exact(q, k, v):
    heads_first = [x.transpose(1, 2).double() for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def relative_error(x, expected):
    return float((x.double() - expected).norm() / expected.norm())


def test_tiny_threshold_equals_dense_and_a_large_one_differs():
    q, k, v = structured()
    expected = exact(q, k, v)
    in_float32 = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    tolerance = 8 * relative_error(in_float32.transpose(1, 2), expected)
    assert relative_error(reference.attention(q, k, v, threshold=1e-9)[0], expected) < tolerance
    out, stats = reference.attention(q, k, v, threshold=2.0)
    assert stats.sparsity > 0.2
    assert relative_error(out, expected) > 0.02


def test_more_threshold_skips_more():
    q, k, v = structured()
    skipped = [reference.attention(q, k, v, threshold=t)[1].skipped for t in (1e-6, 1e-3, 0.1, 1.0)]
    assert skipped == sorted(skipped) and skipped[-1] > skipped[0]


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("q_block, k_block", [(1, 1), (1, 16), (4, 4), (16, 16)])
def test_sage_stays_close_and_is_not_dense(dtype, q_block, k_block):
    q, k, v = structured(seed=1)
    quant = AttnQuantSpec(dtype, q_block_size=q_block, k_block_size=k_block)
    error = relative_error(reference.attention(q, k, v, quant=quant)[0], exact(q, k, v))
    assert 1e-3 < error < 0.1


def test_case_06_large_k_outliers_stay_finite_and_close():
    q, k, v = structured(seed=2)
    k = k.clone()
    k[..., 3] += 80.0  # one channel, every token: what K smoothing is for
    expected = exact(q, k, v)
    for dtype in ("int8", "fp8_e4m3"):
        out, _ = reference.attention(q, k, v, quant=AttnQuantSpec(dtype))
        assert torch.isfinite(out).all()
        assert relative_error(out, expected) < 0.1


def test_rows_without_a_key_give_zeros():
    q, k, v = structured(length=20)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    mask[:, :, 7] = False
    out, _ = reference.attention(q, k, v, mask=mask)
    assert torch.isfinite(out).all() and (out[:, 7] == 0).all()


def test_output_keeps_the_dtype_of_query():
    q, k, v = (x.bfloat16() for x in structured(length=65))
    assert reference.attention(q, k, v)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "shapes, part",
    [
        (((1, 4, 2, 8), (1, 0, 2, 8), (1, 0, 2, 8)), "no tokens"),
        (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "3 query heads"),
        (((1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 16)), "do not fit"),
        (((4, 2, 8), (4, 2, 8), (4, 2, 8)), "[batch, tokens, heads, head_dim]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, part):
    with pytest.raises(ValueError) as error:
        reference.attention(*(torch.zeros(s) for s in shapes))
    assert part in str(error.value)
