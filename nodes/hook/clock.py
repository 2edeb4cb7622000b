"""Which step the sampler is at: the current sigma as a normalized time t in [0, 1]."""

from __future__ import annotations

import comfy.model_sampling as ms
import torch


def normalized_timestep(model_sampling, sigma) -> float | None:
    """t of `sigma` (a tensor of one or more equal values, or a float) under `model_sampling`.

    1 is pure noise, 0 a finished latent. For flow models t is sigma itself; discrete noise
    schedules give their timestep index over the last one; continuous ones sigma / (1 + sigma).
    None for a kind of schedule that is not known. Waits for the device once if sigma is on one.
    """
    value = float(sigma.max()) if hasattr(sigma, "max") else float(sigma)
    if isinstance(model_sampling, ms.CONST):
        return value
    if isinstance(model_sampling, ms.ModelSamplingDiscrete):
        last = len(model_sampling.sigmas) - 1
        return float(model_sampling.timestep(torch.tensor([value]))) / last
    if isinstance(model_sampling, ms.ModelSamplingContinuousV):
        return float(model_sampling.timestep(torch.tensor([value])))
    if isinstance(model_sampling, ms.ModelSamplingContinuousEDM):
        return value / (1 + value)
    return None


def step_of(sigma: float, schedule: tuple[float, ...]) -> int:
    """The step of a schedule (descending sigmas, the final 0 included) that `sigma` belongs to.

    Samplers may evaluate the model between two scheduled sigmas, or twice at one: such calls
    count for the step whose sigma is the last one not below them.
    """
    step = 0
    for index, scheduled in enumerate(schedule[:-1]):
        if sigma <= scheduled * (1 + 1e-5):
            step = index
    return step


class Clock:
    """The time of one run, advanced once per model call and read by every attention call."""

    def __init__(self):
        self.reset()

    def __deepcopy__(self, memo):
        return self

    def reset(self) -> None:
        self.timestep: float | None = None
        self.sigma: float | None = None
        self.step = 0
        self.schedule: tuple[float, ...] = ()
        self.grid: tuple[int, int, int] | None = None
        self.context_length: int | None = None

    def start(self, sigmas) -> None:
        """Begin a run over `sigmas`, the sampler's own schedule."""
        self.reset()
        self.schedule = tuple(float(s) for s in sigmas)

    def tick(self, model_sampling, sigma) -> None:
        """Take the time of a model call; the one read of sigma."""
        value = float(sigma.max())
        self.sigma = value
        self.timestep = normalized_timestep(model_sampling, value)
        self.step = step_of(value, self.schedule)
