"""Predict the same plans over other links between hosts: where one overtakes another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import DENSE
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import predict_us

LEAST_GBIT, MOST_GBIT = 1e-3, 1e3
"""The bandwidths between which the break-even is looked for."""

_AROUND = 32.0
"""Curves go so many times below and above the cluster's own bandwidth and the break-even."""
_POINTS_A_DECADE = 6


@dataclass(frozen=True, slots=True)
class OverBandwidth:
    """The predicted steps of several plans, by the bandwidth between hosts."""

    gbit: Sequence[float]
    step_us: Mapping[str, Sequence[float]]
    """For each plan, by its name, the step at each bandwidth."""
    free_us: float
    here_gbit: float
    flip_gbit: float | None
    """The break-even, at which fxcomp would choose otherwise."""


def over_bandwidth(explanation: Explanation) -> OverBandwidth | None:
    """Predict the plans that were compared, by the cluster's links; None where nothing goes between hosts."""
    cluster, plan = explanation.cluster, explanation.plan
    if cluster.hosts == 1 or not plan.buckets:
        return None
    here, flip = 8 * cluster.inter.gb_per_s, explanation.flip_gbit
    ends = [here, *([flip] if flip is not None else [])]
    low, high = max(LEAST_GBIT, min(ends) / _AROUND), min(MOST_GBIT, max(ends) * _AROUND)
    low, high = min(low, here), max(high, here)
    count = max(2, round(_POINTS_A_DECADE * math.log10(high / low)))
    points = sorted({here, *(low * (high / low) ** (k / count) for k in range(count + 1))})
    costs = replace(explanation.costs, collectives={})
    curves = {
        name: [predict_us(explanation.workload, each, costs, cluster.with_inter(gbit / 8)) for gbit in points]
        for name, each in _plans(explanation).items()
    }
    return OverBandwidth(points, curves, explanation.workload.free_us, here, flip)


def _plans(explanation: Explanation) -> dict[str, Plan]:
    """Name the plans: this one, dense, and what might race with them."""
    plan, choice = explanation.plan, explanation.choice
    if choice is None:
        found = {"dense": plan.with_strategies([DENSE] * len(plan.buckets)).at_gradients()}
    else:
        found = {"dense": choice.dense, **{each.name: each.plan for each in choice.runners}}
    name = "chosen" if explanation.is_chosen else "this plan"
    others = {name: each for name, each in found.items() if each != plan}
    return {name: plan, **others}
