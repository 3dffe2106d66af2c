"""Contention between compute and communication, fitted to steps that ran with and without a network.

    factor           multiplies the transport's processor time, because compute competes for caches and memory
    link_factor      multiplies collectives' time, because a step runs several in a row, a measurement only one
    overlap_speed    slows collectives while compute leaves no processor free, because threads wait for time slices

`factor` is fitted to the slowdown of compute, the others to the length of the step, and `link_factor` also to the time
of collectives without compute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.timeline import Task, simulate, step_time_us
from fxcomp.plan.kinds import WIRES, Stream


@dataclass(frozen=True, slots=True)
class TransportCost:
    """Processor time of a collective's software."""

    us: float
    us_per_mb: float
    """Time per 10⁶ bytes sent, including the time to receive as many."""


NO_TIME_US = 1e-9
"""Shorter times count as 0, to avoid division by them."""


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step: its tasks as predicted without contention, and its times as measured on one network."""

    tasks: tuple[Task, ...]
    step_us: float
    slowed_us: float
    """Time that the network adds to the main thread's compute."""
    wire_us: float | None = None
    """Time of the step's collectives without compute; None if links are given, not measured."""


FACTORS = tuple(2 ** (k / 8) for k in range(-8, 25))
"""Candidates for `factor`: 1/2 to 8."""

SPEEDS = tuple(2 ** (-k / 8) for k in range(9))
"""Candidates for `overlap_speed`: 1 to 1/2."""

LINK_FACTORS = tuple(2 ** (k / 32) for k in range(-16, 17))
"""Candidates for `link_factor`: 0.7 to 1.4."""

NOISE = 0.02
"""Relative error of a measured step (assumed: steps repeat to 2 to 4 %)."""

USUAL = 0.5
"""Standard deviation of the logarithms of the three fitted numbers, in a prior around 1 (assumed)."""

ROUNDS = 2
"""Rounds of a fit. A round fits `factor`, then `link_factor` and `overlap_speed`."""


@dataclass(frozen=True, slots=True)
class FittedContention:
    factor: float = 1.0
    link_factor: float = 1.0
    overlap_speed: float = 1.0
    error: float = 0.0
    """Relative error of the predicted length of the step."""

    def under(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of a step with this contention."""
        return [self._under(task) if task.stream in WIRES else task for task in tasks]

    def _under(self, task: Task) -> Task:
        return replace(
            task,
            duration_us=task.duration_us * self.link_factor,
            load=task.load * self.factor / self.link_factor,
            overlap_speed=self.overlap_speed,
        )


def fit_contention(step: SeenStep, processors: Processors) -> FittedContention:
    """Fit contention to a step by grid search for the most probable numbers.

    First fit `factor`, then `link_factor` and `overlap_speed`. With a spare processor only `link_factor` is fitted.
    """
    wires_us = step_time_us(alone_on_wires(step.tasks))
    speeds = (1.0,) if processors.has_spare else SPEEDS
    links = (1.0,) if step.wire_us is None else LINK_FACTORS

    def off_compute(found: FittedContention) -> float:
        slowed_us = simulate(found.under(step.tasks), processors).slowed_us(Stream.COMPUTE)
        return _misfit(found, [slowed_us - step.slowed_us], step.step_us)

    def off_network(found: FittedContention) -> float:
        off_us = [step_time_us(found.under(step.tasks), processors) - step.step_us]
        off_us += [] if step.wire_us is None else [found.link_factor * wires_us - step.wire_us]
        return _misfit(found, off_us, step.step_us)

    found = FittedContention()
    for _ in range(ROUNDS):
        if not processors.has_spare:
            found = min((replace(found, factor=factor) for factor in FACTORS), key=off_compute)
        pairs = itertools.product(links, speeds)
        found = min((replace(found, link_factor=link, overlap_speed=speed) for link, speed in pairs), key=off_network)
    us = step_time_us(found.under(step.tasks), processors)
    return replace(found, error=abs(us / step.step_us - 1))


def _misfit(found: FittedContention, off_us: Sequence[float], step_us: float) -> float:
    priors = (found.factor, found.link_factor, found.overlap_speed)
    return sum((us / step_us / NOISE) ** 2 for us in off_us) + sum((math.log(each) / USUAL) ** 2 for each in priors)


def alone_on_wires(tasks: Sequence[Task]) -> list[Task]:
    """Return only the network's tasks, as in a step without compute."""
    names = {task.name for task in tasks if task.stream in WIRES}
    return [
        replace(task, after=tuple(name for name in task.after if name in names), load=0.0)
        for task in tasks
        if task.name in names
    ]
