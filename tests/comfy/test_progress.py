"""What the Patch node says during a run: rarely, without waiting, and truly."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def progress(submodule, monkeypatch):
    """A Progress with a clock of its own; `texts` collects (time, text)."""
    module = submodule("nodes.hook.progress")
    made = module.Progress("7", "self: REFERENCE")
    made.now, made.texts = 0.0, []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(module, "show", lambda node, text: made.texts.append((made.now, text)))
    return made


def run_stats(submodule, steps=1, count_tiles=True):
    return submodule("trtllm_core.stats").RunStats(count_tiles, steps, time_calls=False)


def count(stats, step, skipped, tiles):
    site = stats.site("blocks.0.self_attn", "self", step, 0.5)
    site.calls += 1
    site.sparse_calls += 1
    site.total_tiles += tiles
    stats.counter(site, torch.device("cpu")).add_(skipped)


def test_at_most_four_texts_a_second(submodule, progress):
    stats = run_stats(submodule, 1000)
    progress.start(stats)
    for step in range(1000):
        progress.tick(SimpleNamespace(step=step))
        progress.now += 0.007
    times = [time for time, _ in progress.texts]
    assert 20 <= len(times) <= 29
    assert min(b - a for a, b in zip(times, times[1:])) >= 0.25


def test_the_share_of_a_finished_step_and_the_totals(submodule, progress):
    stats = run_stats(submodule, 3)
    progress.start(stats)
    progress.tick(SimpleNamespace(step=0))
    assert progress.texts[-1][1] == "self: REFERENCE\nstep 1 of 3"
    count(stats, 0, 30, 100)
    for step in (1, 2):
        progress.now += 1
        progress.tick(SimpleNamespace(step=step))
        count(stats, step, 50, 100)
    assert progress.texts[-1][1] == "self: REFERENCE\nstep 3 of 3\nstep 1: 30.0% of tiles skipped"
    stats.decline("keyword new")
    stats.finish()
    progress.finish()
    assert progress.texts[-1][1].splitlines()[1:] == [
        "last run: 3 steps, 3 calls, 3 with Skip-Softmax",
        "skipped: 43.3% of the tiles of those calls",
        "left to ComfyUI: 1 calls, keyword new",
    ]


def test_a_cancelled_run_says_how_far_it_came(submodule, progress):
    stats = run_stats(submodule, 20)
    progress.start(stats)
    for step in range(5):
        progress.tick(SimpleNamespace(step=step))
    stats.finish()
    progress.finish()
    assert "last run: 5 of 20 steps, 0 calls" in progress.texts[-1][1]
