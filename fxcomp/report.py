"""Explain a step."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline
from fxcomp.search.choose import Choice
from fxcomp.search.workload import Workload
from fxcomp.strategy import Plan


def explain_step(
    *,
    plan: Plan,
    timeline: Timeline,
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    choice: Choice | None,
    notes: Sequence[str],
    measured_ms: float,
    exposed_ms: float,
) -> str:
    return "\n".join([str(cluster), str(plan), str(choice), str(costs), str(workload), *notes, f"{timeline.step_time_us}", f"{measured_ms} {exposed_ms}"])
