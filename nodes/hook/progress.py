"""What the Patch node says while its model samples, and after: at most four texts a second, no waiting."""

from __future__ import annotations

import time

from ...trtllm_core.stats import RunStats
from ...trtllm_core.tile_peek import TilePeek
from ..status import show
from .clock import Clock

SECONDS_BETWEEN_TEXTS = 0.25


class Progress:
    """The text on one node. heading: what stands above the changing line."""

    def __init__(self, node_id: str | None, heading: str = ""):
        self.heading = heading
        self._node_id = node_id
        self._next = 0.0

    def start(self, stats: RunStats) -> None:
        """Begin a run that counts in `stats`."""
        self._stats = stats
        self._peek = TilePeek(stats)
        self._step: int | None = None
        self._skipped = ""

    def tick(self, clock: Clock) -> None:
        """A model call begins at `clock`."""
        answer = self._peek.answer()
        if answer is not None:
            self._skipped = f"step {answer[0] + 1}: {answer[1]:.1%} of tiles skipped"
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS_BETWEEN_TEXTS
            if self._step is not None:
                self._peek.ask(self._step)
            self._show([f"step {clock.step + 1} of {self._stats.steps}", self._skipped])
        self._step = clock.step

    def finish(self) -> None:
        """Show the totals of the run, whose counters have been read."""
        stats, self._peek = self._stats, None
        done = 0 if self._step is None else self._step + 1
        words = f"{done} of {stats.steps} steps" if done < stats.steps else f"{done} steps"
        lines = [f"last run: {words}, {stats.calls:,} calls, {stats.sparse_calls:,} with Skip-Softmax"]
        if stats.sparsity is not None:
            lines.append(f"skipped: {stats.sparsity:.1%} of the tiles of those calls")
        for reason, calls in stats.declined.items():
            lines.append(f"left to ComfyUI: {calls:,} calls, {reason}")
        self._show(lines)

    def replaced(self) -> None:
        """A later patch on the same model took this one's place."""
        show(self._node_id, "not in effect: a later Attention Patch or Calibrate on this model replaces it")

    def _show(self, lines: list[str]) -> None:
        show(self._node_id, "\n".join(line for line in (self.heading, *lines) if line))
