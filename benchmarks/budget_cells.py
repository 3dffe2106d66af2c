"""Train one task under one setting: dense, a uniform setting, or plans that are found under an error budget.

    dense              nothing is compressed
    uniform int4       this for all matrices, vectors dense
    found int4         plans of the fewest bytes whose error is that of uniform int4, chosen again after each look

A found plan begins by assumed errors. Every 20 steps at first, and every 50 from step 200 on, all workers look at their
gradients and residuals. The look joins the mean of those before it, and a plan is chosen by it: what a running job
does. Errors are measured on the true gradients of every tenth step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from budget_exchange import PlanExchange, StepError
from budget_tasks import BudgetTask, make_budget_task
from exchanges import MOMENTUM

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ASSUMED, ErrorTable, smoothed
from fxcomp.error_tables.table import LAG
from fxcomp.plan.budget import Budget, ErrorBudget
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Plan
from fxcomp.plan.update_kind import UpdateKind, burst_share
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.choose import choose, uniform
from fxcomp.search.terms import Terms
from fxcomp.search.workload import Gradient, Workload
from fxcomp.step.applied_error import lags

LOOKS = (*range(19, 200, 20), *range(249, 1000, 50))
"""The steps after which workers look at their gradients: a running job looks every 20 steps or more seldom."""
FEW_LOOKS = (249, 499, 749, 999)
"""Of other settings, which do not need them."""
MEASURE_EVERY = 10
SHARE = 0.95
"""Of the budget: what plans may spend, as of a running job."""
DENSE = "dense"
REFERENCES = ("topk(0.01)", "int4", "powersgd(4)")
MODES = ("balanced", "aggressive")
OPTIMIZERS = ("sgd", "adamw")

_FREE = 1e12
BYTES_ALONE = CostTable(roofline=Roofline(_FREE, _FREE, 0.0), pack_gb_per_s=_FREE, launch_us=0.0, error=0.0)
"""Nothing costs but the wire."""
LINK = Link(0.0, 1e-3)
"""No latency, and a byte a microsecond."""


@dataclass(frozen=True)
class Cell:
    """Name one training run: model, optimizer, setting and seed."""

    model: str
    optimizer: str
    setting: str
    seed: int = 0

    @property
    def is_found(self) -> bool:
        return self.setting.startswith("found ")

    @property
    def reference(self) -> str:
        return self.setting.split(" ", 1)[-1]


@dataclass
class Outcome:
    """The result of a cell. A diverged one has no loss."""

    model: str
    optimizer: str
    setting: str
    seed: int
    loss: float | None = None
    error: float = 0.0
    """The mean over sampled steps of the plan's error on the true gradients."""
    error_of_values: float = 0.0
    """The same with all values as one gradient."""
    errors: list[float] = field(default_factory=list[float])
    """By sampled step."""
    error_by_table: float = 0.0
    """The mean over looks of what the table says of the plan in force."""
    limit_by_table: float = 0.0
    """The same of the reference, by the same table."""
    bytes: float = 0.0
    """A rank's in a step, the mean over all steps."""
    bytes_at_end: float = 0.0
    plans: int = 1
    """The number of plans that training followed, one after the other."""
    families: dict[str, float] = field(default_factory=dict[str, float])
    """The share of all values that strategies carried, over all steps."""
    solve_ms: float = 0.0
    """The median processor time of choosing a plan."""
    look_ms: float = 0.0
    """The same of a look of all workers."""
    seconds: float = 0.0
    table: dict[str, object] | None = None
    """At the end, of dense training."""


def minimal_workload(task: BudgetTask, workers: int) -> tuple[Workload, Cluster]:
    """A step of nothing but communication between so many hosts, and the cluster where only bytes cost."""
    gradients = tuple(Gradient(name, shape, 0.0, 0.0) for name, shape in task.shapes.items())
    return Workload(gradients, 0.0), Cluster(workers, 1, intra=LINK, inter=LINK)


def bytes_of(plan: Plan, cluster: Cluster, task: BudgetTask) -> float:
    """The bytes that a rank sends in a step."""
    return sum(
        wire_bytes(part.step.kind, cluster.ranks_at(part.step.level), part.size)
        for bucket in plan.buckets
        for part in sent_by(bucket, cluster, task.shapes)
    )


def update_of(optimizer: str) -> UpdateKind:
    return UpdateKind.SECOND_MOMENT if optimizer == "adamw" else UpdateKind.MOMENTUM


def terms_of(cell: Cell, table: ErrorTable) -> Terms:
    """The terms of a found plan: of any family, and before AdamW with the product's limit on what comes in bursts."""
    bursts = burst_share([update_of(cell.optimizer)])
    return Terms(Mode.AGGRESSIVE, bursts, budget=Budget(ErrorBudget.parse(cell.reference), table), share=SHARE)


def run_cell(cell: Cell) -> Outcome:
    return _Run(cell).outcome()


class _Run:
    """One training."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.named = cell, make_budget_task(cell.model, cell.seed)
        self.workload, self.cluster = minimal_workload(self.named, self.named.task.workers)
        self.exchange, self.table = PlanExchange(self.named, cell.seed), ASSUMED
        self.best, self.lags = ASSUMED, dict[str, float]()
        self.solve_ms, self.look_ms = list[float](), list[float]()
        self.errors, self.by_table = list[StepError](), list[tuple[float, float]]()
        self.bytes, self.carried, self.plans = 0.0, Counter[str](), 1
        self.plan = self._first_plan()
        self.exchange.use(self.plan)

    def outcome(self) -> Outcome:
        begin = time.process_time()
        loss = self._train()
        steps, cell = self.named.task.steps, self.cell
        total = steps * self.named.task.start.numel()
        return Outcome(
            cell.model,
            cell.optimizer,
            cell.setting,
            cell.seed,
            loss=loss if math.isfinite(loss) else None,
            error=statistics.fmean(each.of_plan for each in self.errors),
            error_of_values=statistics.fmean(each.of_values for each in self.errors),
            errors=[round(each.of_plan, 6) for each in self.errors],
            error_by_table=statistics.fmean(each for each, _ in self.by_table) if self.by_table else 0.0,
            limit_by_table=statistics.fmean(each for _, each in self.by_table) if self.by_table else 0.0,
            bytes=self.bytes / steps,
            bytes_at_end=bytes_of(self.plan, self.cluster, self.named),
            plans=self.plans,
            families={name: count / total for name, count in self.carried.most_common()},
            solve_ms=statistics.median(self.solve_ms) if self.solve_ms else 0.0,
            look_ms=statistics.median(self.look_ms) if self.look_ms else 0.0,
            seconds=time.process_time() - begin,
            table=self.table.to_json() if cell.setting == DENSE else None,
        )

    def _first_plan(self) -> Plan:
        if self.cell.is_found:
            return self._solve()
        return uniform(self.cell.reference, self.workload, BYTES_ALONE, self.cluster)

    def _solve(self) -> Plan:
        begin = time.process_time()
        found = choose(self.workload, BYTES_ALONE, self.cluster, terms_of(self.cell, self.table)).plan
        self.solve_ms.append(1e3 * (time.process_time() - begin))
        return found

    def _train(self) -> float:
        task, weights = self.named.task, torch.nn.Parameter(self.named.task.start.clone())
        rate = task.rates[self.cell.optimizer]
        update: torch.optim.Optimizer
        if self.cell.optimizer == "sgd":
            update = torch.optim.SGD([weights], lr=rate, momentum=MOMENTUM)
        else:
            update = torch.optim.AdamW([weights], lr=rate)
        sent, families = bytes_of(self.plan, self.cluster, self.named), families_of(self.plan)
        for step in range(task.steps):
            for group in update.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / task.steps))
            is_look = step in (LOOKS if self.cell.is_found else FEW_LOOKS)
            gradients = task.gradients(weights.detach(), step)
            error: StepError | None = None
            if is_look or step % MEASURE_EVERY == 0:
                weights.grad, error = self.exchange.apply_measured(gradients, keep=is_look)
            else:
                weights.grad = self.exchange.apply(gradients)
            if error is not None and step % MEASURE_EVERY == 0:
                self.errors.append(error)
            if not weights.grad.isfinite().all():
                return math.inf
            update.step()
            self.bytes += sent
            self.carried.update(families)
            if is_look and error is not None and self._look(step, error):
                sent, families = bytes_of(self.plan, self.cluster, self.named), families_of(self.plan)
        loss = task.loss(weights.detach())
        return loss if math.isfinite(loss) else math.inf

    def _look(self, step: int, error: StepError) -> bool:
        """Look at the step's gradients, and choose again where plans are found; tell whether the plan changed.

        What powersgd lost in this step beyond the best matrix of its rank counts from now on, as in a running job.
        """
        begin = time.process_time()
        self.best = smoothed(self.best, self.exchange.look(step))
        self.lags = lags(self.lags, error.of_gradients, self.plan, self.best)
        self.table = self.best.lagging(self.lags, statistics.median(self.lags.values()) if self.lags else LAG)
        self.look_ms.append(1e3 * (time.process_time() - begin))
        asked = ErrorBudget.parse(self.cell.reference if self.cell.setting != DENSE else "lossless")
        limit = asked.limit_of(self.workload.shapes, self.cluster, self.table)
        self.by_table.append((plan_error(self.plan, self.cluster, self.table), limit))
        if not self.cell.is_found:
            return False
        found = self._solve()
        if found == self.plan:
            return False
        self.plan = found
        self.plans += 1
        self.exchange.use(found)
        return True


def families_of(plan: Plan) -> Counter[str]:
    """Count the values that each strategy carries, by the names of its compressors."""
    found = Counter[str]()
    for bucket in plan.buckets:
        found[" > ".join(map(str, bucket.strategy.compressors)) or DENSE] += bucket.elements
    return found
