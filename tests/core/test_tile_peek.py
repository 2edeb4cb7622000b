"""Tile counts of a run that still goes on: right, and never waited for."""

import pytest
import torch
from trtllm_core.stats import RunStats
from trtllm_core.tile_peek import TilePeek


def counted(device):
    """Stats of two layers at two steps, and an addition to step 0's first counter."""
    stats = RunStats(True, 2, time_calls=False)
    for step in (0, 1):
        for layer in ("blocks.0.self_attn", "blocks.1.self_attn"):
            site = stats.site(layer, "self", step, 0.5)
            site.total_tiles += 100
            stats.counter(site, torch.device(device)).add_(10 + 20 * step)
    return stats


def test_a_step_is_answered_once():
    peek = TilePeek(counted("cpu"))
    assert peek.answer() is None
    peek.ask(1)
    peek.ask(0)  # one at a time
    assert peek.answer() == (1, 0.3)
    assert peek.answer() is None
    peek.ask(0)
    assert peek.answer() == (0, 0.1)


def test_a_step_without_counts_has_no_answer():
    peek = TilePeek(counted("cpu"))
    peek.ask(7)
    assert peek.answer() is None
    peek = TilePeek(RunStats(False, 2))
    peek.ask(0)
    assert peek.answer() is None


def test_several_gpus_are_not_asked():
    stats = counted("cpu")
    stats.counter(stats.sites["blocks.0.self_attn", "self", 0], torch.device("meta"))  # as unlike as a second GPU
    peek = TilePeek(stats)
    peek.ask(0)
    assert peek.answer() is None
    peek.ask(1)
    assert peek.answer() == (1, 0.3)


@pytest.mark.gpu
def test_the_gpu_is_not_waited_for():
    peek = TilePeek(counted("cuda"))
    peek.ask(0)  # allocates pinned memory, which may wait once
    torch.cuda.synchronize()
    assert peek.answer() == (0, 0.1)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda._sleep(2_000_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        peek.ask(1)
        assert peek.answer() is None  # the device still sleeps
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    assert peek.answer() == (1, 0.3)
