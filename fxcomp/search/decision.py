"""Hold what was decided for a step: plain data, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fxcomp.cost.table import CostTable
from fxcomp.plan.plan import Plan
from fxcomp.search.choose import Choice
from fxcomp.search.workload import Workload


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, and what it was decided by."""

    plan: Plan
    costs: CostTable
    workload: Workload
    choice: Choice | None = None
    """The comparison of plans; None where the plan was given."""
    notes: tuple[str, ...] = ()
