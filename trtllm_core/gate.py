"""The timestep gate: Skip-Softmax waits until the early, high-noise steps are over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .specs import number


@dataclass(frozen=True)
class TimestepGate:
    """Dense while t > D.

    disabled_until_timestep: D in [0, 1]. 0 is no gate at all, and needs no timestep; 1 leaves no
    step dense either, but asks for a timestep like every other cutoff.
    """

    disabled_until_timestep: float = 0.0

    def __post_init__(self):
        number("disabled_until_timestep", self.disabled_until_timestep, 0, 1)

    def is_dense(self, timestep: float | None) -> bool:
        """Whether a step at normalized time `timestep` (1 is pure noise) stays dense.

        None, an unknown time, is dense whenever there is a gate.
        """
        cutoff = self.disabled_until_timestep
        if cutoff == 0:
            return False
        return timestep is None or timestep > cutoff

    def dense_steps(self, timesteps: Iterable[float]) -> int:
        """How many of a schedule's normalized `timesteps` stay dense."""
        return sum(self.is_dense(t) for t in timesteps)
