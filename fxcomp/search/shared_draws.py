"""Compare plans when the costs are as wrong as they may be: every plan meets the same errors.

    the step of a draw = simulate(tasks, each × the error of what it is: compute, a link, copies, or a compressor)

An error is log-normal with median 1 and belongs to the draw, not to the plan. What two plans share, such as compute and
a link that is slower than its table, moves both of them, so it does not hide which one is faster. `DRAWS` draws have
fixed seeds: every rank and every run finds the same.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, step_time_us, step_times_us
from fxcomp.plan.kinds import WIRES, Stream
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.search.descent.problem import TracedPrices
from fxcomp.search.plan_tasks import (
    BucketTasks,
    assemble,
    broadcast_task,
    members_of,
    price_bucket,
    ready_times,
    region_tasks,
)
from fxcomp.search.workload import Gradient, Workload


class ExactPlans:
    """The plans of one workload, priced as their tasks are, and not as a search follows prices by lines."""

    def __init__(self, workload: Workload, traced: TracedPrices) -> None:
        self.workload, self.costs, self.cluster = workload, traced.costs, traced.cluster
        self._broadcast = broadcast_task(workload, self.costs, self.cluster)
        self._priced: dict[tuple[int, Bucket, float], BucketTasks] = {}

    def step_us(self, plan: Plan) -> float:
        """Predict the step, as `plan_tasks` and the simulator do."""
        return step_time_us(self.tasks(plan), self.costs.processors)

    def in_draws(self, plan: Plan) -> list[float]:
        """Predict the step once in each draw of the costs' errors, in µs."""
        tasks = self.tasks(plan)
        errors, kinds = DrawnErrors.of(self.costs), _kinds_of(tasks, plan)
        number = {kind: k for k, kind in enumerate(dict.fromkeys(kinds))}
        factors = np.stack([np.exp(errors.of_kind(kind) * _normals(kind)) for kind in number], axis=1)
        durations = np.array([task.duration_us for task in tasks])
        varied = durations * factors[:, [number[kind] for kind in kinds]]
        return step_times_us(tasks, [array("d", row.tobytes()) for row in varied], self.costs.processors)

    def tasks(self, plan: Plan) -> list[Task]:
        """Write down the emitted step, as `plan_tasks` does."""
        workload = self.workload.moved(plan.moved)
        members = members_of(plan, workload, self.costs)
        buckets = [
            self._bucket(k, bucket, each) for k, (bucket, each) in enumerate(zip(plan.buckets, members, strict=True))
        ]
        return assemble(workload, region_tasks(ready_times(workload, plan)), buckets, self._broadcast)

    def _bucket(self, k: int, bucket: Bucket, members: Sequence[Gradient]) -> BucketTasks:
        # Where a gradient is cut, the plan's other buckets say with which of its parts it is updated.
        key = k, bucket, sum(gradient.update_us for gradient in members)
        tasks = self._priced.get(key)
        if tasks is None:
            tasks = price_bucket(k, members, bucket.strategy, self.workload, self.costs, self.cluster)
            self._priced[key] = tasks
        return tasks


DRAWS = 64

COMPUTE_ERROR = 0.05  # assumed: compute is timed in the job's own step
COMPRESSOR_ERROR = (
    0.25  # assumed: compressors are timed by themselves, with caches that the step's compute does not fill
)

COMPRESSING = ("compress", "decompress", "propose")
"""The first words of a compressor's tasks."""

LEAST_GAIN = 0.01
"""A plan beats another one if it saves this share of its step: a race can hardly measure less."""


@dataclass(frozen=True, slots=True)
class DrawnErrors:
    """Standard deviations of the logarithms of costs."""

    compute: float
    links: float
    compressors: float

    @classmethod
    def of(cls, costs: CostTable) -> DrawnErrors:
        """Return a table's errors. Most of a prediction's error is the links'."""
        return cls(
            COMPUTE_ERROR + costs.compute_error,
            costs.error,
            max(COMPRESSOR_ERROR, costs.error) + costs.compute_error,
        )

    def of_kind(self, kind: str) -> float:
        """Return the error of compute, of a link or a copy, or of compressors."""
        if kind == _COMPUTE:
            return self.compute
        return self.links if kind in _MOVING.values() else self.compressors


def share_won(mine: Sequence[float], others: Sequence[float]) -> float:
    """Return the share of draws in which the first plan is faster by LEAST_GAIN."""
    return sum(a < b * (1 - LEAST_GAIN) for a, b in zip(mine, others, strict=True)) / len(mine)


_MOVING = {stream: stream.value for stream in (*WIRES, Stream.D2H, Stream.H2D)}
_COMPUTE = Stream.COMPUTE.value


def _kinds_of(tasks: Sequence[Task], plan: Plan) -> list[str]:
    """Name the error that each task has: its link's, its compressors', else compute's."""
    compressors = [", ".join(dict.fromkeys(map(str, bucket.strategy.compressors))) for bucket in plan.buckets]

    def kind_of(task: Task) -> str:
        moving = _MOVING.get(task.stream)
        if moving is not None:
            return moving
        words = task.name.split()
        return compressors[int(words[-1])] if words[0] in COMPRESSING else _COMPUTE

    return [kind_of(task) for task in tasks]


@cache
def _normals(kind: str) -> np.ndarray:
    """Draw standard normals that belong to a name, whatever else is drawn."""
    return np.random.default_rng((0, zlib.crc32(kind.encode()))).standard_normal(DRAWS)
