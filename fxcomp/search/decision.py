"""The decided plan and its inputs: plain data, equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.plan.plan import Plan
from fxcomp.search.choose import Choice, flip_gbit
from fxcomp.search.question import Terms
from fxcomp.search.runners import Runner
from fxcomp.search.workload import Workload

JUDGED_STEPS = 1000
"""Reports give the cost of a race as a fraction of the time of this number of the winner's steps."""


@dataclass(frozen=True, slots=True)
class Raced:
    """A finished race."""

    runners: tuple[Runner, ...]
    """Raced plans in the order of their first steps; the first plan ran before the race."""
    winner: int
    first_step: int
    last_step: int
    """Number of steps done when the race ended."""
    cost_ms: float
    """Time of the race minus the time of the same number of steps under the winner, in ms."""

    @property
    def stays(self) -> Runner:
        return self.runners[self.winner]

    @property
    def when(self) -> str:
        """Steps of the race as text, `steps 2 to 21`, counted from 0."""
        return f"steps {self.first_step} to {self.last_step - 1}"

    @property
    def what(self) -> str:
        """Raced plans as text: `3 plans`, or `2 plans at the momentum`."""
        return f"{len(self.runners)} plans{' at the momentum' if self.stays.plan.moves_exchange else ''}"

    @property
    def share(self) -> float:
        """Cost of the race, divided by the time of 1,000 steps of the winner."""
        ms = self.stays.measured_ms
        return self.cost_ms / (JUDGED_STEPS * ms) if ms else 0.0

    def to_json(self) -> Mapping[str, Any]:
        return {
            "runners": [_as_json(runner) for runner in self.runners],
            "winner": self.stays.name,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "cost_ms": self.cost_ms,
            "share_of_1000_steps": self.share,
        }

    @property
    def verdict(self) -> str:
        """Result as text: `dense stays with 36.1 ms a step; predicted best 37.9, bf16 not timed (predicted 81.2)`."""
        if self.stays.measured_ms is None:
            return f"{self.stays.name} stays, because no step was timed by all ranks"
        others = ", ".join(_with_time(runner) for k, runner in enumerate(self.runners) if k != self.winner)
        why = self.rule_that_decided
        return f"{self.stays.name} stays with {self.stays.measured_ms:.4g} ms a step; {others}{why and f'. {why}'}"

    @property
    def rule_that_decided(self) -> str:
        """Reason why the runner with the lowest time does not stay; empty if it stays."""
        timed = [(runner.measured_ms, runner) for runner in self.runners if runner.measured_ms is not None]
        lowest_ms, lowest = min(timed, key=lambda each: each[0], default=(math.inf, self.stays))
        stays_ms = self.stays.measured_ms
        if stays_ms is None or stays_ms <= lowest_ms:
            return ""
        if not lowest.steps:
            return f"{lowest.name} ran only the first step of a turn, which allocates and does not count"
        return (
            f"{lowest.name} is lower by {1 - lowest_ms / stays_ms:.1%}, less than the steps vary: of plans that the"
            " clock cannot distinguish, the plan that loses least of the gradient stays"
        )

    def __str__(self) -> str:
        return (
            f"raced {self.what} in {self.when}: {self.verdict}. Racing cost {self.cost_ms:.4g} ms,"
            f" {self.share:.1%} of the first thousand steps."
        )


def _as_json(runner: Runner) -> dict[str, Any]:
    return {
        "name": runner.name,
        "plan": runner.plan.digest,
        "predicted_ms": runner.step_us / 1e3,
        "measured_ms": runner.measured_ms,
        "steps": runner.steps,
        "wins": runner.wins,
        "loss": runner.loss,
    }


def _with_time(runner: Runner) -> str:
    if runner.measured_ms is None:
        return f"{runner.name} not timed (predicted {runner.step_us / 1e3:.4g})"
    return f"{runner.name} {runner.measured_ms:.4g}"


@dataclass(frozen=True, slots=True)
class Decision:
    plan: Plan
    costs: CostTable
    workload: Workload
    choice: Choice | None = None
    """Comparison of plans; None if the plan was given."""
    notes: tuple[str, ...] = ()
    is_provisional: bool = False
    """True for the dense plan that runs while steps are timed before the choice."""
    is_remembered: bool = False
    """True if the costs come from an earlier job. The first steps of this job check the costs."""
    _flips: list[float | None] = field(default_factory=list[float | None], init=False, compare=False, repr=False)

    def flip_gbit(self, cluster: Cluster, terms: Terms) -> float | None:
        """Return the cached result of `choose.flip_gbit`; None if there is no choice or only one host."""
        if self.choice is None or cluster.hosts == 1:
            return None
        if not self._flips:
            self._flips.append(flip_gbit(self.workload, self.costs, cluster, terms))
        return self._flips[0]


@dataclass(frozen=True, slots=True)
class PlanMove:
    """A change of the plan during the job, or the decision to keep the plan."""

    step: int
    why: str
    error: tuple[float, float]
    """Relative squared error before and after, both by the compression errors measured until this step."""
    limit: float
    step_us: tuple[float, float]
    """Predicted step time before and after, in µs."""
    changes: tuple[str, ...]
    """Changes as text, `topk(0.01) to topk(0.003) in 4 buckets`; empty if the plan stays."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanMove:
        values: dict[str, Any] = {**data, **{name: tuple(data[name]) for name in ("error", "step_us", "changes")}}
        return cls(**values)

    def __str__(self) -> str:
        if not self.changes:
            return f"step {self.step}: {self.why}; the plan stays, and loses {self.error[0]:.3g} of {self.limit:.3g}"
        return (
            f"step {self.step}: {self.why}. {'; '.join(self.changes)}. Error {self.error[0]:.3g} to {self.error[1]:.3g}"
            f" of {self.limit:.3g}, predicted step {self.step_us[0] / 1e3:.4g} to {self.step_us[1] / 1e3:.4g} ms."
        )
