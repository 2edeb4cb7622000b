"""FLASHINFER_ATTN on a GPU against float64. The first run on a machine compiles, which takes a minute or two."""

import pytest
import torch

from trtllm_core import backends
from trtllm_core.backends import AttentionCall, flashinfer_attn
from trtllm_core.device import Device
from trtllm_core.specs import AttnQuantSpec

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
FA2 = AttnQuantSpec(flashinfer_backend="fa2")


@pytest.fixture(scope="module", autouse=True)
def backend():
    device = Device.current()
    reasons = backends.reasons("FLASHINFER_ATTN", backends.Request(), device)
    if reasons:
        pytest.skip("; ".join(reasons))
    flashinfer_attn.load(device)


def make(queries, keys):
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 128), (2, 2, keys, 128), (2, 2, keys, 128))
    return tuple(torch.randn(s, generator=g).to("cuda", torch.bfloat16).transpose(1, 2) for s in shapes)


def exact(q, k, v, scale, keep=None):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("queries, keys", [(1, 1), (129, 129), (1000, 77), (520, 1000)])
def test_dense(queries, keys):
    q, k, v = make(queries, keys)
    out = flashinfer_attn.run(AttentionCall(q, k, v, scale=0.07, quant=FA2))
    assert error(out, exact(q, k, v, 0.07)) <= 5e-3


def test_custom_masks():
    q, k, v = make(520, 300)
    keep = torch.rand(2, 1, 520, 300, generator=torch.Generator().manual_seed(1)).to("cuda") > 0.5
    keep[..., 0] = True
    hidden = torch.zeros(keep.shape, device="cuda").masked_fill(~keep, torch.finfo(torch.float32).min)
    for mask in (keep, hidden):
        out = flashinfer_attn.run(AttentionCall(q, k, v, scale=0.1, mask=mask, quant=FA2))
        assert error(out, exact(q, k, v, 0.1, keep)) <= 5e-3
