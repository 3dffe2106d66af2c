"""Price found plans and uniform settings on the timeline of eight hosts at 1 Gbit/s.

    full gpt      the example's GPT, 14.3 M parameters: its captured step, error rows from its own gradients
    full resnet   a residual network of 101 layers, 25.2 M in 314 tensors: the same
    small ones    the trained tasks: backward makes gradients one after the other, each in proportion to its size
                  (assumed); error rows from dense training

Compute is that of a V100 by its data sheet, or of one thread of this machine, as its processor time was measured.
Only full models are priced on a V100. Compressors cost what they cost there. Both plans are priced by the same table
and costs, which are taken to be exact.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from budget_cells import OPTIMIZERS, REFERENCES, families_of, update_of
from budget_exchange import on_all
from budget_tasks import make_budget_task
from error_tables import residual_network
from optimality_workloads import exact
from torch import Tensor, nn
from torch.nn import functional

from fxcomp.cluster.cluster import Cluster
from fxcomp.commands.demo.gpt import gpt_job
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.devices import preset_named
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ASSUMED, Draw, ErrorTable, measure, smoothed
from fxcomp.frontends.job import Job
from fxcomp.frontends.what_if import capture_job, scaled, with_processors
from fxcomp.pipeline import Compiler
from fxcomp.plan.budget import Budget, ErrorBudget
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.modes import LADDER_COMPRESSORS, Mode
from fxcomp.plan.plan import Plan
from fxcomp.plan.update_kind import burst_share
from fxcomp.planning.measure_machine import machine_costs
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.choose import choose, predict_us, uniform
from fxcomp.search.terms import Terms
from fxcomp.search.workload import Gradient, Workload

HOSTS = Cluster.parse("8x1, intra 12GB/s@5us, inter 1gbit")
DEVICE, HOST = "v100", "one thread"
WORKERS, TRAINED, LOOKS = 4, 20, (9, 14, 19)
EXPOSED = 1.3
"""A uniform setting is exposed if its step is so many times the step without communication."""


@dataclass(frozen=True)
class Priced:
    """One uniform setting and the plan that was found under its error, in one case."""

    model: str
    optimizer: str
    compute: str
    reference: str
    elements: int
    free_ms: float
    """The step without communication."""
    dense_ms: float
    """The best dense plan's."""
    step_ms_uniform: float
    step_ms_found: float
    bytes_uniform: float
    bytes_found: float
    error_uniform: float
    error_found: float
    """Both by the table."""
    limit: float
    is_exposed: bool
    families: dict[str, float]
    solve_ms: float
    table: str
    """The source of the error table."""


@dataclass(frozen=True)
class Case:
    model: str
    compute: str
    workload: Workload
    costs: CostTable
    table: ErrorTable
    source: str


def priced(case: Case, optimizer: str, references: Sequence[str] = REFERENCES) -> Iterator[Priced]:
    """Compare each uniform setting with the plan that is found under its error."""
    workload, costs, shapes = case.workload, case.costs, case.workload.shapes
    for reference in references:
        plan = uniform(reference, workload, costs, HOSTS)
        budget = Budget(ErrorBudget.parse(reference), case.table)
        begin = time.process_time()
        terms = Terms(Mode.AGGRESSIVE, burst_share([update_of(optimizer)]), budget=budget)
        choice = choose(workload, costs, HOSTS, terms)
        solve_ms = 1e3 * (time.process_time() - begin)
        uniform_us, elements = predict_us(workload, plan, costs, HOSTS), sum(workload.sizes.values())
        yield Priced(
            case.model,
            optimizer,
            case.compute,
            reference,
            elements,
            workload.free_us / 1e3,
            choice.dense_us / 1e3,
            uniform_us / 1e3,
            choice.step_us / 1e3,
            _bytes(plan, shapes),
            _bytes(choice.plan, shapes),
            plan_error(plan, HOSTS, case.table),
            plan_error(choice.plan, HOSTS, case.table),
            budget.limit(shapes, HOSTS),
            uniform_us >= EXPOSED * workload.free_us,
            {name: count / elements for name, count in families_of(choice.plan).most_common()},
            solve_ms,
            case.source,
        )


def _bytes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> float:
    return sum(
        wire_bytes(part.step.kind, HOSTS.ranks_at(part.step.level), part.size)
        for bucket in plan.buckets
        for part in sent_by(bucket, HOSTS, shapes)
    )


def cases(tables: Mapping[tuple[str, str], ErrorTable]) -> Iterator[tuple[Case, str]]:
    """All cases with their optimizers; `tables` are those of dense training, by model and optimizer."""
    for (model, optimizer), table in tables.items():
        workload, source = small_workload(model), "dense training of the same model, 4 looks"
        yield Case(model, HOST, workload, host_costs(), table, source), optimizer
    for name, make in FULL.items():
        job = make()
        step_ms, best = trained(job)
        table = best.lagging({})
        _, captured = capture_job(job)
        source = f"gradients of {WORKERS} workers at steps {LOOKS} of training, no residuals"
        for compute, costs in ((DEVICE, device_costs()), (HOST, host_costs())):
            workload = Compiler(HOSTS).analyze(captured.graph, costs)
            if compute == HOST:
                workload = scaled(workload, 1e3 * step_ms / workload.free_us)
            for optimizer in OPTIMIZERS:
                yield Case(name, compute, workload, costs, table, source), optimizer


# Costs


@cache
def host_costs() -> CostTable:
    """This machine's memory and compressors, as measured with one thread."""
    costs = machine_costs(LADDER_COMPRESSORS, torch.device("cpu"))
    return exact(with_processors(costs, torch.device("cpu")))


@cache
def device_costs() -> CostTable:
    return exact(preset_named(DEVICE).costs(LADDER_COMPRESSORS))


def small_workload(model: str) -> Workload:
    """A worker's step of a task, timed by its processor time here."""
    named, times = make_budget_task(model), list[float]()
    for step in range(12):
        begin = time.process_time()
        named.task.gradients(named.task.start, step)
        times.append(1e6 * (time.process_time() - begin) / named.task.workers)
    whole = statistics.median(times)
    elements, before = named.task.start.numel(), 0
    gradients: list[Gradient] = []
    for name, shape in named.shapes.items():
        before += torch.Size(shape).numel()
        ready = whole * (named.forward_share + (1 - named.forward_share) * before / elements)
        update = host_costs().roofline.us(0.0, 20.0 * torch.Size(shape).numel())
        gradients.append(Gradient(name, shape, ready, update))
    return Workload(tuple(gradients), gradients[-1].ready_us)


# Full models


def full_resnet() -> Job:
    """Four images of ten smooth patterns under noise, 64 x 64, a worker."""
    torch.manual_seed(0)
    network = residual_network()
    coarse = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    patterns = functional.interpolate(coarse, size=(64, 64), mode="bicubic", align_corners=True)

    def next_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(1_000_003 * rank + step)
        labels = torch.randint(10, (4,), generator=random)
        return patterns[labels] + torch.randn(4, 3, 64, 64, generator=random), labels

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    return Job(network, loss_fn, optimizer, next_batch(0, 0), next_batch=next_batch)


FULL = {"full gpt": gpt_job, "full resnet": full_resnet}


def trained(job: Job) -> tuple[float, ErrorTable]:
    """Train a little on the mean of all workers at looks, on one worker's gradient else; time a step, and measure."""
    times, table = list[float](), ASSUMED
    for step in range(TRAINED):
        begin = time.process_time()
        of_workers = [_gradients(job, step, worker) for worker in range(WORKERS if step in LOOKS else 1)]
        if step not in LOOKS:
            job.optimizer.step()
            times.append(1e3 * (time.process_time() - begin))
            continue
        table = smoothed(
            table,
            on_all(
                WORKERS,
                lambda worker, add_up, made=of_workers, number=step: measure(
                    made[worker], draw=Draw(worker, number), all_reduce=add_up
                ),
            ),
        )
        for name, parameter in job.model.named_parameters():
            parameter.grad = torch.stack([each[name] for each in of_workers]).mean(dim=0)
        job.optimizer.step()
    return statistics.median(times), table


def _gradients(job: Job, step: int, worker: int) -> dict[str, Tensor]:
    job.optimizer.zero_grad()
    job.loss_fn(job.model, job.batch_at(step, worker)).backward()
    return {name: each.grad.clone() for name, each in job.model.named_parameters() if each.grad is not None}
