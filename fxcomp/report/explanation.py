"""The data of a report.

Every format takes one `Explanation`. A text format arranges the blocks of `sections.report_of(explanation)`, a data
format reads the fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import kernels
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline, critical_path, exposed_by_task, simulate
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.graph.work import NO_UNKNOWNS, Unknowns
from fxcomp.plan.budget import Budget, plan_error
from fxcomp.plan.kinds import Stream
from fxcomp.plan.modes import Mode
from fxcomp.plan.pins import NO_PINS, Pins
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Compress, Strategy
from fxcomp.report.device import DeviceUse
from fxcomp.report.document import Block, Section, Table, count, decimals, ms, short
from fxcomp.report.links import links_in_sources
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import Choice
from fxcomp.search.decision import PlanMove, Raced
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.workload import Workload

_NAMES = {
    # Tasks that the search names propose and decompress are named proposal and mean in graphs.
    "compute": ("region", "arrive", "backward", "update", "finish", "feed", "hand"),
    "compression": ("propose", "proposal", "compress", "next", "decompress", "mean"),
    "exchanges": ("exchange",),  # the loss function's own collectives
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}


def kind_of(task: str) -> str:
    """Return the kind of work of a task on the compute stream; packing includes starting collectives."""
    return _KINDS.get(re.split(r"[ _]", task)[0], "packing")


def bucket_of(task: str) -> int | None:
    """Return the bucket index in a task name: 3 in `all_reduce 3`, `all_gather (2) 3`, `all_gather_3_intra`."""
    match = re.search(r"(?<![A-Za-z\d(])\d+", task)
    return int(match[0]) if match else None


def parts_us(timeline: Timeline) -> dict[str, float]:
    """Split a step, in µs, into compute, packing, compression, the loss function's collectives, contention with the
    network's software, exposed communication, and host time after the end of all other work.
    """
    parts: dict[str, float] = {"compute": 0.0, "packing": 0.0, "compression": 0.0}
    for span in timeline.spans:
        if span.task.stream is Stream.COMPUTE:
            kind = kind_of(span.task.name)
            parts[kind] = parts.get(kind, 0.0) + span.task.duration_us
    slowed_us, host_us = timeline.slowed_us(Stream.COMPUTE), timeline.step_time_us - timeline.done_us
    return {**parts, "contention": slowed_us, "exposed": timeline.exposed_us, "host": host_us}


def exposed_by_bucket(timeline: Timeline) -> dict[int | None, float]:
    """Split the exposed time, in µs, by the awaited bucket; key None is the broadcast of buffers."""
    waits: dict[int | None, float] = {}
    for name, us in exposed_by_task(timeline).items():
        bucket = bucket_of(name)
        waits[bucket] = waits.get(bucket, 0.0) + us
    return waits


def critical_shares(timeline: Timeline) -> list[tuple[str, float]]:
    """Return the critical path as names and µs, with consecutive compute merged by kind."""
    shares: list[tuple[str, float]] = []
    for span in critical_path(timeline):
        name = kind_of(span.task.name) if span.task.stream is Stream.COMPUTE else span.task.name
        us = span.end_us - span.start_us
        if shares and shares[-1][0] == name:
            shares[-1] = (name, shares[-1][1] + us)
        elif us:
            shares.append((name, us))
    return shares


_MOST = 8


def moves_section(moves: Sequence[PlanMove]) -> Section:
    """List the plan's last changes, and the total change of its error and predicted step time."""
    digits = decimals(max(max(move.step_us) for move in moves))
    why = "reason, and changes"
    rows = [
        (
            str(move.step),
            f"{move.error[0]:.3g} → {move.error[1]:.3g}",
            f"{move.limit:.3g}",
            f"{ms(move.step_us[0], digits)} → {ms(move.step_us[1], digits)}",
            f"{move.why}: {'; '.join(move.changes)}",
        )
        for move in moves[-_MOST:]
    ]
    first, last = moves[0], moves[-1]
    blocks: list[Block] = [
        f"{count(len(moves), 'change')} of the plan since training began. The error went from {first.error[0]:.3g} of"
        f" {first.limit:.3g} to {last.error[1]:.3g} of {last.limit:.3g}, the predicted step from"
        f" {ms(first.step_us[0], digits)} to {ms(last.step_us[1], digits)} ms.",
        Table(
            ("step", "error", "allowed", "predicted ms", why),
            rows,
            text=("error", "predicted ms", why),
            optional=("allowed", why),
        ),
    ]
    if len(moves) > len(rows):
        blocks.append(f"and {count(len(moves) - len(rows), 'change')} before these")
    return Section("How the plan moved", blocks)


def moves_json(moves: Sequence[PlanMove]) -> list[dict[str, Any]]:
    return [
        {
            "step": move.step,
            "why": move.why,
            "error": list(move.error),
            "allowed": move.limit,
            "step_ms": [us / 1e3 for us in move.step_us],
            "changes": list(move.changes),
        }
        for move in moves
    ]


_MOST_OPERATORS = 6  # operators listed by name


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, its predicted step, and all other data of a report."""

    plan: Plan
    timeline: Timeline
    workload: Workload
    costs: CostTable
    cluster: Cluster
    choice: Choice | None = None
    """Comparison of plans; None if nothing was compared."""
    mode: str = ""
    flip_gbit: float | None = None
    """Bandwidth between hosts, in Gbit/s, below which the plan compresses; None if the choice never changes."""
    notes: Sequence[str] = ()
    measured_ms: float = math.nan
    exposed_ms: float = math.nan
    """Measured exposed communication, in ms; NaN if unknown."""
    unknowns: Unknowns = NO_UNKNOWNS
    """Operators with unknown or inexact prices."""
    raced: Raced | None = None
    """Last race of the running job."""
    is_racing: bool = False
    """True if plans are racing, and the running steps use this plan."""
    budget: Budget | None = None
    """Error budget that replaces the mode's limit."""
    micro_batches: int = 1
    """Number of micro-batches accumulated per step."""
    moves: Sequence[PlanMove] = ()
    """Changes of the plan since the choice, caused by measured errors."""
    stages: Mapping[int, Plan] = field(default_factory=dict[int, Plan])
    """Plan by first step: the warm-up's plans, then the lasting plan; empty if there is no warm-up."""
    steps: int | None = None
    """Number of steps of the job, if known."""
    device: DeviceUse | None = None
    """Estimated kernels and memory on a named device."""
    measured: Mapping[int, Timeline] = field(default_factory=dict[int, Timeline])
    batch: str = ""
    """Shapes and types of the batch that all times refer to; empty if unknown."""

    @property
    def step_us(self) -> float:
        return self.timeline.step_time_us

    @property
    def dense_timeline(self) -> Timeline | None:
        """Predicted step of the best dense plan; None if this plan is the best dense plan, or nothing was compared."""
        if self.choice is None or self.choice.dense == self.plan:
            return None
        tasks = plan_tasks(self.workload, self.choice.dense, self.costs, self.cluster)
        return simulate(tasks, self.costs.processors)

    @property
    def error(self) -> float:
        if self.choice is not None and self.is_chosen:
            return self.choice.error
        return self.costs.error_of(self.workload.free_us, self.step_us)

    @property
    def is_chosen(self) -> bool:
        """True if the search chose this plan."""
        return self.choice is not None and self.choice.plan == self.plan

    @property
    def has_won(self) -> bool:
        """True if the plan won the last race."""
        return self.raced is not None and not self.is_racing and self.raced.stays.plan == self.plan

    @property
    def has_moved(self) -> bool:
        """True if measured errors have changed the plan since the choice."""
        return bool(self.moves) and not (self.is_chosen or self.has_won or self.is_racing)

    def short(self, strategy: Strategy) -> str:
        """Return a strategy's short name. Without a GPU, devices are called `main` and `pool`."""
        return self.costs.shown(short(strategy))

    @property
    def pins(self) -> Pins:
        return self.choice.pins if self.choice is not None else NO_PINS

    @property
    def errors(self) -> ErrorTable:
        return ASSUMED if self.budget is None else self.budget.table

    @property
    def spent(self) -> float:
        """Relative squared error of the plan."""
        return plan_error(self.plan, self.cluster, self.errors)

    @property
    def allowed(self) -> float | None:
        """Relative squared error that the budget allows; None without a budget."""
        return None if self.budget is None else self.budget.limit(self.workload.shapes, self.cluster)

    @property
    def bound_us(self) -> float | None:
        """Lower bound on the step time of the mode's plans, in µs.

        None under an error budget, for a given plan, and if the plan exchanges momenta.
        """
        if not self.is_chosen or self.mode not in _MODES or self.budget is not None or self.plan.moves_exchange:
            return None
        return bound_us(self.workload, self.costs, self.cluster, _MODES[self.mode], pins=self.pins)

    @property
    def machine(self) -> str:
        return machine_of(self.costs)

    @property
    def compute_source(self) -> str:
        roofline = f"{self.costs.roofline} ({self.costs.roofline.source})"
        measured = self.costs.compute.values()
        if not measured:
            return f"by {roofline}"
        sources = ", ".join(dict.fromkeys(each.source for each in measured))
        return f"{count(len(measured), 'operation')}: {sources}; others by {roofline}"

    def sent_bytes(self, bucket: Bucket) -> float:
        """Return the bytes that one rank sends between hosts, or inside the host if there is one host."""
        sent: dict[bool, float] = {True: 0.0, False: 0.0}
        for part in sent_by(bucket, self.cluster, self.workload.shapes):
            ranks = self.cluster.ranks_at(part.send.level)
            sent[part.send.level is Level.INTRA] += wire_bytes(part.send.kind, ranks, part.size)
        return sent[False] or sent[True]


_MODES = {mode.value: mode for mode in Mode}


def machine_of(costs: CostTable) -> str:
    """Return the machine of a cost table: `NVIDIA H200, torch 2.13, 2026-11-20`."""
    return ", ".join(part for part in (costs.hardware, costs.versions, costs.date) if part)


def sources_of(explanation: Explanation) -> Table:
    costs, plan, unknowns = explanation.costs, explanation.plan, explanation.unknowns
    rows = [("compute", explanation.compute_source)]
    if unknowns.unpriced:
        rows.append(("unpriced", _operators(unknowns.unpriced)))
    if unknowns.by_bytes:
        rows.append(("priced by bytes alone", _operators(unknowns.by_bytes)))
    rows += links_in_sources(plan, explanation.cluster, costs)
    rows += [(f"{kind.value}@{reach}", fit.describe(kind)) for (kind, reach), fit in costs.collectives.items()]
    steps = (step for bucket in plan.buckets for step in bucket.strategy.steps)
    for compressor, device in dict.fromkeys((s.compressor, s.device) for s in steps if isinstance(s, Compress)):
        name = costs.shown(f"{compressor}@{device.value}")
        rows.append((name, costs.compressor_source(compressor, device)))
    if costs.hardware != "unknown":
        rows.append(("machine", explanation.machine))
    rows.append(("kernels", kernels.describe().removeprefix("compression on the CPU: ")))
    return Table((), rows)


def _operators(operators: Sequence[tuple[str, int]]) -> str:
    """Format as `3 calls: mine.scan x 2, mine.log x 1`."""
    shown = ", ".join(f"{name} x {calls}" for name, calls in operators[:_MOST_OPERATORS])
    more = f", and {len(operators) - _MOST_OPERATORS} more" if len(operators) > _MOST_OPERATORS else ""
    return f"{count(sum(calls for _, calls in operators), 'call')}: {shown}{more}"
