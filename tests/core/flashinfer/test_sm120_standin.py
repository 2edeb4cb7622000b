"""The arithmetic around FlashInfer's FP8 kernel for sm_120, with a stand-in of the kernel.

The stand-in has the kernel's signature as read in FlashInfer 0.7.4; neither the kernel nor FlashInfer's
own code before it was run.
"""

import pytest
import torch

from trtllm_core.backends import AttentionCall, Unavailable, flashinfer_attn
from trtllm_core.specs import AttnQuantSpec

FP8 = AttnQuantSpec("fp8_e4m3", flashinfer_backend="cute-dsl-prims")


def standin(seen):
    def sm120_fmha_fp8_ragged_prefill(
        q, k, v, o, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, is_causal=False, sm_scale=None,
        kv_tile=None, q_tile=None, lse=None, v_scale=None, enable_pdl=False, skip_softmax_threshold=None,
    ):  # fmt: skip
        assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn} and not is_causal
        seen.append(skip_softmax_threshold)
        groups = q.shape[1] // k.shape[1]
        for b in range(len(cu_seqlens_q) - 1):
            rows = slice(*cu_seqlens_q[b : b + 2].tolist())
            keys = slice(*cu_seqlens_k[b : b + 2].tolist())
            k_, v_ = (x[keys].double().repeat_interleave(groups, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k_) * sm_scale
            o[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_).to(o.dtype)

    return sm120_fmha_fp8_ragged_prefill


@pytest.mark.parametrize("lengths", [None, (200, 90)])
@pytest.mark.parametrize("threshold", [None, 0.05])
def test_rescaling_is_exact_but_for_fp8(monkeypatch, lengths, threshold):
    seen = []
    monkeypatch.setattr(flashinfer_attn, "_fp8_prefill", standin(seen))
    g = torch.Generator().manual_seed(0)
    q = 30 * torch.randn(2, 130, 4, 128, generator=g)
    k = torch.randn(2, 200, 2, 128, generator=g) / 30 + 5  # far from zero: unsmoothed, FP8 would see only this
    v = 100 * torch.randn(2, 200, 2, 128, generator=g)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    k64, v64 = (x.double().repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k64) * 0.1
    fields = {}
    if lengths is not None:
        fields = {"key_lengths": torch.tensor(lengths, dtype=torch.int32), "host_key_lengths": lengths}
        scores[1, :, :, 90:] = -torch.inf
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v64)
    call = AttentionCall(q, k, v, scale=0.1, quant=FP8, threshold=threshold, **fields)
    out = flashinfer_attn.run(call)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - expected).abs().mean() / expected.abs().mean()) < 0.1
    assert set(seen) == {threshold}


def test_without_the_kernel_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(flashinfer_attn, "_fp8_prefill", None)
    x = torch.zeros(1, 8, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(Unavailable, match="nvidia-cutlass-dsl"):
        flashinfer_attn.run(AttentionCall(x, x, x, scale=0.1, quant=FP8))
