"""Contention between compute and communication, fitted to steps that ran with and without a network.

The transport's processor time is measured while the main thread waits. In a step it competes with compute for caches
and memory, and takes longer. `contention` is a factor on it, fitted so that compute is slowed in the simulated step as
in the measured one. The step time is not fitted: its error is mostly due to links, which do not slow compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.timeline import Task, simulate, step_time_us
from fxcomp.plan.kinds import WIRES, Stream


@dataclass(frozen=True, slots=True)
class TransportCost:
    """Processor time of a collective's software, and the collective's slowdown by compute."""

    us: float
    us_per_mb: float
    """Time per 10⁶ bytes sent, which includes receiving the same number."""
    speed: float = 1.0
    """While compute leaves no processor free, t µs become t / speed + more_us."""
    more_us: float = 0.0

    def overlap_speed(self, alone_us: float) -> float:
        """Return the relative speed during compute of a collective that takes `alone_us` alone."""
        return alone_us / (alone_us / self.speed + self.more_us) if alone_us >= NO_TIME_US else 1.0


NO_TIME_US = 1e-9
"""Shorter times count as 0, to avoid division by them."""


@dataclass(frozen=True, slots=True)
class SeenStep:
    """Step as predicted without contention, and as measured on one network."""

    tasks: tuple[Task, ...]
    step_us: float
    slowed_us: float
    """Time by which the network lengthens the main thread's compute."""


FACTORS = tuple(2 ** (k / 8) for k in range(-8, 25))
"""Grid: 1/2 to 8 times the transport's processor time."""

NOISE = 0.02
"""Relative error of a measured step (assumed: steps repeat to 2 to 4 %)."""

USUAL = 0.5
"""Prior's width around 1, in logarithms (assumed): without evidence the factor stays near 1."""


def under_contention(tasks: Sequence[Task], factor: float) -> list[Task]:
    return [replace(task, load=task.load * factor) if task.stream in WIRES else task for task in tasks]


@dataclass(frozen=True, slots=True)
class FittedContention:
    factor: float
    error: float
    """Largest relative error of a step time, predicted with the other steps' factor, or its own if alone."""


def fit_contention(steps: Sequence[SeenStep], processors: Processors) -> FittedContention:
    """Fit the factor with which simulated steps slow compute as measured steps do.

    Maximum a posteriori estimate over a grid. With a spare processor the factor is 1.
    """
    factors = (1.0,) if processors.has_spare else FACTORS
    slowed = [[_slowed_us(step, factor, processors) for factor in factors] for step in steps]

    def fitted(places: Sequence[int]) -> float:
        def misfit(number: int) -> float:
            off = [(slowed[k][number] - steps[k].slowed_us) / steps[k].step_us / NOISE for k in places]
            return sum(one**2 for one in off) + (math.log(factors[number]) / USUAL) ** 2

        return factors[min(range(len(factors)), key=misfit)]

    everyone = range(len(steps))
    errors = [_error(steps[k], fitted([j for j in everyone if j != k] or everyone), processors) for k in everyone]
    return FittedContention(fitted(everyone), max(errors))


def _slowed_us(step: SeenStep, factor: float, processors: Processors) -> float:
    return simulate(under_contention(step.tasks, factor), processors).slowed_us(Stream.COMPUTE)


def _error(step: SeenStep, factor: float, processors: Processors) -> float:
    return abs(step_time_us(under_contention(step.tasks, factor), processors) / step.step_us - 1)
