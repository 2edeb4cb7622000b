"""On a GPU: which library really runs, and that it computes attention."""

import pytest
import torch

from benchmarks.backends_bench import DIRECT, EXACT_FACTOR, LOSSY_ERROR, kernels, through_pack
from benchmarks.workload import SampledRows, video_heads
from trtllm_core.api import plan
from trtllm_core.backends import AttentionCall, Unavailable, requirements
from trtllm_core.device import Device
from trtllm_core.specs import AttentionSpec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("site", ["self", "cross"])
@pytest.mark.parametrize("name", DIRECT)
@torch.inference_mode()
def test_the_library_runs_its_own_kernels_and_is_right(name, site):
    query, key, value = video_heads((5, 16, 27), heads=4)
    if site == "cross":
        key, value = key[:, :512].contiguous(), value[:, :512].contiguous()
    try:
        _, pack = through_pack(name, Device.current(), head_dim=128)
        direct = DIRECT[name]()
    except (Unavailable, ImportError) as error:
        pytest.skip(str(error))
    exact = SampledRows(query, key, value)
    out = pack(query, key, value)
    limit = LOSSY_ERROR
    if not requirements(name).lossy:
        limit = EXACT_FACTOR * exact.error(DIRECT["TORCH_SDPA"]()(query, key, value))
    assert exact.error(out) <= limit
    direct(query, key, value)
    assert set(kernels(lambda: pack(query, key, value))) == set(
        kernels(lambda: direct(query, key, value))
    )


@pytest.mark.parametrize("name", ["TORCH_SDPA", "CUDNN_ATTN", "FLASH_ATTN"])
@torch.inference_mode()
def test_key_lengths(name):
    query, key, value = video_heads((2, 16, 20), heads=4)
    query, key, value = (x.expand(2, -1, -1, -1) for x in (query, key, value))
    lengths = torch.tensor([640, 333], dtype=torch.int32, device="cuda")
    try:
        decided = plan(AttentionSpec(name), Device.current(), head_dim=128, mask="padding")
    except Unavailable as error:
        pytest.skip(str(error))
    call = AttentionCall(query, key, value, scale=128**-0.5, key_lengths=lengths)
    out = decided.run(call)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        exact = SampledRows(query[one], key[one, :length], value[one, :length])
        assert exact.error(out[one]) < 5e-3
