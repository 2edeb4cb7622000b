"""Counting in PyTorch and adding up counts: samples, runs, layers, and the points they give."""

import logging
import math

import pytest
import torch

from trtllm_core import calibration_counts, reference
from trtllm_core.calibration import Calibration
from trtllm_core.calibration_counts import (
    TRIAL_THRESHOLDS,
    CalibrationCounts,
    count_skipped_tiles,
    total_tiles,
)
from trtllm_core.skip_rule import SkipRule


def inputs(length=200, heads=2, dim=32, seed=0, dtype=torch.float32, batch=1, kv_heads=None):
    """Scores that fall off with distance, so that most thresholds are reached."""
    g = torch.Generator().manual_seed(seed)
    frequency = torch.randn(dim // 2, generator=g) * 0.15
    phase = torch.arange(length)[:, None] * frequency
    features = torch.cat([phase.cos(), phase.sin()], -1)[None, :, None] * 3

    def noisy(count):
        return (features + 0.3 * torch.randn(batch, length, count, dim, generator=g)).to(dtype)

    return noisy(heads), noisy(kv_heads or heads)


def test_the_trials_are_22_rising_thresholds():
    assert len(TRIAL_THRESHOLDS) == 22 and list(TRIAL_THRESHOLDS) == sorted(TRIAL_THRESHOLDS)
    assert (TRIAL_THRESHOLDS[0], TRIAL_THRESHOLDS[-1]) == (1e-12, 0.99)


def test_dense_counts_bound_what_the_skipping_kernel_skips():
    """Skipping never raises the maximum, so it skips at most what a dense pass counts."""
    query, key = inputs(dtype=torch.float64)
    counts = count_skipped_tiles(query, key, tile=(32, 16))
    for threshold, counted in zip(TRIAL_THRESHOLDS, counts.tolist(), strict=True):
        _, stats = reference.attention(
            query, key, key, threshold=threshold, tile=(32, 16), kv_order="sequential"
        )
        assert stats.skipped <= counted
        assert counted - stats.skipped <= 0.15 * stats.total


def test_chunks_change_nothing(monkeypatch):
    query, key = inputs(dtype=torch.float64, batch=2, heads=4, kv_heads=2)
    for kv_order in ("sequential", "own_first"):
        whole = count_skipped_tiles(query, key, tile=(16, 32), kv_order=kv_order)
        monkeypatch.setattr(calibration_counts, "_SCORES_AT_ONCE", 2000)
        assert count_skipped_tiles(query, key, tile=(16, 32), kv_order=kv_order).equal(whole)
        monkeypatch.undo()


def test_batches_add_up():
    query, key = inputs(batch=2)
    parts = [count_skipped_tiles(query[i : i + 1], key[i : i + 1], tile=(16, 16)) for i in range(2)]
    assert count_skipped_tiles(query, key, tile=(16, 16)).equal(parts[0] + parts[1])


def test_scale_and_default_scale():
    query, key = inputs()
    default = count_skipped_tiles(query, key, tile=(16, 16))
    assert count_skipped_tiles(query, key, scale=32**-0.5, tile=(16, 16)).equal(default)
    assert not count_skipped_tiles(query, key, scale=1.0, tile=(16, 16)).equal(default)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"thresholds": (0.0,)}, "thresholds="),
        ({"thresholds": ()}, "thresholds="),
        ({"kv_order": "random"}, "kv_order='random'"),
    ],
)
def test_bad_values(change, message):
    with pytest.raises(ValueError, match=message):
        count_skipped_tiles(*inputs(), **change)


@pytest.mark.parametrize(
    "key_shape", [(2, 200, 2, 32), (1, 200, 2, 16), (1, 200, 3, 32), (1, 0, 2, 32), (200, 2, 32)]
)
def test_bad_shapes(key_shape):
    with pytest.raises(ValueError, match="query .*key "):
        count_skipped_tiles(inputs()[0], torch.zeros(key_shape))


def test_a_failing_kernel_is_said_once_and_replaced(monkeypatch, caplog):
    class Broken:
        calls = 0

        @staticmethod
        def supports(*args):
            return True

        @staticmethod
        def count_skipped_tiles(*args):
            Broken.calls += 1
            raise RuntimeError("no kernel image")

    class OnGpu(torch.Tensor):
        is_cuda = True

    query, key = inputs()
    expected = count_skipped_tiles(query, key, tile=(16, 16))
    monkeypatch.setattr(calibration_counts, "_failures", [])
    monkeypatch.setattr(calibration_counts, "_kernel_module", lambda: Broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            got = count_skipped_tiles(query.as_subclass(OnGpu), key, tile=(16, 16))
            assert got.equal(expected)
    assert Broken.calls == 1 and caplog.text.count("no kernel image") == 1
    assert all(type(reason) is str for reason in calibration_counts._failures)  # a traceback would hold query and key


def counts_with(runs, layers=("blocks.0.self_attn", "blocks.1.self_attn"), length=100, calls=3):
    """Made-up counts: layer i, call j, threshold t skips a known share of 1,000 tiles."""
    counts = CalibrationCounts()
    for run in range(runs):
        counts.start_run()
        for call in range(calls):
            for i, layer in enumerate(layers):
                shares = [t + 10 * i + 20 * call + 100 * run for t in range(22)]
                counts.add(layer, length, torch.tensor(shares), 1000)
    return counts


def test_a_sample_is_the_mean_over_the_layers_of_one_call():
    points = counts_with(runs=2).points()
    assert len(points) == 2 * 3 * 22
    sparsity, factor = points[22 + 4]  # run 0, call 1, threshold 4
    assert sparsity == pytest.approx((4 + 5 + 20) / 1000)
    assert factor == TRIAL_THRESHOLDS[4] * 100


def test_a_cancelled_run_keeps_its_whole_samples():
    counts = counts_with(runs=1)
    counts.add("blocks.0.self_attn", 100, torch.zeros(22, dtype=torch.int64), 1000)  # cut here
    assert counts.calls == 7 and len(counts.points()) == 3 * 22
    counts.start_run()
    assert counts.runs == 2 and len(counts.points()) == 3 * 22


def test_lengths_are_kept_apart():
    counts = counts_with(runs=1)
    counts.start_run()
    counts.add("blocks.0.self_attn", 50, torch.full((22,), 500), 1000)
    factors = {round(p.factor / t) for p, t in zip(counts.points(), TRIAL_THRESHOLDS * 4, strict=True)}
    assert factors == {100, 50} and counts.key_lengths == (50, 100)


def test_merging_adds_runs():
    one, two = counts_with(runs=1), counts_with(runs=2)
    expected = sorted(one.points() + two.points())
    one.merge(two)
    assert sorted(one.points()) == expected
    one.start_run()
    one.add("blocks.0.self_attn", 100, torch.zeros(22, dtype=torch.int64), 1000)
    assert len(one.points()) == len(expected) + 22
    with pytest.raises(ValueError, match="own tile first"):
        one.merge(CalibrationCounts(SkipRule(kv_order="own_first")))


def test_counting_real_calls():
    query, key = inputs()
    counts = CalibrationCounts(SkipRule((16, 32), "own_first"))
    counts.start_run()
    counts.count("a", query, key)
    counts.count("b", query, key, scale=1.0)
    rule = {"tile": (16, 32), "kv_order": "own_first"}
    skipped = count_skipped_tiles(query, key, **rule) + count_skipped_tiles(query, key, scale=1.0, **rule)
    total = total_tiles(query, key, (16, 32))
    assert total == 2 * 13 * 7
    assert [p.sparsity for p in counts.points()] == pytest.approx([s / total / 2 for s in skipped.tolist()])
    assert counts.layers == ("a", "b") and counts.calls == 2


def test_from_counts_to_a_curve():
    counts = CalibrationCounts(SkipRule((16, 16)))
    for seed in range(3):
        counts.start_run()
        counts.count("blocks.0.self_attn", *inputs(length=400, seed=seed))
    calibration = Calibration.fit(counts.points())
    threshold = calibration.threshold(0.5, 400)
    query, key = inputs(length=400, seed=9)
    skipped = count_skipped_tiles(query, key, thresholds=(threshold,), tile=(16, 16))
    assert abs(int(skipped) / total_tiles(query, key, (16, 16)) - 0.5) < 0.1


def test_nothing_counted():
    counts = CalibrationCounts()
    assert counts.points() == [] and counts.layers == ()
    with pytest.raises(ValueError, match="0 points"):
        Calibration.fit(counts.points())
