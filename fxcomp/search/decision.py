"""Hold what was decided for a step: plain data, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    dense: Plan | None = None
    """The best dense plan; None where the plan was given."""
    choice: Choice | None = None
    """The comparison of plans; None where the plan was given."""
    dense_us: float | None = None
    """The limit of a compressed plan: a dense step as measured, else as predicted; None to judge none."""
    mistrusted_us: float | None = None
    """The predicted step of the compressed plan that was chosen, where experience speaks against it."""
    notes: tuple[str, ...] = ()

    def for_dense(self) -> Decision:
        """The same, for the best dense plan."""
        assert self.dense is not None, "only a plan that was chosen is left for another"
        return replace(self, plan=self.dense)


@dataclass(frozen=True, slots=True)
class Experience:
    """Measurements of plans, the same on all ranks."""

    given_up: Plan | None = None
    """The compressed plan that turned out slower than dense."""
    given_up_us: float = 0.0
    """The measured step of that plan."""
    dense_us: float | None = None
    """The measured dense step, where dense is followed now."""
