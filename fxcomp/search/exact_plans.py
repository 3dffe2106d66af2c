"""Predict the steps of plans that have buckets in common: each bucket is priced once."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import step_time_us
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
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

    def __init__(self, workload: Workload, costs: CostTable, cluster: Cluster) -> None:
        self.workload, self.costs, self.cluster = workload, costs, cluster
        self._broadcast = broadcast_task(workload, costs, cluster)
        self._priced: dict[tuple[int, tuple[Gradient, ...], Strategy], BucketTasks] = {}

    def step_us(self, plan: Plan) -> float:
        """Predict the step, as `plan_tasks` and the simulator do."""
        return self._step_us(plan, members_of(plan, self.workload, self.costs))

    def changed_us(self, plan: Plan, changes: Sequence[Sequence[Strategy]]) -> list[list[float]]:
        """Predict the step with each of these strategies in a bucket's place, one bucket at a time."""
        members = members_of(plan, self.workload, self.costs)
        strategies = [bucket.strategy for bucket in plan.buckets]
        return [
            [
                self._step_us(plan.with_strategies([*strategies[:k], other, *strategies[k + 1 :]]), members)
                for other in others
            ]
            for k, others in enumerate(changes)
        ]

    def _step_us(self, plan: Plan, members: Sequence[Sequence[Gradient]]) -> float:
        buckets = [
            self._bucket(k, tuple(each), bucket.strategy)
            for k, (bucket, each) in enumerate(zip(plan.buckets, members, strict=True))
        ]
        regions = region_tasks(ready_times(self.workload, plan))
        return step_time_us(assemble(self.workload, regions, buckets, self._broadcast), self.costs.processors)

    def _bucket(self, k: int, gradients: tuple[Gradient, ...], strategy: Strategy) -> BucketTasks:
        key = k, gradients, strategy
        tasks = self._priced.get(key)
        if tasks is None:
            tasks = price_bucket(k, gradients, strategy, self.workload, self.costs, self.cluster)
            self._priced[key] = tasks
        return tasks
