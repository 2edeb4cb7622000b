"""The calibration kernel against a loop in float64, in Triton's interpreter or on the GPU.

Scores are exact in every precision (small integers, a power of two as scale), so that the kernel, the
PyTorch reference and the oracle must agree to the last tile.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from trtllm_core import calibration_counts
from trtllm_core.calibration_counts import TRIAL_THRESHOLDS, count_skipped_tiles, total_tiles
from trtllm_core.kernels import calibrate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16's bit patterns
DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
SCALE = 0.125


def oracle(query, key, scale, thresholds, tile, kv_order):
    """Tile by tile, as the definition reads."""
    rows, keys = tile
    batch, q_length, heads, _ = query.shape
    k_length, groups = key.shape[1], heads // key.shape[2]
    q, k = query.double().cpu(), key.double().cpu()
    k_tiles = math.ceil(k_length / keys)
    counts = [0] * len(thresholds)
    for b in range(batch):
        for h in range(heads):
            for q_tile in range(math.ceil(q_length / rows)):
                block = q[b, q_tile * rows : (q_tile + 1) * rows, h]
                running = torch.full((len(block),), -math.inf, dtype=torch.float64)
                start = q_tile * rows // keys if kv_order == "own_first" and q_length == k_length else 0
                for step in range(k_tiles):
                    t = (start + step) % k_tiles
                    scores = block @ k[b, t * keys : (t + 1) * keys, h // groups].T * scale
                    peak = scores.max(1).values
                    rise = (peak - running).max().item()
                    for i, threshold in enumerate(thresholds):
                        counts[i] += step > 0 and rise < math.log(threshold)
                    running = torch.maximum(running, peak)
    return counts


def inputs(batch, q_length, k_length, heads, kv_heads, dim, dtype=torch.float16, seed=0):
    """Integers whose products spread over the trial thresholds' range."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-3, 4, (batch, q_length, heads, dim), generator=g).to(dtype)
    k = torch.randint(-3, 4, (batch, k_length, kv_heads, dim), generator=g).to(dtype)
    k *= torch.randint(0, 4, (batch, k_length, 1, 1), generator=g).to(dtype)  # loud and quiet keys
    return q.to(DEVICE), k.to(DEVICE)


CASES = [
    ("one tile", dict(batch=1, q_length=16, k_length=16, heads=1, kv_heads=1, dim=64), (16, 16)),
    ("one token", dict(batch=1, q_length=1, k_length=1, heads=1, kv_heads=1, dim=64), (16, 16)),
    ("self odd", dict(batch=1, q_length=67, k_length=67, heads=2, kv_heads=2, dim=64), (16, 16)),
    ("two query tiles to a KV tile", dict(batch=1, q_length=300, k_length=300, heads=1, kv_heads=1, dim=32), (64, 128)),
    ("cross", dict(batch=1, q_length=33, k_length=127, heads=1, kv_heads=1, dim=64), (32, 16)),
    ("wide tile", dict(batch=1, q_length=97, k_length=97, heads=1, kv_heads=1, dim=64), (16, 64)),
    ("gqa batch", dict(batch=2, q_length=49, k_length=65, heads=4, kv_heads=2, dim=32), (16, 32)),
    ("head 80", dict(batch=1, q_length=40, k_length=40, heads=1, kv_heads=1, dim=80), (16, 16)),
    ("head 128", dict(batch=1, q_length=150, k_length=300, heads=1, kv_heads=1, dim=128), (128, 64)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_order", ["sequential", "own_first"])
@pytest.mark.parametrize("shape, tile", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_kernel_and_reference_equal_the_oracle(shape, tile, kv_order, dtype):
    query, key = inputs(**shape, dtype=dtype)
    expected = oracle(query, key, SCALE, TRIAL_THRESHOLDS, tile, kv_order)
    args = (query, key, SCALE, TRIAL_THRESHOLDS, tile, kv_order)
    assert calibration_counts.reference_count(*args).tolist() == expected
    assert calibrate.count_skipped_tiles(*args).tolist() == expected


def test_the_inputs_reach_most_thresholds():
    query, key = inputs(1, 67, 67, 2, 2, 64)
    counts = oracle(query, key, SCALE, TRIAL_THRESHOLDS, (16, 16), "sequential")
    assert len(set(counts)) >= 5 and 0 < counts[-1] < total_tiles(query, key, (16, 16))
    assert counts == sorted(counts)


def test_any_strides_and_what_lies_around_the_tensor():
    """Heads first, a slice of a wider projection, NaN all around: same counts, nothing read outside."""
    query, key = inputs(2, 37, 37, 2, 2, 64)
    expected = oracle(query, key, SCALE, TRIAL_THRESHOLDS, (16, 16), "sequential")

    def poisoned(x):
        batch, length, heads, dim = x.shape
        wide = torch.full((batch, heads, length + 5, 3 * dim), math.nan, dtype=x.dtype, device=x.device)
        view = wide[:, :, 2 : length + 2, dim : 2 * dim].transpose(1, 2)
        view.copy_(x)
        return view

    args = (poisoned(query), poisoned(key), SCALE, TRIAL_THRESHOLDS, (16, 16), "sequential")
    assert calibrate.count_skipped_tiles(*args).tolist() == expected


def test_random_inputs_differ_only_where_rounding_decides():
    """Normal inputs: a tile may go either way only when its rise is within 1e-3 of ln λ."""
    g = torch.Generator().manual_seed(3)
    query, key = (
        (3 * torch.randn(1, 130, 2, 64, generator=g)).to(DTYPES[-1]).to(DEVICE) for _ in range(2)
    )
    slack = math.exp(1e-3)
    low, high = (tuple(t * f for t in TRIAL_THRESHOLDS) for f in (1 / slack, slack))
    low, high = (oracle(query, key, SCALE, t, (16, 32), "own_first") for t in (low, high))
    counts = calibrate.count_skipped_tiles(
        query, key, SCALE, TRIAL_THRESHOLDS, (16, 32), "own_first"
    ).tolist()
    assert all(a <= c <= b for a, c, b in zip(low, counts, high, strict=True))
    assert sum(counts) > 0


def test_compiles_for_every_gpu_from_ampere_on():
    """Without a GPU, in a process without the interpreter; within every GPU's shared memory."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_calibrate.py")
    command = [sys.executable, script, Path(__file__).parents[2]]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shared = {line.split()[0]: int(line.split()[1]) for line in result.stdout.splitlines()}
    assert shared.keys() == {"80", "86", "89", "90", "100", "120"}
    assert max(shared.values()) <= 99 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("kv_order", ["sequential", "own_first"])
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (64, 128)])
def test_on_the_gpu_at_video_size(tile, kv_order, monkeypatch):
    """Fused kernel, chosen by the public function, against the PyTorch reference on the GPU."""
    query, key = inputs(1, 8193, 8193, 4, 4, 128, dtype=torch.bfloat16)
    args = (query, key, SCALE, TRIAL_THRESHOLDS, tile, kv_order)
    expected = calibration_counts.reference_count(*args)
    monkeypatch.setattr(calibration_counts, "reference_count", None)  # the kernel must answer
    counts = count_skipped_tiles(query, key, scale=SCALE, tile=tile, kv_order=kv_order)
    assert counts.tolist() == expected.tolist()


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """The last head of a tensor of more than 2**31 elements."""
    wide = torch.zeros(1, 3000, 5700, 128, dtype=torch.bfloat16, device="cuda")
    query, key = inputs(1, 3000, 3000, 1, 1, 128, dtype=torch.bfloat16)
    wide[:, :, -1:] = query
    args = (key, SCALE, TRIAL_THRESHOLDS, (128, 128), "sequential")
    expected = calibrate.count_skipped_tiles(query, *args)
    assert calibrate.count_skipped_tiles(wide[:, :, -1:], *args).tolist() == expected.tolist()
