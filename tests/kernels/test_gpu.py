"""The kernels on a real GPU, against float64 on the same GPU. Run: pytest -m gpu tests/kernels/test_gpu.py"""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

from tests.kernels import oracle
from trtllm_core.kernels import has_fp8, kernel_config, tile_count, tile_shape, unsupported
from trtllm_core.kernels.forward import triton_attention
from trtllm_core.specs import AttnQuantSpec
from trtllm_core.token_order import TokenOrder

QUANTS = {
    "bf16": None,
    "int8": AttnQuantSpec(dtype_qk="int8"),
    "fp8": AttnQuantSpec(dtype_qk="fp8_e4m3", q_block_size=4, k_block_size=4),
}
MODES = list(itertools.product(QUANTS, (None, 0.0, 0.05)))
LENGTHS = [(1, 1), (63, 63), (127, 127), (128, 128), (129, 129), (300, 300), (8193, 8193), (1, 300), (1000, 77)]


def capability():
    return torch.cuda.get_device_capability()


def need(quant, head_dim=128, dtype=torch.bfloat16):
    reasons = unsupported(capability(), dtype, head_dim, quant)
    if reasons:
        pytest.skip("; ".join(reasons))


def local_heads(tokens, heads=2, kv_heads=None, head_dim=128, batch=1, dtype=torch.bfloat16, seed=0):
    """q, k, v whose scores fall off with the distance of tokens: near tiles matter, far ones can be skipped."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    kv_heads = heads if kv_heads is None else kv_heads
    frequency = torch.randn(head_dim // 2, device="cuda", generator=generator) / 300
    phase = torch.arange(tokens, device="cuda")[:, None] * frequency
    feature = torch.cat([phase.cos(), phase.sin()], 1) * math.sqrt(22 / math.sqrt(head_dim))

    def around(count, strength, noise):
        x = torch.randn(batch, tokens, count, head_dim, device="cuda", generator=generator) * noise
        return (x + strength * feature[None, :, None]).to(dtype)

    return around(heads, 1.0, 0.3), around(kv_heads, 1.0, 0.3), around(kv_heads, 0.0, 1.0)


def run(query, key, value, **options):
    """The kernel into a NaN-poisoned output."""
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device=query.device)
    assert triton_attention(query, key, value, out=out, **options) is out
    return out


def allowed_error(query, key, value, quant, expected):
    """What the mode's own rounding costs by the oracle, and half as much again."""
    if quant is None:
        return 1.5 * oracle.plain_error(query, key, value, expected=expected) + 1e-6
    emulated = oracle.sage(
        query, key, value, quant.dtype_qk, quant.q_block_size, quant.k_block_size, has_fp8(capability())
    )
    return 1.5 * oracle.error(emulated, expected) + 4e-3


@pytest.mark.parametrize(("name", "threshold"), MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_lengths(query_length, key_length, head_dim, name, threshold):
    quant = QUANTS[name]
    need(quant, head_dim)
    generator = torch.Generator(device="cuda").manual_seed(query_length)
    q, k, v = (
        torch.randn(1, tokens, 2, head_dim, device="cuda", generator=generator).bfloat16()
        for tokens in (query_length, key_length, key_length)
    )
    # white noise: nothing is far below the maximum, so 0.05 skips next to nothing but takes the skip path
    output = run(q, k, v, quant=quant, threshold=None if threshold is None else threshold / 1e4)
    expected = oracle.attention(q, k, v)
    assert oracle.error(output, expected) <= allowed_error(q, k, v, quant, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "threshold"), MODES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_types(head_dim, name, threshold, dtype):
    quant = QUANTS[name]
    need(quant, head_dim, dtype)
    q, k, v = local_heads(700, head_dim=head_dim, dtype=dtype)
    output = run(q, k, v, quant=quant, threshold=threshold)
    inputs = (q, k, v)
    if threshold:
        tile = tile_shape(capability(), head_dim, quant, True)
        expected = oracle.skip_softmax(q, k, v, threshold, tile, own_first=True).output
    else:
        expected = oracle.attention(q, k, v)
    assert oracle.error(output, expected) <= allowed_error(*inputs, quant, oracle.attention(q, k, v)) + (
        0.02 if threshold and quant is not None else 0  # quantized scores near λ decide otherwise
    )


@pytest.mark.parametrize("order", ["own_first", "sequential"])
@pytest.mark.parametrize("threshold", [0.001, 0.01, 0.1])
def test_skipped_tiles_are_the_oracles(threshold, order):
    q, k, v = local_heads(4000, heads=1)
    tile = tile_shape(capability(), 128)
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    output = run(q, k, v, threshold=threshold, kv_order=order, skipped=counter)
    expected = oracle.skip_softmax(q, k, v, threshold, tile, own_first=order == "own_first")
    total = tile_count(tile, batch=1, heads=1, query_length=4000, key_length=4000)
    assert 0.1 * total < len(expected.tiles) < total
    # scores are float32 sums of exact products: only a decision nearer than this can differ
    assert expected.margin < 1e-5 or counter.item() == len(expected.tiles)
    assert abs(counter.item() - len(expected.tiles)) <= 1
    assert oracle.error(output, expected.output) <= 1.5 * oracle.plain_error(q, k, v)


ARCHITECTURES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", QUANTS)
def test_every_shipped_configuration_really_skips_and_is_right(architecture, head_dim, name):
    quant = QUANTS[name]
    need(quant, head_dim)
    q, k, v = local_heads(3000, heads=2, head_dim=head_dim, seed=1)
    config = kernel_config(architecture, head_dim, quant, True)
    if config.tma and capability() < (9, 0):
        pytest.skip("no tensor descriptors here")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    output = run(q, k, v, quant=quant, threshold=0.01, skipped=counter, config=config)
    tile = (config.block_m, config.block_n)
    inputs = (q, k, v)
    if quant is not None:
        inputs = oracle.sage_inputs(
            q, k, v, quant.dtype_qk, quant.q_block_size, quant.k_block_size, has_fp8(capability())
        )
    expected = oracle.skip_softmax(*inputs, 0.01, tile, own_first=True)
    assert counter.item() > 0.1 * tile_count(tile, batch=1, heads=2, query_length=3000, key_length=3000)
    assert abs(counter.item() - len(expected.tiles)) <= 0.002 * len(expected.tiles) + 1
    dense = oracle.attention(q, k, v)
    if quant is None:
        assert oracle.error(output, expected.output) <= 1.5 * oracle.plain_error(q, k, v, expected=dense)
    else:
        # what is left against quantized inputs is the rounding of P
        assert oracle.error(output, expected.output) <= (0.035 if has_fp8(capability()) else 0.005)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("name", QUANTS)
def test_every_shipped_dense_configuration(architecture, name):
    quant = QUANTS[name]
    need(quant)
    q, k, v = local_heads(1000, seed=2)
    for head_dim in (64, 128, 256):
        config = kernel_config(architecture, head_dim, quant, False)
        if config.tma and capability() < (9, 0):
            pytest.skip("no tensor descriptors here")
        q, k, v = local_heads(1000, head_dim=head_dim, seed=2)
        expected = oracle.attention(q, k, v)
        output = run(q, k, v, quant=quant, config=config)
        assert oracle.error(output, expected) <= allowed_error(q, k, v, quant, expected)


@pytest.mark.parametrize("name", QUANTS)
def test_the_smallest_threshold_is_dense_and_two_is_not(name):
    quant = QUANTS[name]
    need(quant)
    q, k, v = local_heads(5000, seed=3)
    dense = run(q, k, v, quant=quant).double()
    assert oracle.error(run(q, k, v, quant=quant, threshold=1e-9), dense) < (3e-3 if quant is None else 2e-2)
    assert oracle.error(run(q, k, v, quant=quant, threshold=2.0), dense) > 0.1


@pytest.mark.parametrize(("name", "threshold"), MODES)
def test_batches_groups_and_lengths(name, threshold):
    quant = QUANTS[name]
    need(quant)
    q, k, v = local_heads(500, heads=4, kv_heads=2, batch=2, seed=4)
    options = dict(quant=quant, threshold=threshold)
    output = run(q, k, v, **options)
    for b in range(2):
        assert torch.equal(output[b : b + 1], run(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options))
    lengths = torch.tensor([500, 333], dtype=torch.int32, device="cuda")
    k[1, 333:], v[1, 333:] = 1e4, -1e4
    padded = run(q, k, v, key_lengths=lengths, kv_order="sequential", **options)
    cut = run(q[1:], k[1:, :333], v[1:, :333], kv_order="sequential", **options)
    assert padded.isfinite().all()
    assert oracle.error(padded[1:], cut.double()) < 3e-3


@pytest.mark.parametrize("name", QUANTS)
def test_strided_views(name):
    quant = QUANTS[name]
    need(quant)
    q, k, v = local_heads(1000, heads=4, seed=5)
    options = dict(quant=quant, threshold=0.01)
    expected = run(q, k, v, **options)
    fused = torch.cat([x.flatten(2) for x in (q, k, v)], 2)
    assert torch.equal(expected, run(*(x.unflatten(2, (4, 128)) for x in fused.chunk(3, 2)), **options))
    heads_first = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(expected, run(*heads_first, **options))


@pytest.mark.parametrize(("name", "threshold"), MODES)
@pytest.mark.parametrize("tokens", [160_000, 300_000])
def test_long_fused_sequences(tokens, name, threshold):
    """Rows of 21,504 elements, as a fused QKV projection leaves them: 300,000 of them pass 2^32 elements."""
    quant = QUANTS[name]
    need(quant)
    stride = 21_504
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * tokens * stride + 8 * 2**30:
        pytest.skip("not enough GPU memory")
    rows = torch.empty(1, tokens, stride, dtype=torch.bfloat16, device="cuda")
    views = [rows[:, :, start : start + 128].unflatten(2, (1, 128)) for start in (0, 7168, 21_376)]
    for view, source in zip(views, local_heads(tokens, heads=1, seed=6)):
        view.copy_(source)
    q, k, v = views
    assert q.stride(1) == stride
    output = run(q, k, v, quant=quant, threshold=threshold)
    assert output.isfinite().all()
    tile = tile_shape(capability(), 128, quant, True)
    picked = [0, tokens // 3 // tile[0], (tokens - 1) // tile[0]]
    wanted = torch.cat([torch.arange(i * tile[0], min((i + 1) * tile[0], tokens)) for i in picked]).cuda()
    inputs = (q, k, v)
    if quant is not None:
        inputs = oracle.sage_inputs(
            q, k, v, quant.dtype_qk, quant.q_block_size, quant.k_block_size, has_fp8(capability())
        )
    if threshold:
        expected = oracle.skip_softmax(*inputs, threshold, tile, own_first=True, query_tiles=picked).output[:, wanted]
    else:
        expected = oracle.attention(inputs[0][:, wanted], *inputs[1:])
    limit = {None: 5e-3}.get(quant, 0.035 if has_fp8(capability()) else 0.006)
    assert oracle.error(output[:, wanted], expected) < limit


@pytest.mark.parametrize("name", QUANTS)
def test_cubes_and_own_first_are_exact(name):
    quant = QUANTS[name]
    need(quant)
    grid = (7, 18, 22)
    lead, tail = 33, 5
    q, k, v = local_heads(math.prod(grid) + lead + tail, seed=7)
    order = TokenOrder(grid, lead=lead, tail=tail, device="cuda")
    raster = run(q, k, v, quant=quant, threshold=0.0, kv_order="sequential")
    cubes = order.undo(run(*(order.apply(x) for x in (q, k, v)), quant=quant, threshold=0.0))
    expected = oracle.attention(q, k, v)
    if quant is None:
        assert oracle.error(cubes, raster.double()) < 3e-3
    # quantized, both are equally far from the truth: other tokens share a scale
    assert oracle.error(cubes, expected) < 1.1 * oracle.error(raster, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("name", QUANTS)
def test_bad_numbers_stay_visible(name, which, bad):
    quant = QUANTS[name]
    need(quant)
    tensors = list(local_heads(1000, heads=1, seed=8))
    tensors[which][0, 900, 0, 7] = bad
    finite = oracle.attention(*tensors).isfinite()
    for threshold in (None, 0.01, 2.0):
        output = run(*tensors, quant=quant, threshold=threshold)
        assert not output.isfinite()[~finite].any()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("keys", [16, 700, 5000])
def test_a_large_v_that_no_query_attends_to(name, keys):
    quant = QUANTS[name]
    need(quant)
    q, k, v = oracle.lone_large_values(*local_heads(keys, seed=11))
    q = q[:, :500]
    assert oracle.error(run(q, k, v, quant=quant), oracle.attention(q, k, v)) < 0.1


@pytest.mark.parametrize("name", QUANTS)
def test_outliers_in_k(name):
    quant = QUANTS[name]
    need(quant)
    q, k, v = local_heads(1000, seed=9)
    k[..., 3] += 40
    k[:, 500, :, 9] = 300
    output = run(q, k, v, quant=quant, threshold=0.0)
    assert output.isfinite().all()
    expected = oracle.attention(q, k, v)
    assert oracle.error(output, expected) <= allowed_error(q, k, v, quant, expected)


@pytest.mark.parametrize(("name", "threshold"), MODES)
def test_a_call_neither_synchronizes_nor_hoards(name, threshold):
    quant = QUANTS[name]
    need(quant)
    q, k, v = local_heads(20_000, heads=8, seed=10)
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    options = dict(quant=quant, threshold=threshold, skipped=counter)
    run(q, k, v, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = triton_attention(q, k, v, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies = 0 if quant is None else 3 * q.numel()
    assert torch.cuda.max_memory_allocated() - before <= output.nbytes + copies + 64 * 2**20
    assert torch.cuda.memory_allocated() - before <= output.nbytes + 512
