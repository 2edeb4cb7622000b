"""The Hopper kernels on a GPU of compute capability 9.0, against float64 (hopper_oracle)."""

import math
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).parent))
import hopper_oracle as oracle  # noqa: E402
import oracle as portable_oracle  # noqa: E402

from trtllm_core.kernels import hopper, tile_count  # noqa: E402
from trtllm_core.specs import AttnQuantSpec  # noqa: E402

pytestmark = pytest.mark.gpu
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs compute capability 9.0", allow_module_level=True)

FP8_16 = AttnQuantSpec(dtype_qk="fp8_e4m3")
INT8_16 = AttnQuantSpec(dtype_qk="int8")
SAGE = [
    AttnQuantSpec(dtype_qk=dtype, q_block_size=q, k_block_size=k)
    for dtype in ("fp8_e4m3", "int8")
    for q, k in ((1, 16), (4, 4), (16, 1))
]
TOKENS = (1, 63, 64, 127, 128, 129, 191, 193, 300, 1000, 4097)


def ids(spec):
    return "none" if spec is None else f"{spec.dtype_qk}-q{spec.q_block_size}-k{spec.k_block_size}"


def local(batch, tokens, heads, kv_heads, head_dim=128, dtype=torch.bfloat16, seed=0, key_tokens=None):
    """Query and key whose scores fall off with distance, like a local video head's; value is normal noise."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    def features(count, number, frequencies):
        phase = torch.arange(count, device="cuda")[:, None, None] * frequencies
        f = torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(head_dim // 2)
        return 9.0 * f + 0.3 * normal(batch, count, number, head_dim)

    frequencies = 0.02 * normal(1, head_dim // 2)
    key_tokens = key_tokens or tokens
    q, k = features(tokens, heads, frequencies), features(key_tokens, kv_heads, frequencies)
    return tuple(x.to(dtype) for x in (q, k, normal(batch, key_tokens, kv_heads, head_dim)))


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def plain_error(query, key, value, expected, scale=None):
    """What the same mathematics in PyTorch, in the same dtype, gets wrong."""
    repeat = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return error(found.transpose(1, 2), expected)


def check(query, key, value, *, threshold=None, quant=None, key_lengths=None, scale=None, kv_order="own_first", config=None):
    """Run into NaN, compare with the oracle at the same grain; returns the share of skipped tiles."""
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device="cuda")
    skipped = torch.zeros(1, dtype=torch.int64, device="cuda")
    hopper.hopper_attention(
        query, key, value, threshold=threshold, quant=quant, key_lengths=key_lengths, scale=scale,
        kv_order=kv_order, skipped=skipped, out=out, config=config,
    )  # fmt: skip
    config = config or hopper.hopper_config(query.shape[3], quant, threshold is not None)
    inputs = (query, key, value) if quant is None else oracle.quantized(query, key, value, quant, key_lengths)
    expected = oracle.attention(
        *inputs, threshold=threshold, key_lengths=key_lengths, scale=scale, own_first=kv_order == "own_first",
        keys=config.keys, order_rows=64 * config.consumers, fp8_weights=quant is not None,
    )  # fmt: skip
    assert torch.isfinite(out).all()
    # a tile within the margin of λ may fall either way, and shifts its row's later ones
    assert abs(skipped.item() - expected.skipped) <= 2 * expected.unsure
    if quant is not None:
        # the kernel's scores in FP8 come out of an accumulator of about 14 bits; some weights round the other way
        limit = 1.2e-2 if quant.dtype_qk == "fp8_e4m3" else 6e-3
    else:
        limit = 2e-3 if query.dtype == torch.float16 else 6e-3
    assert error(out, expected.output) < limit + 0.02 * bool(expected.unsure)
    tiles = tile_count(
        (64, config.keys), batch=query.shape[0], heads=query.shape[2], query_length=query.shape[1],
        key_length=key.shape[1] if key_lengths is None else key_lengths.tolist(),
    )  # fmt: skip
    return skipped.item() / tiles


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("threshold", [None, 0.0, 0.02], ids=["dense", "zero", "skip"])
@pytest.mark.parametrize("quant", [None, FP8_16, INT8_16], ids=ids)
def test_token_counts(tokens, threshold, quant):
    sparsity = check(*local(1, tokens, 2, 2), threshold=threshold, quant=quant)
    assert not (threshold or 0.0) or tokens < 1000 or 0.2 < sparsity < 1
    assert threshold or sparsity == 0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threshold", [None, 0.02], ids=["dense", "skip"])
@pytest.mark.parametrize("quant", [None, *SAGE], ids=ids)
def test_every_configuration(head_dim, dtype, threshold, quant):
    sparsity = check(*local(2, 1350, 4, 2, head_dim, dtype), threshold=threshold, quant=quant)
    assert threshold is None or sparsity > 0.2


@pytest.mark.parametrize("threshold", [None, 0.02], ids=["dense", "skip"])
@pytest.mark.parametrize("quant", [None, FP8_16, INT8_16], ids=ids)
def test_cross_attention_and_key_lengths(threshold, quant):
    check(*local(1, 700, 2, 1, key_tokens=333), threshold=threshold, quant=quant)
    lengths = torch.tensor([1, 130, 333], dtype=torch.int32, device="cuda")
    query, key, value = local(3, 200, 4, 2, key_tokens=333)
    for b, length in enumerate(lengths.tolist()):
        key[b, length:] = value[b, length:] = math.nan
    check(query, key, value, threshold=threshold, quant=quant, key_lengths=lengths)
    query, key, value = local(3, 333, 4, 2)
    check(query, key, value, threshold=threshold, quant=quant, key_lengths=lengths)


@pytest.mark.parametrize("quant", [FP8_16, INT8_16], ids=ids)
@pytest.mark.parametrize("keys", [16, 700])
def test_a_large_v_that_no_query_attends_to(quant, keys):
    query, key, value = portable_oracle.lone_large_values(*local(2, 300, 3, 3, key_tokens=keys))
    output = hopper.hopper_attention(query, key, value, quant=quant)
    assert portable_oracle.error(output, portable_oracle.attention(query, key, value)) < 0.1


@pytest.mark.parametrize("threshold", [None, 0.02], ids=["dense", "skip"])
def test_views_are_read_in_place(threshold, monkeypatch):
    query, key, value = local(2, 515, 4, 4)
    fused = torch.stack([query, key, value], 2).reshape(2, 515, -1)
    views = [x.unflatten(-1, (4, 128)) for x in fused.chunk(3, -1)]
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    expected = hopper.hopper_attention(query, key, value, threshold=threshold)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    for tensors in (views, heads_first):
        assert torch.equal(hopper.hopper_attention(*tensors, threshold=threshold), expected)


@pytest.mark.parametrize("quant", [None, FP8_16], ids=ids)
def test_unaligned_views_are_copied(quant):
    query, key, value = local(1, 200, 2, 2)
    wide = torch.zeros(1, 200, 2, 136, dtype=torch.bfloat16, device="cuda")
    wide[..., 3:131] = query
    found = hopper.hopper_attention(wide[..., 3:131], key, value, quant=quant)
    assert torch.equal(found, hopper.hopper_attention(query, key, value, quant=quant))


@pytest.mark.parametrize("kv_order", ["own_first", "sequential"])
@pytest.mark.parametrize("threshold", [0.001, 0.5, 2.0])
def test_thresholds_and_orders(kv_order, threshold):
    check(*local(1, 2000, 3, 3), threshold=threshold, kv_order=kv_order)


@pytest.mark.parametrize("scale", [0.5, 0.02, 0.0, -0.1])
@pytest.mark.parametrize("quant", [None, INT8_16], ids=ids)
def test_scale(scale, quant):
    check(*local(1, 400, 2, 2), scale=scale, quant=quant)


@pytest.mark.parametrize("quant", [None, FP8_16, INT8_16], ids=ids)
@pytest.mark.parametrize("threshold", [None, 0.02], ids=["dense", "skip"])
def test_not_a_number_is_not_lost(threshold, quant):
    query, key, value = local(1, 1000, 2, 2)
    clean = hopper.hopper_attention(query, key, value, threshold=threshold, quant=quant)
    spoiled = query.clone()
    spoiled[0, 500, 0, 5] = math.nan
    out = hopper.hopper_attention(spoiled, key, value, threshold=threshold, quant=quant)
    assert out[0, 500, 0].isnan().all() and torch.equal(out[:, :, 1], clean[:, :, 1])
    spoiled = key.clone()
    spoiled[0, 700, 0, 5] = math.nan
    out = hopper.hopper_attention(query, spoiled, value, threshold=threshold, quant=quant)
    assert out[:, :, 0].isnan().all() and torch.equal(out[:, :, 1], clean[:, :, 1])
    for bad in (math.nan, math.inf):  # at key 10, whose tile the last rows skip
        spoiled = value.clone()
        spoiled[0, 10, 0, 5] = bad
        out = hopper.hopper_attention(query, key, spoiled, threshold=threshold, quant=quant)
        assert not out[:, :, 0, 5].isfinite().any()
        assert torch.equal(out[:, :, 0, 6:], clean[:, :, 0, 6:]) and torch.equal(out[:, :, 1], clean[:, :, 1])
    spoiled = key.clone()
    spoiled[0, 700, 0, 5] = math.inf
    out = hopper.hopper_attention(query, spoiled, value, threshold=threshold, quant=quant)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, spoiled, value)))
    assert not (out[:, :, 0].isfinite() & dense.transpose(1, 2)[:, :, 0].isnan()).any()


@pytest.mark.parametrize("threshold", [None, 0.02], ids=["dense", "skip"])
def test_keys_that_are_minus_infinity(threshold):
    """The first tile's scores are all -inf; later ones are finite."""
    query, key, value = local(1, 512, 1, 1)
    query[..., 0], key[..., 0] = 1.0, 0.0
    key[:, :128, :, 0] = -math.inf
    out = hopper.hopper_attention(query, key, value, threshold=threshold, kv_order="sequential")
    expected = oracle.attention(query, key[:, 128:], value[:, 128:], own_first=False).output
    assert error(out, expected) < 6e-3 + 0.02 * bool(threshold)


def test_error_is_that_of_plain_pytorch():
    query, key, value = local(1, 4097, 2, 2)
    expected = oracle.attention(query, key, value).output
    found = error(hopper.hopper_attention(query, key, value), expected)
    assert found < 1.25 * plain_error(query, key, value, expected)


def test_offsets_beyond_32_bits():
    """Rows of 21,504 numbers (a fused QKV of 40 heads and more) times 150,000 tokens, checked on sampled rows."""
    tokens, width = 150_000, 21_504
    storage = torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda")
    views = [storage[None, :, first : first + 256].unflatten(-1, (2, 128)) for first in (0, 7168, 14336)]
    for view, source in zip(views, local(1, tokens, 2, 2)):
        view.copy_(source)
    query, key, value = views
    rows = torch.tensor([0, 77_777, tokens - 1], device="cuda")
    expected = oracle.attention(query[:, rows], key, value, own_first=False).output
    for threshold, quant, limit in ((None, None, 6e-3), (1e-9, None, 6e-3), (None, INT8_16, 6e-2)):
        out = hopper.hopper_attention(query, key, value, threshold=threshold, quant=quant)
        assert error(out[:, rows], expected) < limit
