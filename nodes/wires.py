"""What travels on the pack's own wires: small frozen values, and the holder of a run's statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..trtllm_core.calibration import Calibration
from ..trtllm_core.gate import TimestepGate
from ..trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec
from ..trtllm_core.stats import RunStats

if TYPE_CHECKING:
    from .hook.run import PatchRun


@dataclass(frozen=True)
class SkipSoftmax:
    """TRTLLM_SKIP_SOFTMAX: the spec, and what only makes sense beside a model."""

    spec: SkipSoftmaxSpec
    calibration: Calibration | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoleSettings:
    """Everything asked of one role: its spec, its calibration and the layers it leaves dense."""

    spec: AttentionSpec = AttentionSpec()
    calibration: Calibration | None = None
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        backend: str,
        quant: AttnQuantSpec | None = None,
        skip_softmax: SkipSoftmax | None = None,
    ) -> RoleSettings:
        """From a node's inputs; backend "auto" leaves the choice to the platform."""
        spec = AttentionSpec(
            backend=None if backend == "auto" else backend,
            quant=quant,
            skip_softmax=skip_softmax.spec if skip_softmax else None,
        )
        if skip_softmax is None:
            return cls(spec)
        return cls(spec, skip_softmax.calibration, skip_softmax.ignore)


@dataclass(frozen=True)
class Roles:
    """TRTLLM_ROLES: settings by role; a role's settings replace the default's whole."""

    by_role: tuple[tuple[str, RoleSettings], ...] = ()

    def with_role(self, role: str, settings: RoleSettings) -> Roles:
        others = tuple(item for item in self.by_role if item[0] != role)
        return Roles(others + ((role, settings),))


@dataclass(frozen=True)
class Gate:
    """TRTLLM_GATE."""

    gate: TimestepGate


@dataclass(frozen=True)
class IgnoreList:
    """TRTLLM_IGNORE: fnmatch patterns of layer names that Skip-Softmax leaves dense."""

    patterns: tuple[str, ...]


@dataclass
class StatsHolder:
    """TRTLLM_STATS: the runs of one patched model since its patch was made, newest last.

    patch: whose runs they are, for its settings and device. wanted: a report was made of them, so
    further runs count tiles even if the patch was made before the report was linked. replaced: a later
    patch on the same model took its place.
    """

    runs: list[RunStats] = field(default_factory=list)
    keep: int = 8
    patch: PatchRun | None = None
    wanted: bool = False
    replaced: bool = False

    def __deepcopy__(self, memo):
        return self

    def add(self, run: RunStats) -> None:
        self.runs.append(run)
        del self.runs[: -self.keep]

    @property
    def last(self) -> RunStats | None:
        return self.runs[-1] if self.runs else None
