"""What the portable kernels accept and which tiles they use, for GPUs that are not here."""

import subprocess
import sys

import pytest
import torch

from trtllm_core.kernels import HEAD_DIMS, kernel_config, tile_count, tile_shape, unsupported
from trtllm_core.specs import AttnQuantSpec

INT8, FP8 = AttnQuantSpec(dtype_qk="int8"), AttnQuantSpec(dtype_qk="fp8_e4m3")
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "quant", "words"),
    [
        ((8, 0), torch.bfloat16, 128, None, []),
        ((12, 0), "float16", 64, FP8, []),
        ((8, 6), torch.float16, 80, INT8, []),
        ((8, 6), torch.float16, 128, FP8, ["8.9", "int8"]),
        ((7, 5), torch.float16, 128, None, ["compute capability 8.0", "7.5"]),
        (None, torch.float16, 128, None, ["NVIDIA GPU"]),
        ((9, 0), torch.float32, 160, None, ["float32", "160"]),
        ((9, 0), torch.bfloat16, 128, AttnQuantSpec(dtype_qk="bfloat16"), ["dtype_qk='bfloat16'"]),
    ],
)
def test_every_reason_is_named(capability, dtype, head_dim, quant, words):
    reasons = unsupported(capability, dtype, head_dim, quant)
    assert bool(reasons) == bool(words)
    for word in words:
        assert any(word in reason for reason in reasons)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("quant", [None, INT8, FP8])
def test_every_gpu_has_a_tile(capability, head_dim, quant):
    for skip in (False, True):
        config = kernel_config(capability, head_dim, quant, skip)
        assert config.block_m in (64, 128) and config.block_n in (32, 64, 128)
        assert config.tma == (capability == (9, 0))
        assert tile_shape(capability, head_dim, quant, skip) == (config.block_m, config.block_n)


def test_tiles_are_counted_over_batch_and_heads():
    assert tile_count((128, 64), batch=1, heads=1, query_length=1, key_length=1) == 1
    assert tile_count((128, 64), batch=2, heads=3, query_length=129, key_length=64) == 2 * 3 * 2
    assert tile_count((128, 64), batch=2, heads=1, query_length=128, key_length=[65, 10]) == 3
    with pytest.raises(ValueError, match="1 key lengths"):
        tile_count((128, 64), batch=2, heads=1, query_length=128, key_length=[65])


def test_importing_needs_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import trtllm_core.kernels as kernels, trtllm_core.token_order\n"
        "assert kernels.tile_shape((8, 6), 128)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
