"""What the Hopper launcher decides without a GPU, and that it imports without Triton."""

import subprocess
import sys

import pytest
import torch

from trtllm_core.kernels import hopper, tile_count
from trtllm_core.specs import AttnQuantSpec


def test_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import trtllm_core.kernels.hopper"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unsupported_names_every_reason():
    assert hopper.unsupported((9, 0), torch.bfloat16, 128, None, "3.6.0") == ()
    assert hopper.unsupported((9, 0), "float16", 64, AttnQuantSpec(dtype_qk="int8"), "3.9.0+git1") == ()
    assert hopper.unsupported((9, 0), torch.bfloat16, 128, None, "unknown") == ("needs Triton 3.6 or later, found unknown",)
    reasons = hopper.unsupported((10, 0), torch.float32, 80, AttnQuantSpec(dtype_qk="float16"), "3.5.1")
    assert len(reasons) == 5
    for part, reason in zip(("has 10.0", "found 3.5.1", "not float32", "80 is not", "'float16'"), reasons):
        assert part in reason
    assert hopper.unsupported(None, torch.bfloat16, 128) == (
        "needs a GPU of compute capability 9.0 (H100, H200), there is none",
        "needs Triton, which is not installed",
    )


@pytest.mark.parametrize("quant", [None, AttnQuantSpec(dtype_qk="fp8_e4m3"), AttnQuantSpec(dtype_qk="int8")])
@pytest.mark.parametrize("skip", [True, False])
def test_tiles(quant, skip):
    rows, keys = hopper.tile_shape(128, quant, skip)
    assert rows == 64 and hopper.order_rows(128, quant, skip) % rows == 0
    assert tile_count((64, 128), batch=2, heads=3, query_length=65, key_length=[1, 129]) == 3 * 2 * (1 + 2)
    assert tile_count((64, 128), batch=2, heads=3, query_length=64, key_length=300) == 3 * 2 * 3
    with pytest.raises(ValueError, match="1 key lengths for a batch of 2"):
        tile_count((rows, keys), batch=2, heads=1, query_length=1, key_length=[1])


def test_refuses_with_every_reason():
    query = torch.zeros(1, 4, 3, 32)
    with pytest.raises(ValueError) as caught:
        hopper.hopper_attention(query, query[:, :, :2], query, threshold=float("nan"), kv_order="backwards")
    for part in ("CUDA device", "torch.float32", "differ in shape", "head size 32", "3 query heads", "backwards", "nan"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"key must be \[batch"):
        hopper.hopper_attention(query, query[0], query)
