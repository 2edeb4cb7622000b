"""What happened in a sampling run, counted without waiting for the GPU.

The attention path adds to plain Python counters; tile counts stay on the device, one int64 each,
until the run is over and are read then in one copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from .call_times import CallTimes

COUNTERS_PER_CHUNK = 4096


@dataclass(slots=True)
class SiteStats:
    """One layer in one role at one step. `skipped_tiles` and `seconds` are None where not measured.

    work: floating point operations of the two matrix products of all calls, done or skipped;
    sparse_work: of the calls that may skip tiles.
    """

    layer: str
    role: str
    step: int
    timestep: float | None
    calls: int = 0
    sparse_calls: int = 0
    total_tiles: int = 0
    skipped_tiles: int | None = None
    work: int = 0
    sparse_work: int = 0
    seconds: float | None = None
    backends: Counter = field(default_factory=Counter)

    @property
    def sparsity(self) -> float | None:
        """Skipped share of the tiles of the sparse calls, or None where nothing was counted."""
        if self.skipped_tiles is None or not self.total_tiles:
            return None
        return self.skipped_tiles / self.total_tiles


class RunStats:
    """The counters of one run.

    count_tiles: whether skipped tiles are counted; costs one atomic addition per thread block.
    completed: whether it ended by itself. prompt: whose run it is, where somebody numbers prompts.
    steps: how many the sampler's schedule has. time_calls: whether calls are timed, at two events
    per call; None: as count_tiles.
    """

    def __init__(self, count_tiles: bool = False, steps: int = 0, time_calls: bool | None = None):
        self.count_tiles = count_tiles
        self.steps = steps
        self.times = CallTimes() if (count_tiles if time_calls is None else time_calls) else None
        self.sites: dict[tuple[str, str, int], SiteStats] = {}
        self.declined: Counter = Counter()
        self.finished = False
        self.completed = False
        self.prompt: str | None = None
        # one counter per record and device, handed out from chunks: device -> (chunk, how many are used)
        self._counters: dict[tuple[str, str, int, torch.device], torch.Tensor] = {}
        self._chunks: dict[torch.device, tuple[torch.Tensor, int]] = {}

    def __deepcopy__(self, memo):
        return self

    def site(self, layer: str, role: str, step: int, timestep: float | None) -> SiteStats:
        """The record of `layer` in `role` at `step`, made on first use."""
        key = (layer, role, step)
        record = self.sites.get(key)
        if record is None:
            record = self.sites.setdefault(key, SiteStats(layer, role, step, timestep))
        return record

    def counter(self, site: SiteStats, device: torch.device) -> torch.Tensor:
        """An int64 tensor of one element that a kernel adds `site`'s skipped tiles to."""
        key = (site.layer, site.role, site.step, device)
        counter = self._counters.get(key)
        if counter is None:
            chunk, used = self._chunks.get(device, (None, COUNTERS_PER_CHUNK))
            if used == COUNTERS_PER_CHUNK:
                chunk, used = torch.zeros(COUNTERS_PER_CHUNK, dtype=torch.int64, device=device), 0
            counter = self._counters[key] = chunk[used : used + 1]
            self._chunks[device] = chunk, used + 1
        return counter

    def counters_of(self, step: int) -> tuple[list[torch.Tensor], int]:
        """The device counters of one step, and how many tiles they count skips among so far."""
        # a copy: where a model runs on several GPUs, another thread may add one meanwhile
        found = {key: counter for key, counter in self._counters.copy().items() if key[2] == step}
        return list(found.values()), sum(self.sites[key].total_tiles for key in {key[:3] for key in found})

    def decline(self, reason: str) -> None:
        """Count a call that went to ComfyUI's own attention instead, by reason."""
        self.declined[reason] += 1

    def finish(self) -> None:
        """Read the device counters, the one wait of a run, and let the tensors go."""
        if self._counters:
            device = next(iter(self._chunks))
            counts = torch.cat([counter.to(device) for counter in self._counters.values()])
            for key, count in zip(self._counters, counts.tolist(), strict=True):
                site = self.sites[key[:3]]
                site.skipped_tiles = (site.skipped_tiles or 0) + count
        self._counters.clear()
        self._chunks.clear()
        if self.times is not None:
            for key, seconds in self.times.read().items():
                self.sites[key].seconds = seconds
        self.finished = True

    @property
    def calls(self) -> int:
        return sum(s.calls for s in self.sites.values())

    @property
    def sparse_calls(self) -> int:
        return sum(s.sparse_calls for s in self.sites.values())

    @property
    def sparsity(self) -> float | None:
        """Skipped share of all counted tiles, or None."""
        counted = [s for s in self.sites.values() if s.skipped_tiles is not None]
        total = sum(s.total_tiles for s in counted)
        return sum(s.skipped_tiles for s in counted) / total if total else None
