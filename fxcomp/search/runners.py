"""Pick the plans that a job may try while it runs, and say which of them is worth it.

    dense, always
    bf16 everywhere, flat or by level, if the mode allows it
    the plan with the shortest predicted step, and up to two more that differ from all of these

What a prediction cannot tell apart the running job can: `fxcomp.step.race` lets the runners take turns. Here is what is
said about each beforehand: its predicted step, and the share of the draws (`shared_draws`) in which it beats dense.

    in WORTH_TRYING of the draws or more    it may race
    in WORTH_FOLLOWING or more              it is followed where nothing races
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, step_time_us
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.shared_draws import share_won, steps_in_draws
from fxcomp.search.workload import Workload

WORTH_TRYING = 0.1
"""The share of draws in which a plan must beat dense to race. Dense and bf16 race always."""

WORTH_FOLLOWING = 0.75
"""The share of draws in which a plan must beat dense to be followed without a race."""

OTHERS = 2
"""The most runners beside dense, bf16 and the fastest."""

DIFFERENT = 0.25
"""The least share of all elements that other compressors carry, or over other levels, than in every other runner."""

DENSE, BF16, FASTEST = "dense", "bf16", "fastest"


@dataclass(frozen=True, slots=True)
class Runner:
    """A plan that may race."""

    name: str
    plan: Plan
    step_us: float
    """Its predicted step."""
    wins: float
    """The share of draws in which it beats dense."""
    loss: float
    """The relative squared error of the gradient: what a tie is decided by."""

    def to_json(self) -> dict[str, Any]:
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Runner:
        """Build one from `to_json`'s data."""
        values: dict[str, Any] = {**data, "plan": Plan.from_json(data["plan"])}
        return cls(**values)


def pick_runners(
    always: Mapping[str, Plan], others: Iterable[Plan], workload: Workload, costs: CostTable, cluster: Cluster
) -> tuple[Runner, ...]:
    """Pick runners, the shortest predicted step first. Of equal plans the first name in `always` counts.

    `always` has dense among them. `others` run if they differ and are worth trying, the fastest first.
    """

    def tasks_of(plan: Plan) -> tuple[Task, ...]:
        return plan_tasks(workload, plan, costs, cluster)

    dense_us = steps_in_draws(always[DENSE], tasks_of(always[DENSE]), costs)

    def runner(name: str, plan: Plan) -> Runner:
        tasks = tasks_of(plan)
        wins = share_won(steps_in_draws(plan, tasks, costs), dense_us)
        return Runner(name, plan, step_time_us(tasks, costs.processors), wins, plan_error(plan, cluster))

    picked: list[Runner] = []
    for name, plan in always.items():
        if all(plan != known.plan for known in picked):
            picked.append(runner(name, plan))
    more = sorted((runner(_name_of(plan), plan) for plan in others), key=lambda each: each.step_us)
    most = len(picked) + OTHERS
    for each in more:
        is_another = all(_share_that_differs(each.plan, known.plan) >= DIFFERENT for known in picked)
        if len(picked) < most and is_another and each.wins >= WORTH_TRYING:
            picked.append(each)
    return tuple(sorted(picked, key=lambda each: each.step_us))


def is_worth_following(plan: Plan, runners: Sequence[Runner]) -> bool:
    """Tell that a plan beats dense in enough draws to be followed without a race; the dense plan never does."""
    return any(each.plan == plan and each.wins >= WORTH_FOLLOWING for each in runners)


def main_strategies(plan: Plan) -> list[Strategy]:
    """List a plan's strategies, those of most elements first."""
    elements = Counter[Strategy]()
    for bucket in plan.buckets:
        elements[bucket.strategy] += bucket.elements
    return [strategy for strategy, _ in elements.most_common()]


def _name_of(plan: Plan) -> str:
    """Name a plan after the compressors of most of its elements."""
    return ", then ".join(map(str, main_strategies(plan)[0].compressors)) or DENSE


def _share_that_differs(plan: Plan, other: Plan) -> float:
    """Return the share of all elements that other compressors carry, or over other levels; devices do not count."""
    elements, same = sum(bucket.elements for bucket in plan.buckets), 0
    by_name: dict[str, list[tuple[range, Strategy]]] = {}
    for bucket in other.buckets:
        for name, extent in zip(bucket.names, bucket.extents, strict=True):
            by_name.setdefault(name, []).append((extent, bucket.strategy))
    for bucket in plan.buckets:
        for name, extent in zip(bucket.names, bucket.extents, strict=True):
            for its, strategy in by_name.get(name, ()):
                if _kind_of(strategy) == _kind_of(bucket.strategy):
                    same += max(0, min(extent.stop, its.stop) - max(extent.start, its.start))
    return 1.0 - same / elements if elements else 0.0


def _kind_of(strategy: Strategy) -> tuple[object, ...]:
    return (strategy.compressors, strategy.is_hierarchical)
