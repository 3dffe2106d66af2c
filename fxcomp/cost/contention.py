"""Say how compute and communication slow each other, and correct it by a step that ran with a network and without.

The transport's processor time and its speed while compute runs are measured with work that stays in the caches. A real
step does not, so its own regions and its own length correct both numbers, for each kind of collective by a step of its
own: by as little as explains what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.processors import Processors
from fxcomp.cost.timeline import Task, simulate, step_time_us
from fxcomp.plan.streams import WIRES, Stream


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
class Contention:
    """Factors on the transport's load and on its speed while compute runs."""

    load: float = 1.0
    speed: float = 1.0

    def on(self, tasks: Sequence[Task], names: Collection[str] | None = None) -> list[Task]:
        """Apply the factors to the tasks of these names, or to all on links."""
        return [
            replace(task, load=task.load * self.load, overlap_speed=min(1.0, task.overlap_speed * self.speed))
            if task.stream in WIRES and (names is None or task.name in names)
            else task
            for task in tasks
        ]


UNCHANGED = Contention()

LOADS = tuple(2 ** (k / 4) for k in range(-8, 13))
SPEEDS = tuple(2 ** (-k / 6) for k in range(-3, 13))
"""The grid: a quarter to eight times the load, and a quarter to 1.4 times the speed."""

NOISE = 0.02
"""The relative error of a measured step (assumed: steps repeat to 2 to 4 %)."""

USUAL_LOAD, USUAL_SPEED = 0.5, 0.3
"""The prior's width around 1, in logarithms (assumed): a step that depends on neither factor leaves it at 1."""


def fit_contention(
    tasks: Sequence[Task],
    processors: Processors,
    step_us: float,
    slowed_us: float,
    names: Collection[str] | None = None,
) -> Contention:
    """Fit the factors of the named tasks with which the step takes `step_us` and slows compute by `slowed_us`.

    A maximum a posteriori estimate over a grid: of factors that explain both about as well, those nearest to 1. The
    grid is tried from 1 outwards and left where the prior alone is worse than the best one found, and the spans are
    simulated only where the step's length fits, so that most need no simulation.
    """
    if processors.has_spare:
        return UNCHANGED
    grid = [Contention(load, speed) for load in LOADS for speed in SPEEDS]
    best, least = (math.inf, 0), math.inf
    for number in sorted(range(len(grid)), key=lambda number: _far(grid[number])):
        far, changed = _far(grid[number]), grid[number].on(tasks, names)
        if far > least:
            break
        step = math.log(step_time_us(changed, processors) / step_us) / NOISE
        if step**2 + far > least:
            continue
        slowed = (simulate(changed, processors).slowed_us(Stream.COMPUTE) - slowed_us) / step_us / NOISE
        best = min(best, (step**2 + slowed**2 + far, number))  # of equal ones the first of the grid
        least = best[0]
    return grid[best[1]]


def _far(contention: Contention) -> float:
    """Return the negative log prior of factors, up to a constant."""
    return (math.log(contention.load) / USUAL_LOAD) ** 2 + (math.log(contention.speed) / USUAL_SPEED) ** 2
