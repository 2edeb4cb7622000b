"""The kernels against the float64 oracle, in Triton's interpreter (float16, the only 16-bit type it multiplies)."""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on the NaN and inf of these tests
if torch.cuda.is_available():
    pytest.skip("the interpreter stands in for a GPU; test_gpu runs here", allow_module_level=True)

import triton
import triton.language as tl

from tests.kernels import oracle
from trtllm_core.kernels import KernelConfig, tile_count
from trtllm_core.kernels.attention_kernel import _nan_maximum
from trtllm_core.kernels.forward import triton_attention
from trtllm_core.specs import AttnQuantSpec

SMALL = KernelConfig(32, 16, 4, 1)  # many tiles from few tokens
INT8 = AttnQuantSpec(dtype_qk="int8")
FP8 = AttnQuantSpec(dtype_qk="fp8_e4m3", q_block_size=4, k_block_size=4)
LENGTHS = [(1, 1), (63, 63), (127, 127), (128, 128), (129, 129), (300, 300), (1, 300), (300, 1), (129, 63)]


def inputs(query_length, key_length=None, heads=1, kv_heads=None, head_dim=64, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    key_length = query_length if key_length is None else key_length
    kv_heads = heads if kv_heads is None else kv_heads

    def normal(*shape):
        return torch.randn(*shape, generator=generator).half()

    return (
        normal(batch, query_length, heads, head_dim),
        normal(batch, key_length, kv_heads, head_dim),
        normal(batch, key_length, kv_heads, head_dim),
    )


def local_inputs(tokens, heads=1, head_dim=64, seed=0, width=24.0):
    """q, k, v whose scores fall off with the distance of tokens, so that far tiles are worth skipping."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.randn(head_dim // 2, generator=generator) / width
    phase = torch.arange(tokens)[:, None] * frequency
    feature = torch.cat([phase.cos(), phase.sin()], 1) * 1.8

    def around(strength):
        noise = torch.randn(1, tokens, heads, head_dim, generator=generator)
        return (strength * feature[None, :, None] + 0.3 * noise).half()

    return around(1.0), around(1.0), around(0.0) * 3


def run(query, key, value, **options):
    """The kernel into a NaN-poisoned output."""
    out = torch.full_like(query, math.nan, memory_format=torch.contiguous_format)
    returned = triton_attention(query, key, value, out=out, **options)
    assert returned is out
    return out


def assert_close(output, query, key, value, scale=None, factor=2.0):
    expected = oracle.attention(query, key, value, scale)
    assert oracle.error(output, expected) <= factor * oracle.plain_error(query, key, value, scale) + 1e-6


@pytest.mark.parametrize("threshold", [None, 0.0], ids=["dense", "skip"])
@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_exact_modes_match_the_oracle(query_length, key_length, threshold):
    q, k, v = inputs(query_length, key_length)
    assert_close(run(q, k, v, threshold=threshold), q, k, v)


@pytest.mark.parametrize("threshold", [None, 0.0], ids=["dense", "skip"])
@pytest.mark.parametrize("quant", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS[1:6] + [(129, 63)])
def test_sage_matches_its_definition(query_length, key_length, quant, threshold):
    q, k, v = inputs(query_length, key_length, seed=1)
    output = run(q, k, v, quant=quant, threshold=threshold)
    expected = oracle.attention(q, k, v)
    allowed = oracle.error(
        oracle.sage(q, k, v, quant.dtype_qk, quant.q_block_size, quant.k_block_size), expected
    )
    assert oracle.error(output, expected) <= 1.25 * allowed


@pytest.mark.parametrize("quant", [None, INT8], ids=["float16", "int8"])
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_head_sizes(head_dim, quant):
    q, k, v = inputs(129, head_dim=head_dim, heads=2)
    output = run(q, k, v, quant=quant, threshold=0.0)
    if quant is None:
        assert_close(output, q, k, v)
    else:
        expected = oracle.attention(q, k, v)
        assert oracle.error(output, expected) <= 1.25 * oracle.error(oracle.sage(q, k, v, "int8", 1, 16), expected)


@pytest.mark.parametrize(("q_block", "k_block"), list(itertools.product((1, 4, 16), repeat=2)))
def test_scale_block_sizes(q_block, k_block):
    q, k, v = inputs(70, seed=2)
    quant = AttnQuantSpec(dtype_qk="int8", q_block_size=q_block, k_block_size=k_block)
    output = run(q, k, v, quant=quant, config=SMALL)
    expected = oracle.attention(q, k, v)
    emulated = oracle.sage(q, k, v, "int8", q_block, k_block)
    assert oracle.error(output, expected) <= 1.25 * oracle.error(emulated, expected)


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("order", ["own_first", "sequential"])
def test_skipped_tiles_are_the_oracles(order, threshold):
    q, k, v = local_inputs(300, heads=2)
    counter = torch.zeros(1, dtype=torch.int64)
    output = run(q, k, v, threshold=threshold, kv_order=order, skipped=counter, config=SMALL)
    expected = oracle.skip_softmax(q, k, v, threshold, (32, 16), own_first=order == "own_first")
    # float16 scores are off by less than this; a nearer decision would be a coin toss
    assert expected.margin > 1e-3
    assert counter.item() == len(expected.tiles) > 0
    assert oracle.error(output, expected.output) <= 2 * oracle.plain_error(q, k, v)
    if threshold > 0.1:
        assert oracle.error(output, oracle.attention(q, k, v)) > 10 * oracle.error(output, expected.output)
    total = tile_count((32, 16), batch=1, heads=2, query_length=300, key_length=300)
    assert total == 2 * 10 * 19 > counter.item()


def test_sage_skips_like_the_oracle_on_its_own_inputs():
    q, k, v = local_inputs(300, heads=2, seed=3)
    counter = torch.zeros(1, dtype=torch.int64)
    run(q, k, v, quant=INT8, threshold=0.05, skipped=counter, config=SMALL)
    quantized = oracle.sage_inputs(q, k, v, "int8", 1, 16)
    expected = oracle.skip_softmax(*quantized, 0.05, (32, 16), own_first=True)
    assert expected.margin > 1e-4
    assert counter.item() == len(expected.tiles) > 0


def test_cross_attention_is_visited_in_sequence():
    q, k, v = local_inputs(200, seed=4)
    q = q[:, :100]
    expected = oracle.skip_softmax(q, k, v, 0.1, (32, 16), own_first=False)
    counter = torch.zeros(1, dtype=torch.int64)
    output = run(q, k, v, threshold=0.1, kv_order="own_first", skipped=counter, config=SMALL)
    assert counter.item() == len(expected.tiles) > 0
    assert oracle.error(output, expected.output) <= 2 * oracle.plain_error(q, k, v)


def test_above_one_only_the_first_tile_stays():
    q, k, v = inputs(64, seed=5)
    counter = torch.zeros(1, dtype=torch.int64)
    # nothing rises by ln 1e30 over the first tile
    output = run(q, k, v, threshold=1e30, kv_order="sequential", skipped=counter, config=SMALL)
    assert counter.item() == 2 * 3
    expected = oracle.attention(q, k[:, :16], v[:, :16])
    assert oracle.error(output, expected) <= 2 * oracle.plain_error(q, k[:, :16], v[:, :16])


def test_zero_skips_nothing():
    q, k, v = local_inputs(300)
    counter = torch.zeros(1, dtype=torch.int64)
    assert_close(run(q, k, v, threshold=0.0, skipped=counter, config=SMALL), q, k, v)
    assert counter.item() == 0


@pytest.mark.parametrize("quant", [None, INT8], ids=["float16", "int8"])
def test_grouped_heads_and_batches(quant):
    q, k, v = inputs(70, 90, heads=4, kv_heads=2, batch=2)
    options = dict(quant=quant, threshold=0.0, config=SMALL)
    output = run(q, k, v, **options)
    for b in range(2):
        assert torch.equal(output[b : b + 1], run(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options))
    repeated = run(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), **options)
    assert torch.equal(output, repeated)
    if quant is None:
        assert_close(output, q, k, v)


@pytest.mark.parametrize("quant", [None, INT8], ids=["float16", "int8"])
@pytest.mark.parametrize("threshold", [None, 0.02], ids=["dense", "skip"])
def test_key_lengths_hide_what_lies_beyond(threshold, quant):
    q, k, v = inputs(90, batch=2, seed=6)
    lengths = torch.tensor([90, 37], dtype=torch.int32)
    k[1, 37:], v[1, 37:] = 1e4, -1e4
    options = dict(quant=quant, threshold=threshold, kv_order="sequential", config=SMALL)
    output = run(q, k, v, key_lengths=lengths, **options)
    assert torch.equal(output[:1], run(q[:1], k[:1], v[:1], **options))
    assert torch.equal(output[1:], run(q[1:], k[1:, :37], v[1:, :37], **options))


def test_an_empty_sequence_of_a_batch_is_nan_and_harms_no_other():
    q, k, v = inputs(40, batch=2)
    for threshold in (None, 0.02):
        output = run(q, k, v, key_lengths=torch.tensor([0, 40], dtype=torch.int32), threshold=threshold, config=SMALL)
        assert output[0].isnan().all() and output[1].isfinite().all()


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.2])
def test_scales(scale):
    q, k, v = inputs(70)
    assert_close(run(q, k, v, scale=scale, config=SMALL), q, k, v, scale)
    assert_close(run(q, k, v, scale=scale, threshold=0.0, config=SMALL), q, k, v, scale)


@pytest.mark.parametrize("quant", [None, INT8], ids=["float16", "int8"])
def test_strided_views_give_what_contiguous_tensors_give(quant):
    q, k, v = inputs(70, heads=2)
    options = dict(quant=quant, threshold=0.02, config=SMALL)
    expected = run(q, k, v, **options)
    fused = torch.cat([x.flatten(2) for x in (q, k, v)], 2)  # [batch, tokens, 3 * heads * head_dim]
    views = [x.unflatten(2, (2, 64)) for x in fused.chunk(3, 2)]
    assert torch.equal(expected, run(*views, **options))
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(expected, run(*heads_first, **options))
    columns_strided = [torch.stack([x, x], 4)[..., 0] for x in (q, k, v)]
    assert torch.equal(expected, run(*columns_strided, **options))


def test_tensor_descriptors_give_what_pointers_give():
    q, k, v = inputs(129, heads=2, head_dim=80)
    for quant, threshold in itertools.product((None, INT8), (None, 0.02)):
        outputs = [
            run(q, k, v, quant=quant, threshold=threshold, config=KernelConfig(64, 32, 4, 2, tma=tma))
            for tma in (False, True)
        ]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quant", [None, INT8], ids=["float16", "int8"])
def test_bad_numbers_give_what_dense_gives(which, bad, quant):
    tensors = dict(zip(("query", "key", "value"), inputs(70, seed=7)))
    tensors[which][0, 60, 0, 5] = bad
    q, k, v = tensors.values()
    finite = oracle.attention(q, k, v).isfinite()
    for threshold in (None, 0.0, 2.0, 1e30):
        output = run(q, k, v, quant=quant, threshold=threshold, config=SMALL)
        # where dense is not finite, neither is this: no threshold skips a NaN away
        assert not output.isfinite()[~finite].any()
        if quant is None and threshold in (None, 0.0):
            assert torch.equal(output.isfinite(), finite)


def test_a_row_whose_first_tile_is_all_minus_infinity():
    q, k, v = inputs(17, seed=8)
    q[..., 0] = 1.0
    k[0, 16, 0, 0] = -math.inf  # the second tile of 16 holds only this key: row 16 starts there
    expected = oracle.attention(q, k, v)
    assert expected.isfinite().all()
    for threshold in (None, 0.0):
        output = run(q, k, v, threshold=threshold, config=KernelConfig(16, 16, 4, 1))
        assert oracle.error(output, expected) < 1e-3


@pytest.mark.parametrize("quant", [INT8, FP8], ids=["int8", "fp8"])
def test_outliers_in_k_do_not_reach_the_result(quant):
    q, k, v = inputs(129, seed=9)
    clean = oracle.error(run(q, k, v, quant=quant), oracle.attention(q, k, v))
    k[..., 3] += 60.0  # a channel of large keys, as trained models have
    output = run(q, k, v, quant=quant)
    assert output.isfinite().all()
    assert oracle.error(output, oracle.attention(q, k, v)) <= 1.5 * clean


def test_large_values_of_v_come_back():
    q, k, v = inputs(129, seed=10)
    v += 50.0
    error = oracle.error(run(q, k, v, quant=INT8), oracle.attention(q, k, v))
    assert error < 2e-3  # the mean is exact; only the spread is in FP8


@pytest.mark.parametrize("quant", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("keys", [16, 129])
def test_a_large_v_that_no_query_attends_to_spoils_nothing(quant, keys):
    q, k, v = oracle.lone_large_values(*inputs(40, keys, seed=11))
    assert oracle.error(run(q, k, v, quant=quant), oracle.attention(q, k, v)) < 0.1


@triton.jit
def slow_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def both_maxima(source, out):
    x = tl.load(source + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :])
    tl.store(out + tl.arange(0, 4), tl.reduce(x, 1, _nan_maximum))
    tl.store(out + 4 + tl.arange(0, 4), tl.reduce(x, 1, slow_maximum))


def test_the_quick_reductions_are_the_slow_ones():
    x = torch.randn(4, 8)
    x[1, 2], x[2, 3], x[3] = math.nan, math.inf, -math.inf
    out = torch.empty(8)
    both_maxima[(1,)](x, out)
    assert torch.equal(out[:4].nan_to_num(7, 8, 9), out[4:].nan_to_num(7, 8, 9))
    assert out[1].isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key=torch.zeros(1, 0, 2, 64).half(), value=torch.zeros(1, 0, 2, 64).half()), "no tokens"),
        (dict(query=torch.zeros(1, 8, 2, 64)), "float32"),
        (dict(value=torch.zeros(1, 9, 2, 64).half()), "differ in shape"),
        (dict(query=torch.zeros(1, 8, 3, 64).half()), "multiple"),
        (dict(threshold=math.nan), "threshold=nan"),
        (dict(threshold=-0.1), "threshold=-0.1"),
        (dict(kv_order="random"), "kv_order='random'"),
        (dict(key_lengths=torch.zeros(1)), "int32"),
        (dict(quant=AttnQuantSpec(dtype_qk="float16")), "dtype_qk='float16'"),
    ],
)
def test_bad_calls_say_what_is_wrong(change, message):
    q, k, v = inputs(8, heads=2)
    with pytest.raises(ValueError, match=message):
        triton_attention(**{"query": q, "key": k, "value": v, **change})


def test_no_queries_give_an_empty_output():
    q, k, v = inputs(0, 8)
    assert run(q, k, v).shape == (1, 0, 1, 64)
