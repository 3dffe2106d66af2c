"""Predict a job's step on any cluster from a single process.

    Job, Cluster ─► capture ─► workload ─► dense plan, run here without a network ─► measured workload ─► choose

Compute and compression are measured on this machine. `step_ms` rescales the compute times. With a named device, nothing
runs: a preset's roofline prices compute and compression.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.step_capture import SharedBuffers
from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.structures import flatten
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.codegen.program import Program
from fxcomp.compressors import Compressor
from fxcomp.cost.devices import ERROR, ERROR_OF_TOLD_STEP, preset_named
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import BadOption, Unsupported
from fxcomp.frontends.job import Job
from fxcomp.frontends.start import NOTHING_EXACT, exact_of
from fxcomp.graph.captured import Captured
from fxcomp.graph.exact_type import proof_note
from fxcomp.graph.retarget import on_accelerator
from fxcomp.graph.run_passes import finished
from fxcomp.graph.update_kinds import update_kinds
from fxcomp.graph.work import unknowns
from fxcomp.options import StepOptions
from fxcomp.pipeline import Compiler
from fxcomp.plan.compress import BALANCED, Compress
from fxcomp.plan.error_feedback import burst_share
from fxcomp.plan.given import GivenPlan, is_path, strategy_named
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import check_adds_in_rank_order, foreign_note, plan_as_given, with_ordered_sums
from fxcomp.planning.device_use import device_use
from fxcomp.planning.exchange_point import PointChooser
from fxcomp.planning.measure_machine import machine_costs
from fxcomp.planning.timed_steps import TimedStep, Way, apportion, around_us, feed_costs, measurement
from fxcomp.report.explanation import Explanation
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport
from fxcomp.search.choose import Choice, choose, flip_gbit, uniform
from fxcomp.search.descent.engine import search_notes
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.inputs import Inputs

MEASURING_US, MOST_REPEATS = 200_000.0, 5
"""Time budget for timing a step, in us, and maximum number of steps. At least one step is timed."""


SHORTEST_STEP_MS, LONGEST_STEP_MS = 1e-6, 1e9
"""Bounds of a user-specified step time, in ms (assumed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Assumptions and options of a prediction."""

    compress: Compress = BALANCED
    errors: ErrorTable = ASSUMED
    step_ms: float | None = None
    """Step time without communication, in ms, if known."""
    device: str | None = None
    """Name of the ranks' device, a preset in cost/devices.py; None for this machine."""
    costs: CostTable | None = None
    """Earlier measurements, possibly of another machine."""
    accumulate: int = 1
    """Micro-batches per step."""

    def check(self) -> None:
        if self.accumulate < 1:
            raise BadOption(f"--accumulate is a number of micro-batches, 1 or more; it is {self.accumulate}")
        if self.step_ms is not None and not SHORTEST_STEP_MS <= self.step_ms <= LONGEST_STEP_MS:
            raise BadOption(
                f"--step-ms is how long a step takes without a network, {SHORTEST_STEP_MS:g} to {LONGEST_STEP_MS:g};"
                f" it is {self.step_ms:g}"
            )
        if self.device is not None and self.costs is not None:
            raise BadOption("--device is for ranks without measurements, --costs for measured ones: keep one")

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        return (*self.compress.offered, *_compressors_of(self.compress.plan))

    @property
    def terms(self) -> Terms:
        return Terms.of(self.compress, table=self.errors)


ANYTHING = WhatIf()


def what_if(
    job: Job, cluster: Cluster, question: WhatIf = ANYTHING, tell: Callable[[str], None] = lambda _: None
) -> Explanation:
    """Predict the step of a job, with progress messages to `tell`.

    If a device is named or the costs come from another machine, compute time follows from operation counts and a
    roofline. The job is unchanged, except for fresh optimizer state. Raises BadOption, and
    BadPlan if a given plan does not fit the job.
    """
    question.check()
    with imagining(question.device):
        return _what_if(job if question.device is None else job.bare, cluster, question, tell)


def imagining(device: str | None) -> AbstractContextManager[None]:
    """Emulate a preset's device; without a name, do nothing. Raises BadOption."""
    return nullcontext() if device is None else compat.as_if_on(preset_named(device).facts, Unsupported)


def _what_if(job: Job, cluster: Cluster, question: WhatIf, tell: Callable[[str], None]) -> Explanation:
    compress = _with_plan_read(question.compress)
    question = replace(question, compress=compress)
    compress.pinned.check_model(job.model)
    compress.pinned.check_fits(cluster)
    preset = preset_named(question.device) if question.device is not None else None
    tell("capturing the step")
    training, captured = capture_job(job, question.device)
    options = options_of(job, compress)
    skips = options.skip_nonfinite
    exact = exact_of(compress, captured.graph) if question.accumulate == 1 else NOTHING_EXACT
    compiler = Compiler(
        cluster,
        feedback=compress.feedback,
        skip_nonfinite=skips,
        micro_batches=question.accumulate,
        exact=exact,
        keeps_order=compress.sums == "ranks",
    )
    foreign = foreign_note(question.costs.hardware, training.device) if question.costs is not None else ()
    if preset is not None:
        costs = preset.costs(question.compressors)
        workload = compiler.analyze(captured.graph, costs)
    elif question.costs is not None and foreign:  # of a machine where this job did not run
        costs = replace(question.costs, compute_error=max(question.costs.compute_error, ERROR))
        workload = compiler.analyze(captured.graph, costs)
    else:
        costs = _costs_here(question, training.device, tell)
        tell("measuring the step on this machine")
        costs, workload = measured_here(training, captured, job.batch, costs, compiler)
    factor = 1.0
    if question.step_ms is not None:
        factor = 1e3 * question.step_ms / workload.free_us
        workload = scaled(workload, factor)
        costs = replace(costs, compute_error=min(costs.compute_error, ERROR_OF_TOLD_STEP))
    tell("choosing")
    kinds = update_kinds(captured.graph)
    terms = replace(question.terms, bursts=burst_share(kinds))

    def with_momenta(moved: Collection[str]) -> Workload:
        return scaled(compiler.analyze(captured.graph, costs, moved), factor)

    at_gradients = choose(workload, costs, cluster, terms)
    chooser = PointChooser(options, kinds, costs, cluster, terms)
    choice, workload, said = chooser.choose(at_gradients, workload, with_momenta)
    if compress.sums == "ranks" and compress.plan is None:
        choice = with_ordered_sums(choice, workload, costs, cluster)
    wanted = (
        choice.plan if compress.plan is None else plan_as_given(compress.plan, workload, costs, cluster, compress.point)
    )
    if wanted.buckets:
        wanted.check_covers(workload.sizes, workload.types)
        wanted.check_fits(cluster)
        if compress.sums == "ranks":
            check_adds_in_rank_order(wanted)
    if compress.plan is not None and wanted.moves_exchange and cluster.world_size > 1:
        chooser.options.check_moves(wanted, kinds)
        workload = with_momenta(wanted.moved)
    use = None
    if preset is not None:
        plans = {"the plan": wanted} if wanted == choice.dense else {"the plan": wanted, "dense": choice.dense}
        is_fused = all(owned.options.get("fused") for owned in training.owned)
        use = device_use(compiler, captured, plans, costs, preset, is_fused=is_fused)
    return Explanation(
        plan=wanted,
        choice=choice,
        timeline=simulate(plan_tasks(workload, wanted, costs, cluster), costs.processors),
        workload=workload,
        costs=costs,
        cluster=cluster,
        mode=compress.mode.value,
        flip_gbit=_flip_gbit(workload, costs, cluster, terms, at_gradients),
        notes=(
            *search_notes(),
            *terms.notes(workload, cluster),
            *said,
            *filter(None, [proof_note(captured.graph, exact)]),
            *foreign,
            *_notes(costs, choice.error, cluster, question.step_ms),
        ),
        unknowns=unknowns(captured.graph),
        device=use,
        stages=compress.warmup_for(wanted).stages(wanted) if wanted.moves_exchange else {},
        steps=compress.steps,
        micro_batches=question.accumulate,
        budget=terms.budget,
    )


def options_of(job: Job, compress: Compress) -> StepOptions:
    return StepOptions(
        compress=compress, max_grad_norm=job.max_grad_norm, max_grad_value=job.max_grad_value, scaler=job.scaler
    )


def _costs_here(question: WhatIf, device: torch.device, tell: Callable[[str], None]) -> CostTable:
    if question.costs is not None:
        return with_processors(replace(question.costs, threads=torch.get_num_threads()), device)
    tell("measuring the cost of compression on this machine")
    return with_processors(machine_costs(question.compressors, device), device)


def _flip_gbit(workload: Workload, costs: CostTable, cluster: Cluster, terms: Terms, choice: Choice) -> float | None:
    """Return the bandwidth between hosts, in Gbit/s, above which compression stops paying; None if there is none."""
    if cluster.hosts == 1:
        return None
    return flip_gbit(workload, costs, cluster, terms, choice=None if costs.collectives else choice)


def with_processors(costs: CostTable, device: torch.device) -> CostTable:
    """Return costs in which, on a CPU, compute shares this machine's processors with concurrent work."""
    if device.type != "cpu":
        return costs
    count = compat.processors()
    # compute uses at most its measured threads
    return replace(costs, processors=Processors(count, min(count, torch.get_num_threads())))


def rewritten(job: Job, cluster: Cluster, compress: Compress | None = None, device: str | None = None) -> Program:
    """Return the job's step, planned with assumed costs or a device's preset: the same on every machine.

    Raises BadOption.
    """
    with imagining(device):
        return _rewritten(job if device is None else job.bare, cluster, compress, device)


def _rewritten(job: Job, cluster: Cluster, compress: Compress | None, device: str | None) -> Program:
    compress, costs = _with_plan_read(compress or Compress.of(job.compress)), CostTable()
    if device is not None:
        costs = preset_named(device).costs(WhatIf(compress=compress).compressors)
    compress.pinned.check_model(job.model)
    compress.pinned.check_fits(cluster)
    _, captured = capture_job(job, device)
    options = options_of(job, compress)
    compiler = Compiler(
        cluster,
        feedback=compress.feedback,
        skip_nonfinite=options.skip_nonfinite,
        exact=exact_of(compress, captured.graph),
        keeps_order=compress.sums == "ranks",
    )
    workload = compiler.analyze(captured.graph, costs)
    if cluster.world_size == 1:
        wanted = Plan(())
    elif compress.plan is not None:
        wanted = plan_as_given(compress.plan, workload, costs, cluster, compress.point)
        options.check_moves(wanted, update_kinds(captured.graph))
    else:
        terms = Terms.of(compress)
        chooser = PointChooser(options, update_kinds(captured.graph), costs, cluster, terms)
        at_gradients = choose(workload, costs, cluster, terms)
        choice, *_ = chooser.choose(at_gradients, workload, partial(compiler.analyze, captured.graph, costs))
        is_ordered = compress.sums == "ranks"
        wanted = (with_ordered_sums(choice, workload, costs, cluster) if is_ordered else choice).plan
    return finished(compiler.emit(captured, wanted, costs))


def capture_job(job: Job, device: str | None = None) -> tuple[Training, Captured]:
    """Capture a job's step for this machine, or for the named accelerator."""
    clipped, scaler = (job.max_grad_norm, job.max_grad_value), options_of(job, BALANCED).scaler
    training = Training.of(job.model, job.loss_fn, job.optimizer, *clipped, scaler=scaler)
    with imagining(device):
        captured = capture(training, job.batch)
    SharedBuffers.agree(captured.graph).mark(captured.graph)
    if device is not None:
        on_host = [o.name for o in training.owned if not (o.options.get("fused") or o.options.get("capturable"))]
        captured = on_accelerator(captured, on_host)
    return training, captured


def measured_here(
    training: Training, captured: Captured, batch: Any, costs: CostTable, compiler: Compiler
) -> tuple[CostTable, Workload]:
    """Return the costs and the workload with compute times measured in the dense step.

    The step runs here without a network: its collectives return immediately.
    """
    cluster, device = compiler.cluster, training.device
    workload = compiler.analyze(captured.graph, costs)
    plan = uniform("dense", workload, costs, cluster) if cluster.world_size > 1 else Plan(())
    program = finished(compiler.emit(captured, plan, costs))
    inputs = Inputs(training)
    state = GradientState.fresh(plan, inputs.shapes, Site.imagined(cluster, device), compiler.feedback)
    leaves, guard = flatten(batch)[0], StepGuard(training)

    def feed() -> Sequence[Sequence[Any]]:
        guard.key()
        return inputs.of(program, batch_type(batch)[1], state)

    steps = _timed_on_a_copy(program, inputs.of(program, leaves, state))
    measured = measurement([step for step in steps if step.way is Way.OVERLAPPED])
    node_us = {name: us for step in steps for name, us in step.node_us.items()}
    compute = {
        **costs.compute,
        **apportion(program, measured, node_us, f"measured in the emitted step, {_threads(device)}"),
    }
    pack = measured.pack_gb_per_s or costs.pack_gb_per_s
    host_us = around_us(feed) + measured.between_us
    costs = replace(costs, compute=compute, pack_gb_per_s=pack, **feed_costs(device, host_us))
    return costs, compiler.analyze(captured.graph, costs)


def _timed_on_a_copy(program: Program, arguments: Sequence[Sequence[Any]]) -> list[TimedStep]:
    """Time steps on copies, without a network. Restore random state and tensors outside the model."""
    device = program.captured.device
    copies = [[value.detach().clone() if isinstance(value, Tensor) else value for value in each] for each in arguments]
    outside = [getattr(program.graph, str(node.target)) for node in program.graph.graph.nodes if node.op == "get_attr"]
    before = [(value, value.detach().clone()) for value in outside if isinstance(value, Tensor)]
    runtime, steps, spent_us = _NeverSkips(NullTransport(), device), list[TimedStep](), 0.0
    ways = [Way.ONE_BY_ONE, *[Way.OVERLAPPED] * (MOST_REPEATS + compat.works_later(device))]
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):  # pyright: ignore[reportUnknownMemberType]  # untyped
            for way in ways:
                steps.append(TimedStep(program, runtime, way))
                steps[-1].run(copies)
                compat.synchronize(device)
                spent_us += steps[-1].us or 0.0
                if way is Way.OVERLAPPED and spent_us > MEASURING_US:
                    break
    finally:
        with torch.no_grad():
            for value, was in before:
                value.copy_(was)
        runtime.close()
    return steps


class _NeverSkips(Runtime):
    """Runtime that never skips an update, because a skipped update could not be timed."""

    def all_finite(self, values: Sequence[Tensor]) -> bool:
        super().all_finite(values)
        self.counters.skipped = False
        return True


def _threads(device: torch.device) -> str:
    count = torch.get_num_threads()
    return str(device) if device.type != "cpu" else f"{count} thread{'' if count == 1 else 's'}"


def scaled(workload: Workload, factor: float) -> Workload:

    def times(of: Any, *names: str) -> dict[str, float]:
        return {name: getattr(of, name) * factor for name in names}

    gradients = tuple(
        replace(each, **times(each, "ready_us", "update_us", "own_us", "moved_us")) for each in workload.gradients
    )
    whole = times(workload, "backward_us", "finish_us", "broadcast_ready_us", "buffers_us", "host_us")
    return replace(workload, gradients=gradients, **whole)


def _notes(costs: CostTable, error: float, cluster: Cluster, step_ms: float | None) -> tuple[str, ...]:
    notes: list[str] = []
    if cluster.world_size == 1:
        notes.append("One rank: nothing to communicate.")
    if costs.estimate:
        compute = "compression" if step_ms is not None else "compute and compression"
        notes.append(
            f"An estimate: nothing ran on {costs.hardware}. There {compute} cost as much as its data sheet"
            " predicts, forward and backward as the kernels that Inductor makes; its host is unknown, so nothing is"
            " offloaded to it."
        )
    if step_ms is not None:
        where = "" if costs.estimate else " Compression costs as much as on this machine."
        notes.append(f"Compute is scaled so that a step without communication takes {step_ms:g} ms, as given.{where}")
    elif costs.estimate:
        notes.append("--step-ms with the time of a step there without communication makes it a better one.")
    else:
        notes.append(
            f"The verdict is for compute as fast as this machine's ({costs.hardware}). For ranks of another speed pass"
            " --step-ms with the time of a step there without communication, or --device with their name."
        )
    notes.append(f"The prediction's error of {error:.0%} is assumed: nothing has run on this cluster.")
    return tuple(notes)


def _with_plan_read(compress: Compress) -> Compress:
    given = compress.plan
    if isinstance(given, str | Path) and is_path(given):
        return compress.following(Plan.load(given))
    return compress


def _compressors_of(given: GivenPlan | None) -> tuple[Compressor, ...]:
    if given is None:
        return ()
    strategies = [each.strategy for each in given.buckets] if isinstance(given, Plan) else [strategy_named(str(given))]
    return tuple(dict.fromkeys(compressor for strategy in strategies for compressor in strategy.compressors))
