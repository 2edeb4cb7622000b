"""The counters of a run."""

import torch

from trtllm_core.stats import COUNTERS_PER_CHUNK, RunStats

CPU = torch.device("cpu")


def test_counters_are_read_once_the_run_is_over():
    stats = RunStats(count_tiles=True)
    count = COUNTERS_PER_CHUNK + 3  # more than one chunk
    for step in range(count):
        site = stats.site("blocks.0", "self", step, 0.5)
        site.total_tiles += 10
        stats.counter(site, CPU).add_(step % 7)
        stats.counter(site, CPU).add_(1)
    assert all(site.skipped_tiles is None for site in stats.sites.values())
    stats.finish()
    assert [s.skipped_tiles for s in stats.sites.values()] == [step % 7 + 1 for step in range(count)]
    assert stats.sparsity == sum(step % 7 + 1 for step in range(count)) / (10 * count)


def test_two_roles_of_one_layer_are_apart():
    stats = RunStats(count_tiles=True)
    for role, skipped in (("wan.image_cross", 2), ("cross", 5)):
        site = stats.site("blocks.0.cross_attn", role, 0, 1.0)
        site.total_tiles = 8
        stats.counter(site, CPU).add_(skipped)
    stats.finish()
    assert {s.role: s.sparsity for s in stats.sites.values()} == {"wan.image_cross": 0.25, "cross": 0.625}


def test_nothing_counted_is_unknown_and_not_zero():
    stats = RunStats()
    stats.site("blocks.0", "self", 0, None).calls += 1
    stats.finish()
    assert stats.sparsity is None and stats.calls == 1 and stats.finished
    assert next(iter(stats.sites.values())).sparsity is None


def test_one_record_counted_on_two_devices_in_turn():
    """A model on several GPUs: cond on one, uncond on the other."""
    stats = RunStats(count_tiles=True)
    for skipped in (1, 2, 3):
        for device in (CPU, torch.device("cpu:0")):  # unequal as two GPUs are
            site = stats.site("blocks.0", "self", 0, 0.5)
            site.total_tiles += 10
            stats.counter(site, device).add_(skipped)
    counters, tiles = stats.counters_of(0)
    assert len(counters) == 2 and tiles == 60
    stats.finish()
    assert stats.sparsity == 12 / 60
