"""How long attention calls take, measured without waiting for the GPU.

On a GPU two events stand around each call and are read when the run is over; on a CPU a call has
ended when it returns, and the clock is read.
"""

from __future__ import annotations

import time

import torch


class CallTimes:
    """The times of one run's calls, by whatever key they are reported under."""

    def __init__(self):
        self._seconds: dict[tuple, float] = {}
        self._events: list[tuple] = []

    def start(self, device: torch.device):
        """A mark to give `stop`, or None where time cannot be told without waiting."""
        if device.type == "cpu":
            return time.perf_counter()
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        return _event(device)

    def stop(self, key: tuple, mark, device: torch.device) -> None:
        """Add the time since `mark` to `key`."""
        if device.type == "cpu":
            self._add(key, time.perf_counter() - mark)
        else:
            self._events.append((key, mark, _event(device)))

    def read(self) -> dict[tuple, float]:
        """Seconds by key. Waits for the events, which the end of a run has passed already."""
        for key, start, end in self._events:
            end.synchronize()
            self._add(key, start.elapsed_time(end) / 1000)
        self._events.clear()
        return self._seconds

    def _add(self, key: tuple, seconds: float) -> None:
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
