"""How compute and communication slow each other down, from one step that was run with a network and without.

The transport's processor time and its speed beside compute are measured with work that stays in the caches. A real step
does not, so its own regions and its own length correct both numbers, for each kind of collective by a step of its own:
by as little as explains what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.processors import Processors
from fxcomp.cost.timeline import Task, simulate, step_time_us
from fxcomp.plan.streams import WIRES, Stream


@dataclass(frozen=True, slots=True)
class Contention:
    """What the transport's load and its speed beside compute are multiplied by."""

    load: float = 1.0
    speed: float = 1.0

    def on(self, tasks: Sequence[Task], names: Collection[str] | None = None) -> list[Task]:
        """The same tasks, with what this changes: those of these names, or all on links."""
        return [
            replace(task, load=task.load * self.load, overlap_speed=min(1.0, task.overlap_speed * self.speed))
            if task.stream in WIRES and (names is None or task.name in names)
            else task
            for task in tasks
        ]


UNCHANGED = Contention()

LOADS = tuple(2 ** (k / 4) for k in range(-8, 13))
SPEEDS = tuple(2 ** (-k / 6) for k in range(-3, 13))
"""What is tried, a quarter to eight times the load, and a quarter to 1.4 times the speed."""

NOISE = 0.02
"""Relative to the step: what is not explained more closely than this (assumed: steps repeat to 2 to 4 %)."""

USUAL_LOAD, USUAL_SPEED = 0.5, 0.3
"""How far the factors are from 1, in logarithms (assumed): a step that depends on neither leaves them at 1."""


def fit_contention(
    tasks: Sequence[Task],
    processors: Processors,
    step_us: float,
    slowed_us: float,
    names: Collection[str] | None = None,
) -> Contention:
    """The factors, for tasks of these names, with which all take `step_us`, of which compute is slowed by `slowed_us`.

    Of all that explain both about as well, those nearest to 1: a maximum a posteriori estimate over a grid. Tried from
    1 outwards, so that most need no simulation: how far they are from 1 is already more than the best one's misfit, or
    that with the step's length, which is known without the spans.
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
    """How unusual factors are."""
    return (math.log(contention.load) / USUAL_LOAD) ** 2 + (math.log(contention.speed) / USUAL_SPEED) ** 2
