"""A run's statistics added up by role, for the report's text and picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from ..trtllm_core.gate import TimestepGate
from ..trtllm_core.stats import RunStats, SiteStats


@dataclass
class RoleTotals:
    """One role over a run. work: floating point operations; saved_work: those of skipped tiles.

    total_tiles, skipped_tiles: of counted calls only. seconds: None where calls were not timed.
    """

    role: str
    sites: list[SiteStats] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    backends: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.layers = list(dict.fromkeys(site.layer for site in self.sites))
        for site in self.sites:
            self.backends.update(site.backends)

    @property
    def calls(self) -> int:
        return sum(site.calls for site in self.sites)

    @property
    def sparse_calls(self) -> int:
        return sum(site.sparse_calls for site in self.sites)

    @property
    def total_tiles(self) -> int:
        return sum(site.total_tiles for site in self.sites if site.skipped_tiles is not None)

    @property
    def skipped_tiles(self) -> int:
        return sum(site.skipped_tiles or 0 for site in self.sites)

    @property
    def sparsity(self) -> float | None:
        """Skipped share of the counted tiles, or None."""
        return self.skipped_tiles / self.total_tiles if self.total_tiles else None

    @property
    def work(self) -> int:
        return sum(site.work for site in self.sites)

    @property
    def sparse_work(self) -> int:
        return sum(site.sparse_work for site in self.sites)

    @property
    def saved_work(self) -> float:
        """A skipped tile leaves out one of its two matrix products, P V; Q K^T is always computed."""
        return sum(site.sparse_work * (site.sparsity or 0) / 2 for site in self.sites)

    @property
    def seconds(self) -> float | None:
        return _seconds(self.sites)

    @property
    def sparse_seconds(self) -> float | None:
        return _seconds(site for site in self.sites if site.sparse_calls)

    @property
    def dense_seconds(self) -> float | None:
        return _seconds(site for site in self.sites if not site.sparse_calls)

    @property
    def sparse_call_seconds(self) -> float | None:
        """The median of a call, over layers and steps: one-time compilation does not move it."""
        return _call_seconds(site for site in self.sites if site.sparse_calls)

    @property
    def dense_call_seconds(self) -> float | None:
        return _call_seconds(site for site in self.sites if not site.sparse_calls)

    @property
    def one_time_seconds(self) -> float:
        """Time beyond calls times their median, if that is most of it: kernels compiled on first use."""
        usual = 0.0
        for call_seconds, calls in (
            (self.sparse_call_seconds, sum(s.calls for s in self.sites if s.sparse_calls)),
            (self.dense_call_seconds, sum(s.calls for s in self.sites if not s.sparse_calls)),
        ):
            usual += (call_seconds or 0.0) * calls
        extra = (self.seconds or 0.0) - usual
        return extra if extra > usual / 2 else 0.0


def by_role(run: RunStats) -> list[RoleTotals]:
    """The roles of `run`, in the order in which they were first called."""
    sites: dict[str, list[SiteStats]] = {}
    for site in run.sites.values():
        sites.setdefault(site.role, []).append(site)
    return [RoleTotals(role, found) for role, found in sites.items()]


def dense_steps(sites: Iterable[SiteStats], cutoff: float) -> int | None:
    """How many steps a gate at `cutoff` keeps dense; None without a gate or known times."""
    times = {site.step: site.timestep for site in sites}
    if not cutoff or not times or None in times.values():
        return None
    return TimestepGate(cutoff).dense_steps(times.values())


def number(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def operations(count: float) -> str:
    """Floating point operations, in the unit that keeps the number short."""
    for size, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if count >= size:
            break
    return f"{number(count / size)} {unit}"


def duration(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1000)} ms"


def _seconds(sites: Iterable[SiteStats]) -> float | None:
    known = [site.seconds for site in sites if site.seconds is not None]
    return sum(known) if known else None


def _call_seconds(sites: Iterable[SiteStats]) -> float | None:
    known = [site.seconds / site.calls for site in sites if site.seconds is not None and site.calls]
    return median(known) if known else None
