"""Tile counts of a run that still goes on, read without waiting for the GPU."""

from __future__ import annotations

import torch

from .stats import RunStats


class TilePeek:
    """What share of a step's tiles was skipped: asked for in one model call, known in a later one.

    The sum travels to pinned memory behind the kernels that count it, and an event tells when it
    has arrived; nothing here blocks.
    """

    def __init__(self, stats: RunStats):
        self._stats = stats
        self._host: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._asked: tuple[int, int] | None = None  # step, tiles

    def ask(self, step: int) -> None:
        """Ask for `step`, all of whose calls are under way; ignored while an answer is outstanding."""
        if self._asked is not None:
            return
        counters, tiles = self._stats.counters_of(step)
        if not tiles or len({counter.device for counter in counters}) > 1:
            return  # of several GPUs the totals come when the run ends
        total = torch.cat(counters).sum()
        if total.is_cuda:
            if self._host is None:
                self._host = torch.empty((), dtype=torch.int64, pin_memory=True)
                self._arrived = torch.cuda.Event()
            self._host.copy_(total, non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(total.device))
        elif total.device.type == "cpu":
            self._host = total
        else:
            return  # no event to wait for on this kind of device: the totals come when the run ends
        self._asked = step, tiles

    def answer(self) -> tuple[int, float] | None:
        """(step, skipped share), once, when what was asked for has arrived; else None."""
        if self._asked is None or (self._arrived is not None and not self._arrived.query()):
            return None
        (step, tiles), self._asked = self._asked, None
        return step, int(self._host) / tiles
