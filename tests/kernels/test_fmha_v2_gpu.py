"""FMHA_V2 on a Hopper GPU against float64 and the reference: padding mask, separate q, k, v.

The first run on a machine compiles FlashInfer's kernels, which takes minutes.
"""

import pytest
import torch

from trtllm_core import backends, reference
from trtllm_core.backends import AttentionCall, fmha_v2
from trtllm_core.device import Device

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def backend():
    device = Device.current()
    reasons = backends.reasons("FMHA_V2", backends.Request(), device)
    if reasons:
        pytest.skip("; ".join(reasons))
    fmha_v2.load(device)


def make(batch=2, queries=520, keys=520, heads=4, key_heads=2, dim=128, local=False):
    """q, k, v [B, L, H, D] seen through [B, H, L, D] memory; local: see the contract tests."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, queries, dim, generator=g)
    k = torch.randn(batch, key_heads, keys, dim, generator=g)
    v = torch.randn(batch, key_heads, keys, dim, generator=g) + 0.1
    if local:
        q, k = (0.3 * x + 4.8 * torch.eye(3, dim)[torch.arange(x.shape[2]) // 256 % 3] for x in (q, k))
    return tuple(x.to("cuda", torch.bfloat16).transpose(1, 2) for x in (q, k, v))


def run(q, k, v, **fields):
    fields.setdefault("scale", q.shape[-1] ** -0.5)
    torch.empty(1 << 27, dtype=torch.uint8, device="cuda").fill_(255)  # NaN where memory is reused
    return fmha_v2.run(AttentionCall(q, k, v, **fields))


def exact(q, k, v, scale):
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (((q @ k.transpose(2, 3)) * scale).softmax(-1) @ v).transpose(1, 2)


def error(out, expected):
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def bound(q, k, v, scale):
    """Twice what PyTorch's own attention in q's dtype gets wrong."""
    groups = q.shape[2] // k.shape[2]
    heads = (q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v)))
    plain = torch.nn.functional.scaled_dot_product_attention(*heads, scale=scale).transpose(1, 2)
    return max(2 * error(plain, exact(q, k, v, scale)), 2e-3)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 127, 128, 129, 1000])
def test_dense(dim, length):
    q, k, v = make(queries=length, keys=length, dim=dim)
    assert error(run(q, k, v, scale=0.07), exact(q, k, v, 0.07)) <= bound(q, k, v, 0.07)


def test_dense_of_8193_tokens():
    q, k, v = make(batch=1, queries=8193, keys=8193)
    assert error(run(q, k, v), exact(q, k, v, 128**-0.5)) <= bound(q, k, v, 128**-0.5)


@pytest.mark.parametrize("queries, keys", [(1000, 77), (4096, 512), (77, 1000), (1, 520)])
@pytest.mark.parametrize("threshold", [None, 1e-9])
def test_cross_attention_lengths(queries, keys, threshold):
    """FlashInfer addresses k and v with q's row count: without rows of our own this reads what is not k."""
    q, k, v = make(queries=queries, keys=keys)
    limit = bound(q, k, v, 128**-0.5) if threshold is None else 2e-2
    assert error(run(q, k, v, threshold=threshold), exact(q, k, v, 128**-0.5)) <= limit


def test_padded_keys_do_not_count():
    q, k, v = make(batch=3)
    lengths = (520, 1, 300)
    k[2, 300:] = torch.nan
    out = run(q, k, v, key_lengths=torch.tensor(lengths, device="cuda"), host_key_lengths=lengths)
    for row, length in enumerate(lengths):
        part = (q[row : row + 1], k[row : row + 1, :length], v[row : row + 1, :length])
        assert error(out[row : row + 1], exact(*part, 128**-0.5)) <= bound(*part, 128**-0.5)


def test_thresholds_at_the_ends():
    q, k, v = make(queries=1024, keys=1024, local=True)
    dense = run(q, k, v)
    assert torch.equal(run(q, k, v, threshold=0.0), dense)
    assert error(run(q, k, v, threshold=1e-9), dense) <= 2e-2
    assert error(run(q, k, v, threshold=2.0), dense) > 2e-2


@pytest.mark.parametrize("dim, tile", [(128, (64, 128)), (64, (64, 256))])
@pytest.mark.parametrize("length", [1000, 2050])
def test_skips_what_the_reference_skips(dim, tile, length):
    q, k, v = make(queries=length, keys=length, dim=dim, local=True)
    rows = length // 64 * 64  # in the last tile, the rows behind the end vote too
    expected, stats = reference.attention(
        *(x.double() for x in (q, k, v)), threshold=0.5, tile=tile, kv_order="sequential"
    )
    assert 0 < stats.skipped < stats.total
    out = run(q, k, v, threshold=0.5)
    assert error(out[:, :rows], expected[:, :rows]) <= bound(q, k, v, dim**-0.5)
    assert error(run(q, k, v), expected) > 2e-2


def test_threshold_is_the_same_for_padded_sequences():
    q, k, v = make(queries=1000, keys=1000, local=True)
    lengths = (1000, 600)
    fields = {"key_lengths": torch.tensor(lengths, device="cuda"), "host_key_lengths": lengths}
    out = run(q, k, v, threshold=0.5, **fields)
    for row, length in enumerate(lengths):
        part = (q[row : row + 1], k[row : row + 1, :length], v[row : row + 1, :length])
        expected, _ = reference.attention(
            *(x.double() for x in part), threshold=0.5, tile=(64, 128), kv_order="sequential"
        )
        whole = slice(0, 1000 // 64 * 64)
        assert error(out[row : row + 1, whole], expected[:, whole]) <= bound(*part, 128**-0.5)


def test_video_heads_skip_what_the_reference_skips():
    from benchmarks.workload import video_heads

    q, k, v = video_heads((9, 30, 52), 3)
    expected, stats = reference.attention(
        *(x.float() for x in (q, k, v)), threshold=0.05, tile=(64, 128), kv_order="sequential"
    )
    print(f"sparsity {stats.sparsity:.3f}")
    assert stats.skipped and error(run(q, k, v, threshold=0.05), expected) <= 2e-2


def test_scores_that_fp16_cannot_hold():
    """q k^T reaches 4e5 before the scale; the fp16 kernels, which are not used, fail this."""
    q, k, v = make(batch=1, queries=256, keys=256)
    q, k = (x * 60.0 for x in (q, k))
    scale = 128**-0.5 / 3600
    assert error(run(q, k, v, scale=scale), exact(q, k, v, scale)) <= 1e-2
