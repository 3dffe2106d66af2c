"""Ask how a plan fares when times vary: the same tasks with other durations, many times.

    the step of one draw = simulate(tasks, compute × slow, each link × busy, every task × its own noise)

`slow` belongs to the slowest of the ranks, which the others wait for; `busy` to a link for the whole step. Factors are
log-normal with median 1. Plans that are compared see the same draws, so that luck does not decide between them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxcomp.cluster.cluster import UNSHARED, Processors
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, step_times_us
from fxcomp.plan.kinds import WIRES, Stream


@dataclass(frozen=True, slots=True)
class Jitter:
    """The variation of times from step to step: standard deviations of their logarithms, so 0.05 is about 5 %."""

    compute: float = 0.03  # assumed: a rank's whole step
    links: float = 0.05  # assumed: a link for a whole step
    tasks: float = 0.02  # assumed: each task by itself
    ranks: int = 1
    """Whose slowest one all wait for."""


def jitter_of(costs: CostTable, ranks: int) -> Jitter:
    """Return the measured jitter: compute's distance from its median, the links' from their fits; else the assumed."""
    compute = [math.log1p(measured.spread) for measured in costs.compute.values() if measured.spread]
    links = [measured.spread for measured in costs.collectives.values() if measured.spread]
    assumed = Jitter(ranks=ranks)
    return replace(
        assumed,
        compute=statistics.median(compute) / RANGE if compute else assumed.compute,
        links=statistics.median(links) if links else assumed.links,
    )


RANGE = 2.5
"""From the smallest to the largest of about six steps it is as many standard deviations as this (normal)."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Step times of all draws, in µs."""

    draws: tuple[float, ...]

    def at(self, share: float) -> float:
        """Return the time that this share of all steps stays within."""
        ordered = sorted(self.draws)
        return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]

    @property
    def median_us(self) -> float:
        return statistics.median(self.draws)

    def share_faster_than(self, other: Distribution) -> float:
        """Return the share of draws in which this plan is the faster one. Both were drawn with the same seed."""
        pairs = list(zip(self.draws, other.draws, strict=True))
        return sum(mine < theirs for mine, theirs in pairs) / len(pairs)


DRAWS = 100


def draw_steps(
    tasks: Sequence[Task],
    jitter: Jitter,
    processors: Processors = UNSHARED,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Distribution:
    """Simulate the tasks with varied durations. Equal seeds give equal machines, whatever the tasks."""
    durations = np.array([task.duration_us for task in tasks])
    varied: list[list[float]] = []
    for number in range(draws):
        machine = np.random.default_rng((seed, number, 0))
        own = np.random.default_rng((seed, number, 1))
        factors = _factors_of_streams(machine, jitter)
        noise = np.exp(jitter.tasks * own.standard_normal(len(tasks)))
        varied.append((durations * np.array([factors[task.stream] for task in tasks]) * noise).tolist())
    return Distribution(tuple(step_times_us(tasks, varied, processors)))


def _factors_of_streams(machine: np.random.Generator, jitter: Jitter) -> Mapping[Stream, float]:
    """Draw a factor for each stream of the machine; compute's is the slowest rank's."""
    slow = math.exp(jitter.compute * float(machine.standard_normal(jitter.ranks).max()))
    busy = {wire: math.exp(jitter.links * float(machine.standard_normal())) for wire in WIRES}
    return {stream: busy.get(stream, slow) for stream in Stream}
