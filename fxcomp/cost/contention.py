"""Say how compute and communication slow each other, and correct it by steps that ran with a network and without.

The transport's processor time is measured while the main thread only waits. In a step it competes with compute for
caches and memory, and takes longer. One factor on it, `contention`, is fitted: compute is slowed in the simulated step
as it was in the measured one. The step's length is no part of the fit. How far it is off then is the prediction's
error, and most of that is the links': a link that is slower than its table lengthens the step and slows no compute.
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
    """The processor time of a collective's own software, and how overlapping compute slows the collective."""

    us: float
    us_per_mb: float
    """Per 10⁶ bytes that a rank sends; receiving as many is included."""
    speed: float = 1.0
    """While compute leaves no processor free, what takes t µs alone takes t / speed + more_us."""
    more_us: float = 0.0

    def overlap_speed(self, alone_us: float) -> float:
        """Return the relative speed, while compute runs, of a collective that takes so long alone."""
        return alone_us / (alone_us / self.speed + self.more_us) if alone_us >= NO_TIME_US else 1.0


NO_TIME_US = 1e-9
"""A shorter time counts as none: nothing is divided by it."""


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step as it is predicted without contention, and as it ran on one network."""

    tasks: tuple[Task, ...]
    step_us: float
    slowed_us: float
    """Measure by how much the network lengthens the main thread's compute."""


FACTORS = tuple(2 ** (k / 8) for k in range(-8, 25))
"""The grid: half to eight times the transport's processor time."""

NOISE = 0.02
"""The relative error of a measured step (assumed: steps repeat to 2 to 4 %)."""

USUAL = 0.5
"""The prior's width around 1, in logarithms (assumed): steps that hardly depend on the factor leave it near 1."""


def under_contention(tasks: Sequence[Task], factor: float) -> list[Task]:
    """Multiply the processor time of everything on links."""
    return [replace(task, load=task.load * factor) if task.stream in WIRES else task for task in tasks]


@dataclass(frozen=True, slots=True)
class FittedContention:
    """The factor that steps on several networks tell, and how far predictions are off then."""

    factor: float
    error: float
    """The largest relative error of a step's length. Each step is predicted with the factor that the others tell; one
    alone with its own, for which its length did not count."""


def fit_contention(steps: Sequence[SeenStep], processors: Processors) -> FittedContention:
    """Fit the factor with which compute is slowed in simulated steps as it was in measured ones.

    A maximum a posteriori estimate over a grid. With a processor to spare nothing is slowed, and the factor is 1.
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
