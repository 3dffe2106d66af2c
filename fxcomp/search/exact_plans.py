"""Predict the steps of plans that have buckets in common: each bucket is priced once."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, step_time_us
from fxcomp.plan.plan import Bucket, Plan
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
        self._priced: dict[tuple[int, Bucket, float], BucketTasks] = {}

    def step_us(self, plan: Plan) -> float:
        """Predict the step, as `plan_tasks` and the simulator do."""
        return step_time_us(self.tasks(plan), self.costs.processors)

    def tasks(self, plan: Plan) -> list[Task]:
        """Write down the emitted step, as `plan_tasks` does."""
        members = members_of(plan, self.workload, self.costs)
        buckets = [
            self._bucket(k, bucket, each) for k, (bucket, each) in enumerate(zip(plan.buckets, members, strict=True))
        ]
        return assemble(self.workload, region_tasks(ready_times(self.workload, plan)), buckets, self._broadcast)

    def _bucket(self, k: int, bucket: Bucket, members: Sequence[Gradient]) -> BucketTasks:
        # Where a gradient is cut, the plan's other buckets say with which of its parts it is updated.
        key = k, bucket, sum(gradient.update_us for gradient in members)
        tasks = self._priced.get(key)
        if tasks is None:
            tasks = price_bucket(k, members, bucket.strategy, self.workload, self.costs, self.cluster)
            self._priced[key] = tasks
        return tasks
