"""The data of a report. Every format (terminal, JSON) takes one `Explanation`.

To add a format, write one more file with a function of an `Explanation`. For people, lay out the blocks of
`sections.report_of(explanation)`, which `document.py` defines, as `terminal.py` does; for programs, take the data
itself, as `as_json.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.robust import Distribution, Jitter, draw_steps, jitter_of
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline, simulate
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.graph.work import NO_UNKNOWNS, Unknowns
from fxcomp.plan.budget import Budget
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.modes import Mode
from fxcomp.plan.pins import NO_PINS, Pins
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.report.moves import Moved
from fxcomp.report.quantities import count
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import Choice
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.raced import Raced
from fxcomp.search.workload import Workload


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, its predicted step, and what both were computed from."""

    plan: Plan
    timeline: Timeline
    """The predicted step of the plan."""
    workload: Workload
    costs: CostTable
    cluster: Cluster
    choice: Choice | None = None
    """The comparison that chose a plan; None if nothing was compared."""
    mode: str = ""
    flip_gbit: float | None = None
    """The bandwidth between hosts at which the verdict changes; None if it never does, or nothing was compared."""
    notes: Sequence[str] = ()
    measured_ms: float = math.nan
    exposed_ms: float = math.nan
    """Measured: how long the step stood still for the network."""
    unknowns: Unknowns = NO_UNKNOWNS
    """Operators that the model of compute knows little of."""
    raced: Raced | None = None
    """The last race of plans in the running job."""
    is_racing: bool = False
    """The plan in use is the one whose turn it is."""
    budget: Budget | None = None
    """The limit in the place of the mode's, by the errors that are known now."""
    micro_batches: int = 1
    """The number of micro-batches whose gradients a step sums up."""
    moves: Sequence[Moved] = ()
    """Changes of the plan since, by the gradients."""
    batch: str = ""
    """The type of the batches that every time is of, predicted or measured; empty where it is not known."""

    @property
    def step_us(self) -> float:
        return self.timeline.step_time_us

    @property
    def dense_timeline(self) -> Timeline | None:
        """The predicted step of the best dense plan; None if nothing was compared, or this is that plan."""
        if self.choice is None or self.choice.dense == self.plan:
            return None
        tasks = plan_tasks(self.workload, self.choice.dense, self.costs, self.cluster)
        return simulate(tasks, self.costs.processors)

    @property
    def error(self) -> float:
        """The prediction's own relative error."""
        if self.choice is not None and self.is_chosen:
            return self.choice.error
        return self.costs.error_of(self.workload.free_us, self.step_us)

    @property
    def is_chosen(self) -> bool:
        """The plan is the one that was chosen, and not given or switched to later."""
        return self.choice is not None and self.choice.plan == self.plan

    @property
    def has_won(self) -> bool:
        """The plan is the one that was measured fastest in the running job."""
        return self.raced is not None and not self.is_racing and self.raced.stays.plan == self.plan

    @property
    def has_moved(self) -> bool:
        """The plan is what became of the chosen one while it followed the gradients."""
        return bool(self.moves) and not (self.is_chosen or self.has_won or self.is_racing)

    @property
    def pins(self) -> Pins:
        """Return the pins that were set when the plan was chosen."""
        return self.choice.pins if self.choice is not None else NO_PINS

    @property
    def errors(self) -> ErrorTable:
        """The errors that the plan's is counted in."""
        return ASSUMED if self.budget is None else self.budget.table

    @property
    def spent(self) -> float:
        """The plan's relative squared error."""
        return plan_error(self.plan, self.cluster, self.errors)

    @property
    def allowed(self) -> float | None:
        """The relative squared error that the budget allows; None without one."""
        return None if self.budget is None else self.budget.limit(self.workload.shapes, self.cluster)

    @property
    def bound_us(self) -> float | None:
        """A time that no plan of the mode is predicted to be faster than; None if the plan was not chosen by one."""
        if not self.is_chosen or self.mode not in _MODES or self.budget is not None:
            return None
        return bound_us(self.workload, self.costs, self.cluster, _MODES[self.mode], pins=self.pins)

    @property
    def machine(self) -> str:
        return machine_of(self.costs)

    @property
    def compute_source(self) -> str:
        """The source of compute times, in words."""
        roofline = f"{self.costs.roofline} ({self.costs.roofline.source})"
        measured = self.costs.compute.values()
        if not measured:
            return f"by {roofline}"
        sources = ", ".join(dict.fromkeys(each.source for each in measured))
        return f"{count(len(measured), 'operation')}: {sources}; others by {roofline}"

    def sent_bytes(self, bucket: Bucket) -> float:
        """Bytes of a bucket that one rank sends over the slowest links: between hosts, if there are several."""
        sent: dict[bool, float] = {True: 0.0, False: 0.0}
        for part in sent_by(bucket, self.cluster, self.workload.shapes):
            ranks = self.cluster.ranks_at(part.send.level)
            sent[part.send.level is Level.INTRA] += wire_bytes(part.send.kind, ranks, part.size)
        return sent[False] or sent[True]


_MODES = {mode.value: mode for mode in Mode}


@dataclass(frozen=True, slots=True)
class Variation:
    """The same step when times vary from step to step."""

    jitter: Jitter
    plan: Distribution
    beats_dense: float | None
    """Share of the draws in which the plan is faster; None if nothing was compared, or the plan is the dense one."""


def variation(explanation: Explanation) -> Variation:
    """Draw steps of the plan, and of the best dense plan with the same random factors."""
    costs, choice = explanation.costs, explanation.choice
    jitter = jitter_of(costs, explanation.cluster.world_size)
    drawn = draw_steps([span.task for span in explanation.timeline.spans], jitter, costs.processors)
    if choice is None or choice.dense == explanation.plan:
        return Variation(jitter, drawn, None)
    dense = plan_tasks(explanation.workload, choice.dense, costs, explanation.cluster)
    return Variation(jitter, drawn, drawn.share_faster_than(draw_steps(dense, jitter, costs.processors)))


def machine_of(costs: CostTable) -> str:
    """`NVIDIA H200, torch 2.13, 2026-11-20`: what a table was measured on, and when."""
    return ", ".join(part for part in (costs.hardware, costs.versions, costs.date) if part)
