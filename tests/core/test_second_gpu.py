"""Tensors on a GPU that is not the current one, as with a model on the second of two."""

import pytest
import torch

from trtllm_core.api import plan
from trtllm_core.backends import AttentionCall, Unavailable
from trtllm_core.calibration_counts import TRIAL_THRESHOLDS, count_skipped_tiles, reference_count
from trtllm_core.device import Device
from trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
INT8, FP8, SKIP = AttnQuantSpec("int8"), AttnQuantSpec("fp8_e4m3"), SkipSoftmaxSpec(threshold=1e-6)
SPECS = [
    AttentionSpec("TRITON_ATTN"),
    AttentionSpec("TRITON_ATTN", skip_softmax=SKIP),
    AttentionSpec("TRITON_ATTN", quant=INT8),
    AttentionSpec("TRITON_ATTN", quant=FP8, skip_softmax=SKIP),
    *(AttentionSpec(name) for name in ("TORCH_SDPA", "CUDNN_ATTN", "FLASH_ATTN", "FLASHINFER_ATTN", "SAGE_ATTN", "FMHA_V2")),
]


def tensors(head_dim=128, tokens=1100):
    generator = torch.Generator("cuda:1").manual_seed(0)
    shape = (1, tokens, 4, head_dim)
    return [torch.randn(shape, device="cuda:1", generator=generator).bfloat16() for _ in range(3)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention(spec, head_dim):
    assert torch.cuda.current_device() == 0
    query, key, value = tensors(head_dim)
    try:
        decided = plan(spec, Device.current("cuda:1"), head_dim=head_dim, dtype=torch.bfloat16)
    except Unavailable as error:
        pytest.skip(str(error))
    threshold = spec.skip_softmax and spec.skip_softmax.threshold
    out = decided.run(
        AttentionCall(query, key, value, scale=head_dim**-0.5, threshold=threshold, quant=spec.quant)
    )
    heads = (x.double().transpose(1, 2) for x in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    error = float((out.double() - expected).norm() / expected.norm())
    assert out.device == query.device and error <= (0.1 if decided.active.requirements.lossy or spec.is_lossy else 5e-3)
    assert torch.cuda.current_device() == 0


def test_counting_for_a_calibration():
    query, key, _ = tensors()
    counted = count_skipped_tiles(query, key, tile=(128, 128), kv_order="sequential")
    expected = reference_count(query, key, 128**-0.5, TRIAL_THRESHOLDS, (128, 128), "sequential")
    assert counted.device == query.device
    assert (counted - expected).abs().max() <= 1e-3 * expected.max().clamp(min=1000)
