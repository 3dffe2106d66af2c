"""Choose a plan: which gradients travel together, and how each bucket travels, judged only by the simulated step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate
from fxcomp.plan.given import strategy_named
from fxcomp.plan.modes import Content, Mode, strategies
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.candidates import Candidates, Parts
from fxcomp.search.local_search import CAPS, LocalSearch, leaves_dense
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.workload import Workload

_FLIP_RATIO = 1.2  # where the verdict flips is known to ten percent: predictions are not better


@dataclass(frozen=True, slots=True)
class Alternative:
    """The step if one bucket had another strategy."""

    strategy: Strategy
    step_us: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen plan, and what the others would have cost."""

    plan: Plan
    step_us: float
    dense: Plan
    dense_us: float
    fastest: Plan
    """The plan with the shortest predicted step, chosen or not."""
    fastest_us: float
    bf16_us: float
    """bf16 everywhere."""
    free_us: float
    """No communication at all."""
    error: float
    """The prediction's own relative error, which a gain must exceed."""
    alternatives: tuple[tuple[Alternative, ...], ...]
    """For each bucket of the plan, the other strategies."""

    @property
    def gain(self) -> float:
        """The share of the dense step that the fastest plan saves."""
        return 1.0 - self.fastest_us / self.dense_us if self.dense_us > 0 else 0.0

    @property
    def reason(self) -> str:
        if self.fastest.is_dense:
            return "no compressed plan is predicted to be faster than the best dense one"
        verdict = "stays dense" if self.plan.is_dense else "leaves dense"
        sign = "is not above" if self.plan.is_dense else "is above"
        return f"{verdict}: the predicted gain of {self.gain:.1%} {sign} the prediction's error of {self.error:.1%}"

    def to_json(self) -> dict[str, Any]:
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        plans = {name: value.to_json() for name, value in facts.items() if isinstance(value, Plan)}
        others = [[[str(each.strategy), each.step_us] for each in bucket] for bucket in self.alternatives]
        return {**facts, **plans, "alternatives": others}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        """Build one from `to_json`'s data."""
        plans = {name: Plan.from_json(data[name]) for name in ("plan", "dense", "fastest")}
        others = tuple(
            tuple(Alternative(Strategy.parse(text), us) for text, us in bucket) for bucket in data["alternatives"]
        )
        values: dict[str, Any] = {**data, **plans, "alternatives": others}
        return cls(**values)

    def __str__(self) -> str:
        steps = {
            "chosen": self.step_us,
            "dense": self.dense_us,
            "bf16 everywhere": self.bf16_us,
            "no communication": self.free_us,
        }
        lines = [f"{name:<17}{us / 1e3:10.3f} ms" for name, us in steps.items()]
        return "\n".join([*lines, self.reason, str(self.plan)])


def choose(workload: Workload, costs: CostTable, cluster: Cluster, mode: Mode, *, bursts: float = 1.0) -> Choice:
    """Choose a plan, with the reasons. At most the share `bursts` of all elements may come in bursts."""
    # Vectors apart, and with matrices: where latency rules, one bucket less is worth more than their precision.
    found = [
        _Best.of(Candidates(workload, costs, cluster, mode, bursts=bursts, mixed=mixed))
        for mixed in ((False, True) if _has_both(workload) else (False,))
    ]
    least_dense = min(found, key=lambda best: best.dense_us)
    least = min(found, key=lambda best: best.fastest_us)
    error = costs.error_of(workload.free_us, least_dense.dense_us)
    is_worth_it = leaves_dense(least_dense.dense_us, least.fastest_us, error)
    chosen = least if is_worth_it else least_dense
    plans, parts = chosen.plans, chosen.fastest if is_worth_it else chosen.dense
    return Choice(
        plan=plans.plan(parts),
        step_us=chosen.fastest_us if is_worth_it else chosen.dense_us,
        dense=least_dense.plans.plan(least_dense.dense),
        dense_us=least_dense.dense_us,
        fastest=least.plans.plan(least.fastest),
        fastest_us=least.fastest_us,
        bf16_us=predict_us(workload, uniform("bf16", workload, costs, cluster), costs, cluster),
        free_us=workload.free_us,
        error=error,
        alternatives=_alternatives(plans, parts),
    )


@dataclass(frozen=True, slots=True)
class _Best:
    """The best plans of one way to group gradients."""

    plans: Candidates
    dense: Parts
    dense_us: float
    fastest: Parts
    fastest_us: float

    @classmethod
    def of(cls, plans: Candidates) -> _Best:
        search = LocalSearch(plans)
        dense, dense_us = search.best_dense()
        return cls(plans, dense, dense_us, *search.best(dense))


def _has_both(workload: Workload) -> bool:
    return len({gradient.is_vector for gradient in workload.gradients}) == 2


def _alternatives(plans: Candidates, parts: Parts) -> tuple[tuple[Alternative, ...], ...]:
    """Give one bucket at a time every other strategy, all else the same."""
    return tuple(
        tuple(
            Alternative(plans.strategy(other), plans.step_us((*parts[:k], other, *parts[k + 1 :])))
            for other in plans.other_strategies(part)
        )
        for k, part in enumerate(parts)
    )


def predict_us(workload: Workload, plan: Plan, costs: CostTable, cluster: Cluster) -> float:
    """Predict the step of any plan."""
    return simulate(plan_tasks(workload, plan, costs, cluster), costs.processors).step_time_us


def uniform(name: str, workload: Workload, costs: CostTable, cluster: Cluster) -> Plan:
    """Make a plan of one compressor or strategy everywhere (`dense`, `bf16`, `int8`, ...), in buckets of the best size.

    A compressor goes over all ranks in one shot. Vectors stay dense where balanced mode would not compress them.
    """
    strategy = strategy_named(name)
    gentle = strategies(Mode.BALANCED, cluster, Content.VECTORS)
    vector = strategy if strategy in gentle else strategy.uncompressed
    choices = {Content.MATRICES: (strategy,), Content.VECTORS: (vector,)}
    plans = Candidates(workload, costs, cluster, Mode.LOSSLESS, choices)
    search = LocalSearch(plans)
    return plans.plan(min((search.start(cap, 0) for cap in CAPS), key=plans.step_us))


def flip_gbit(
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    mode: Mode,
    *,
    bursts: float = 1.0,
    choice: Choice | None = None,
) -> float | None:
    """Find the bandwidth between hosts, in Gbit/s, above which the plan is dense and below which it is not.

    None if the verdict is the same from 1 Mbit/s to 1 Tbit/s. By the cluster's links, not what was measured live.
    Plans are compared as the search starts from them, not improved one by one: within 17 % of where whole searches flip
    (measured on nine pairs of job and cluster, the median 8 %). `choice`, the verdict on this cluster by its links,
    is never contradicted.
    """
    costs = costs.without_collectives()

    def is_dense(gbit: float) -> bool:
        plans = Candidates(workload, costs, cluster.with_inter(gbit / 8), mode, bursts=bursts)
        return LocalSearch(plans).stays_dense()

    low, high = 1e-3, 1e3
    here = 8 * cluster.inter.gb_per_s
    if choice is not None and low < here < high:
        low, high = (low, here) if choice.plan.is_dense else (here, high)
    if (choice is None or high == here) and is_dense(low):
        return None
    if (choice is None or low == here) and not is_dense(high):
        return None
    while high / low > _FLIP_RATIO:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_dense(middle) else (middle, high)
    return math.sqrt(low * high)
