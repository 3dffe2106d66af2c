"""The compiler's table of contents: from the user's model, loss and optimizer to a compiled step.

capture ─► analyze ─► workload ─► choose ─► plan ─► rewrite ─► emit ─► load ─► CompiledStep
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule

from fxcomp.capture.shared_buffers import SharedBuffers, check_parameters_are_read
from fxcomp.capture.training import LossFn, Training
from fxcomp.capture.whole_step import capture_again, capture_first, facts_to_agree_on
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.processors import UNSHARED, Processors
from fxcomp.codegen.program import Program, Replay, load_program
from fxcomp.compressors import parse_compressor
from fxcomp.cost.contention import Contention
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate
from fxcomp.errors import BadOption, BadPlan
from fxcomp.graph.captured import Captured
from fxcomp.graph.check import check
from fxcomp.graph.edit import clone
from fxcomp.graph.work import unknowns
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.passes.assign_streams import assign_streams
from fxcomp.passes.broadcast_buffers import broadcast_buffers
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.commit_if_finite import commit_if_finite
from fxcomp.passes.correct_momentum import correct_momentum
from fxcomp.passes.insert_compression import insert_compression
from fxcomp.passes.label_gradients import label_gradients
from fxcomp.passes.order_for_overlap import order_for_overlap
from fxcomp.passes.remove_dead_nodes import remove_dead_nodes
from fxcomp.passes.split_by_level import split_by_level
from fxcomp.passes.thread_state import thread_state
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.error_budget import POLLUTING_SHARE
from fxcomp.plan.error_feedback import (
    CLASSIC,
    ErrorFeedback,
    check_experiment,
    check_is_feedback,
    check_momentum,
    check_plan,
    is_adaptive,
)
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Device
from fxcomp.plan.verified_steps import SAMPLED, VerifiedSteps
from fxcomp.planning.gather_costs import gathered_costs
from fxcomp.planning.measure_contention import as_slowest, contention_of, networks
from fxcomp.planning.measure_machine import hardware
from fxcomp.planning.measure_step import StepMeasurement, apportion, measure_step
from fxcomp.ranks import Ranks
from fxcomp.report.terminal import explain_step
from fxcomp.runtime.clock import clock_of
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.state import BucketLayout, CompressorStates, Residuals, StateLayout, Velocities
from fxcomp.runtime.transport import Transport
from fxcomp.search.choose import Choice, choose, flip_gbit, predict_us, uniform
from fxcomp.search.graph_tasks import graph_tasks
from fxcomp.search.read_workload import read_workload
from fxcomp.search.workload import Workload
from fxcomp.step.compiled_step import CompiledStep, Following, GivenUp, Replanned
from fxcomp.step.drift.watch import Replan, Schedule, Watch

P = ParamSpec("P")


# The compiler


def analyze(graph: GraphModule, costs: CostTable, cluster: Cluster, *, skip_nonfinite: bool = False) -> Workload:
    """What there is to decide about."""
    run = PassRunner(remembers=False)
    gm = run(annotate_costs, labelled(run, clone(graph), cluster), costs, cluster)
    assert_whole(gm, "analyze")
    workload = read_workload(gm)
    if not skip_nonfinite:
        return workload
    look_us = costs.pack_us(workload.dense_bytes) / 2  # as annotate_costs prices it
    return replace(workload, commits=True, finish_us=workload.finish_us + look_us)


def rewrite(
    captured: Captured,
    plan: Plan,
    costs: CostTable,
    cluster: Cluster,
    rank: int,
    feedback: ErrorFeedback = CLASSIC,
    *,
    skip_nonfinite: bool = False,
) -> Program:
    """Turn a captured step into the source of one that follows the plan."""

    def followed(run: PassRunner) -> GraphModule:
        return follow(run, plan, captured.graph, costs, cluster, rank, feedback, skip_nonfinite=skip_nonfinite)

    def replay() -> Mapping[str, GraphModule]:
        run = PassRunner()
        followed(run)
        return run.history

    return finish(captured, followed(PassRunner(remembers=False)), replay, costs.processors)


def follow(
    run: PassRunner,
    plan: Plan,
    graph: GraphModule,
    costs: CostTable,
    cluster: Cluster,
    rank: int,
    feedback: ErrorFeedback = CLASSIC,
    *,
    skip_nonfinite: bool = False,
) -> GraphModule:
    """Rewrite a copy of a graph of gradients until it follows the plan."""
    gm = labelled(run, clone(graph), cluster)
    gm = carry_out(run, plan, gm, costs, cluster, rank, feedback, skip_nonfinite=skip_nonfinite)
    assert_whole(gm, "one of the passes")
    return gm


def labelled(run: PassRunner, graph: GraphModule, cluster: Cluster) -> GraphModule:
    """What every plan starts from: each gradient has its collective, and each node its role."""
    gm = run(canonicalize_sync, graph, cluster.world_size)
    gm = run(broadcast_buffers, gm, cluster.world_size)
    return run(label_gradients, gm)


def carry_out(
    run: PassRunner,
    plan: Plan,
    gm: GraphModule,
    costs: CostTable,
    cluster: Cluster,
    rank: int,
    feedback: ErrorFeedback = CLASSIC,
    *,
    skip_nonfinite: bool = False,
) -> GraphModule:
    """Rewrite a labelled graph until it follows the plan."""
    gm = run(bucket_gradients, gm, plan)
    gm = run(split_by_level, gm, plan, cluster)
    gm = run(insert_compression, gm, plan, cluster, cluster.local_rank(rank))
    gm = run(thread_state, gm, feedback.surrounds)
    gm = run(correct_momentum, gm, feedback.momentum)
    gm = run(remove_dead_nodes, gm)
    gm = run(commit_if_finite, gm, skip_nonfinite)
    gm = run(annotate_costs, gm, costs, cluster)
    gm = run(assign_streams, gm, cluster)
    return run(order_for_overlap, gm, plan)


def finish(captured: Captured, gm: GraphModule, replay: Replay, processors: Processors = UNSHARED) -> Program:
    """Emit and load a final graph, whoever made it: the graph alone decides what runs."""
    return load_program(captured, gm, replay, simulate(graph_tasks(gm), processors))


class PassRunner:
    """Runs each pass, checks what must hold after it, and remembers the result, each on a copy of the one before.

    `remembers=False` changes the one graph that it is given and leaves checking to its caller, which takes a third of
    the time.
    """

    def __init__(self, *, remembers: bool = True) -> None:
        self.remembers = remembers
        self.history: dict[str, GraphModule] = {}

    def __call__(
        self,
        pass_: Callable[Concatenate[GraphModule, P], GraphModule],
        gm: GraphModule,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GraphModule:
        result = pass_(clone(gm) if self.remembers else gm, *args, **kwargs)
        if self.remembers:
            assert_whole(result, pass_.__name__)
            self.history[pass_.__name__] = result
        return result


def assert_whole(gm: GraphModule, made_by: str) -> None:
    """What must hold of every graph that a pass returns."""
    gm.graph.lint()
    violations = check(gm)
    assert not violations, f"{made_by} broke the graph: " + "; ".join(map(str, violations))


# The entry


@torch.inference_mode(False)  # what is made inside it, residuals too, could not be trained any more
def compile_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    example_batch: Any,
    *,
    cluster: Cluster | None = None,
    costs: CostTable | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    mode: str = "balanced",
    error_feedback: ErrorFeedback = CLASSIC,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
    verify_every: int | str = SAMPLED,
    replan: str = "offer",
) -> CompiledStep:
    """Compile a data-parallel training step; every rank of the process group calls this with the same arguments.

    `loss_fn(model, batch)` returns the scalar loss, or `(loss, aux)`; a batch is any pytree of tensors. The returned
    step is called with a batch, updates the model and the optimizer in place, and returns what `loss_fn` does.
    Gradients are averaged over all ranks as DistributedDataParallel does it; parameters and buffers start as rank 0's.

    `cluster` says which rank sits where and what links cost; without it, hosts are told by name and links are measured.
    `costs` replaces all measuring: a CostTable, or the path of a saved one, which rank 0 reads for all. `plan` replaces
    the choice: a Plan, the path of a saved one, or one compressor for all matrices (`dense`, `bf16`, `int8`, `sign`,
    `topk(0.01)`; biases and norms then stay dense). `mode` bounds what may be lost: `lossless`, `balanced`,
    `aggressive`. `error_feedback` has the variants of error feedback, and warm-up. `max_grad_norm` clips the averaged
    gradients by their global norm. `skip_nonfinite` leaves a step out, on all ranks, where any rank's gradient is not
    finite: parameters and the optimizer's state stay as they were, and residuals up to one rounding; all updates wait
    for the last bucket. `verify_every` says which steps are compared with eager PyTorch, loss, gradients and update:
    `sampled` (2, 5, 10, 20, 50 and so on), every N-th, or `never`. `replan` says what happens when the running step
    shows that a cost is wrong: `offer` (the report says so, and `step.replan()` plans anew), `auto` (all ranks plan
    anew at the same step), `off` (nothing is timed).

    Raises FxcompError's subclasses, each naming what is wrong and what to do. Where it fails on one rank, it
    fails on all.
    """
    given = Given(
        cluster=cluster, costs=costs, plan=plan, mode=mode, error_feedback=error_feedback, max_grad_norm=max_grad_norm,
        skip_nonfinite=skip_nonfinite, verify_every=verify_every, replan=replan,
    )  # fmt: skip
    with Ranks.meeting(cluster, "compile_step") as ranks:
        return _compile(ranks, model, loss_fn, optimizer, example_batch, given)


@dataclass(frozen=True, slots=True)
class Given:
    """The options of compile_step as the user gave them."""

    cluster: Cluster | None
    costs: CostTable | str | Path | None
    plan: Plan | str | Path | None
    mode: str
    error_feedback: ErrorFeedback
    max_grad_norm: float | None
    skip_nonfinite: bool
    verify_every: int | str
    replan: str


def _compile(
    ranks: Ranks,
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    example_batch: Any,
    given: Given,
) -> CompiledStep:
    """Compile a step, with all ranks at once."""
    cluster, costs, plan, mode, replan = given.cluster, given.costs, given.plan, given.mode, given.replan
    error_feedback, skip_nonfinite = given.error_feedback, given.skip_nonfinite
    max_grad_norm, verify_every = given.max_grad_norm, given.verify_every

    def checked() -> tuple[Mode, str]:
        check_is_feedback(error_feedback)
        _check_is_plan(plan)
        _check_is_costs(costs)
        check_experiment(error_feedback, planned=plan is not None)
        check_momentum(error_feedback, optimizer, clips=max_grad_norm is not None, alone=ranks.world_size == 1)
        why_not = _why_no_replanning(
            planned=plan is not None, feedback=error_feedback, verified=VerifiedSteps.parse(verify_every)
        )
        _check_replan(replan, why_not)
        return _checked_mode(mode, max_grad_norm), why_not

    chosen_mode, why_not = ranks.attempt("checking options", checked)

    def captured_first() -> tuple[Training, Captured]:
        training, captured = capture_first(model, loss_fn, optimizer, example_batch, max_grad_norm)
        if ranks.world_size > 1:
            check_parameters_are_read(captured.graph)
        return training, captured

    training, captured = ranks.attempt("capturing the step", captured_first)
    asked: dict[str, Any] = {
        "mode": mode,
        "verify_every": verify_every,
        "cluster": str(cluster),
        "error_feedback": str(error_feedback),
        "skip_nonfinite": skip_nonfinite,
        "replan": replan,
    }
    asked |= {"the plan": _asked_plan(plan), "how costs are given": _asked_costs(costs)}
    ranks.check_same("comparing models", facts_to_agree_on(training, captured) | asked)
    shared_buffers = SharedBuffers.agree(captured.graph, ranks)
    shared_buffers.mark(captured.graph)
    table = given_costs(costs, ranks)
    cluster = ranks.cluster_of(cluster)
    transport = ranks.transport(cluster)
    ranks.share(itertools.chain(model.parameters(), model.buffers()))
    device = training.device

    def emitted(captured: Captured, plan: Plan, costs: CostTable) -> Program:
        return rewrite(captured, plan, costs, cluster, ranks.rank, error_feedback, skip_nonfinite=skip_nonfinite)

    def build(batch: Any, plan: Plan, varying: Mapping[int, frozenset[int]]) -> Program:
        check_momentum(error_feedback, optimizer)
        again = capture_again(training, batch, varying, captured)
        if ranks.world_size > 1:
            check_parameters_are_read(again.graph)
            shared_buffers.mark(again.graph)
        return emitted(again, plan, decided.costs)

    def fresh_velocities(plan: Plan) -> Velocities:
        return Velocities(velocity_layout(plan, cluster, ranks.rank), device)

    velocities_of = fresh_velocities if error_feedback.momentum else None
    decided = _decide(
        captured, training, example_batch, cluster, ranks, transport, device, mode=chosen_mode, costs=table, plan=plan,
        skip_nonfinite=skip_nonfinite, feedback=error_feedback, velocities_of=velocities_of,
    )  # fmt: skip
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_plan(error_feedback, decided.plan, shapes, cluster, optimizer)
    groups = ranks.extend(transport, decided.plan)
    seed = ranks.from_rank_0("the seed of random compressors", torch.initial_seed)

    @cache  # a second or so, when somebody asks for the report
    def flips() -> float | None:
        asked = decided.choice is not None and cluster.hosts > 1
        return (
            flip_gbit(decided.workload, decided.costs, cluster, chosen_mode, bursts=bursts_of(optimizer))
            if asked
            else None
        )

    def decide_again(table: CostTable, given_up: GivenUp | None, topic: str) -> Replanned:
        """Every rank gets as far as the others, or all of them raise and go on with the plan that they have."""
        nonlocal decided

        def analyzed() -> Workload:
            return workload_of(captured, table, cluster, skip_nonfinite, error_feedback)

        workload = ranks.attempt(f"{topic}: reading the costs", analyzed)
        again = decide_best(chosen_mode, workload, table, cluster, ranks, bursts_of(optimizer), topic=topic)
        choice = again.choice
        assert choice is not None, "what is chosen has been compared"
        trusted = ranks.from_rank_0(
            f"{topic}: trusting it", lambda: is_trusted(choice, given_up, again.workload, again.costs, cluster)
        )
        chosen = again.plan if trusted else choice.dense

        def made() -> Replanned:
            return Replanned(
                chosen, again.costs, choice.dense, choice.dense_us, emitted(captured, chosen, again.costs),
                Residuals(residual_layout(chosen, cluster, ranks.rank, error_feedback), device),
                CompressorStates(state_layout(chosen, shapes, cluster, ranks.rank), device, seed),
                None if trusted else choice.step_us,
            )  # fmt: skip

        new = ranks.attempt(f"{topic}: emitting the step", made)
        decided = replace(again, plan=chosen, dense=decided.dense, notes=decided.notes)
        flips.cache_clear()
        return new

    step_us = ranks.from_rank_0(
        "how long a step is", lambda: predict_us(decided.workload, decided.plan, decided.costs, cluster)
    )
    following = Following(
        Watch(Schedule.of(step_us, verify_every), clock_of(device)), Replan.parse(replan), cluster,
        lambda plan: emitted(captured, plan, decided.costs), None if why_not else decide_again, why_not,
    )  # fmt: skip
    # A given plan without costs was not judged by anything that could turn out wrong.
    is_watched = replan != Replan.OFF.value and ranks.world_size > 1 and (plan is None or costs is not None)
    unseen = (EVERY_STEP_VERIFIED,) if ranks.world_size > 1 and VerifiedSteps.parse(verify_every).is_all else ()

    step = CompiledStep(
        training,
        decided.plan,
        build,
        Runtime(groups, device),
        Residuals(residual_layout(decided.plan, cluster, ranks.rank, error_feedback), device),
        CompressorStates(state_layout(decided.plan, shapes, cluster, ranks.rank), device, seed),
        velocities_of=velocities_of,
        feedback=error_feedback,
        ranks=ranks,
        verify_every=verify_every,
        dense_ms=decided.dense.step_us / 1e3 if decided.dense else None,
        dense_plan=decided.choice.dense if decided.choice else None,
        predicted_free_ms=decided.workload.free_us / 1e3,
        costs=decided.costs,
        following=following if is_watched else None,
        report=lambda step: explain_step(
            plan=step.plan, timeline=step.timeline, workload=decided.workload, costs=decided.costs, cluster=cluster,
            choice=decided.choice, mode=mode, flip_gbit=flips(),
            notes=(*decided.notes, *foreign_note(decided.costs, device), *unseen, *step.notes, *step.counted_notes),
            measured_ms=step.step_ms, exposed_ms=step.exposed_ms, unknowns=unknowns(captured.graph),
        ),
    )  # fmt: skip
    for number, stage in enumerate(step.stages):
        step.adopt(example_batch, emitted(captured, stage.plan, decided.costs), number)
    step.agree_on_watching("watching")
    return step


EVERY_STEP_VERIFIED = (
    "every step is verified, so none is timed (verify_every=1): what turns out slower than predicted, or than dense,"
    " is not noticed"
)


# Deciding


@dataclass(frozen=True, slots=True)
class Decided:
    """What rank 0 decided and all ranks follow."""

    plan: Plan
    costs: CostTable
    workload: Workload
    choice: Choice | None = None
    dense: StepMeasurement | None = None
    notes: tuple[str, ...] = ()


def _decide(
    captured: Captured,
    training: Training,
    batch: Any,
    cluster: Cluster,
    ranks: Ranks,
    transport: Transport,
    device: torch.device,
    *,
    mode: Mode,
    costs: CostTable | None,
    plan: Plan | str | Path | None,
    skip_nonfinite: bool,
    feedback: ErrorFeedback,
    velocities_of: Callable[[Plan], Velocities] | None,
) -> Decided:
    def analyzed(table: CostTable) -> Workload:
        return workload_of(captured, table, cluster, skip_nonfinite, feedback)

    if cluster.world_size == 1:
        table = costs or CostTable()
        return Decided(Plan(()), table, analyzed(table), notes=("one rank: nothing to communicate",))
    if plan is not None:
        table = costs or CostTable()
        return decide_as_told(plan, analyzed(table), table, cluster, ranks)

    dense: StepMeasurement | None = None
    if costs is None:
        costs = gathered_costs(ranks, cluster, transport, device)
        costs, dense = _measured_on_job(
            captured,
            training,
            batch,
            costs,
            cluster,
            ranks,
            transport,
            skip_nonfinite=skip_nonfinite,
            feedback=feedback,
            velocities_of=velocities_of,
        )
    bursts = bursts_of(training.optimizer)
    return replace(decide_best(mode, analyzed(costs), costs, cluster, ranks, bursts), dense=dense)


def workload_of(
    captured: Captured, costs: CostTable, cluster: Cluster, skip_nonfinite: bool, feedback: ErrorFeedback
) -> Workload:
    """What there is to decide about, by a cost table."""
    workload = analyze(captured.graph, costs, cluster, skip_nonfinite=skip_nonfinite)
    return replace(workload, keeps_velocity=feedback.momentum > 0)


def given_costs(costs: CostTable | str | Path | None, ranks: Ranks) -> CostTable | None:
    """The costs that the user gave, if any. A saved table may lie on rank 0's machine alone."""
    if isinstance(costs, str | Path):
        path = costs
        costs = CostTable.from_json(ranks.from_rank_0("the costs", lambda: CostTable.read(path).to_json()))
    return costs and replace(costs, threads=torch.get_num_threads())


def _asked_costs(costs: CostTable | str | Path | None) -> str | None:
    """What ranks must agree on before they read costs. Whose numbers are taken is rank 0's choice."""
    if costs is None:
        return None
    return "a table" if isinstance(costs, CostTable) else "a file"


def foreign_note(costs: CostTable, device: torch.device) -> tuple[str, ...]:
    """What a report says of a table that was measured on another machine; the number of threads makes none."""
    here = hardware(device)
    if machine_of(costs.hardware) in (machine_of(here), CostTable().hardware):
        return ()
    return (f"The costs were measured on another machine: {costs.hardware}. This one is {here}.",)


def machine_of(hardware: str) -> str:
    """The hardware without its threads: under torchrun a process has one, asked about by itself it has more."""
    return re.sub(r", \d+ threads?$", "", hardware)


def bursts_of(optimizer: torch.optim.Optimizer) -> float:
    """What part of all elements may come in bursts."""
    return POLLUTING_SHARE if is_adaptive(optimizer) else 1.0


def decide_as_told(
    plan: Plan | str | Path, workload: Workload, costs: CostTable, cluster: Cluster, ranks: Ranks
) -> Decided:
    """Follow the plan that all ranks were given. A saved one may lie on rank 0's machine alone."""
    data = ranks.from_rank_0("the plan", lambda: given_plan(plan, workload, costs, cluster).to_json())
    followed = Plan.from_json(data)

    def mine() -> Plan:
        # A text is the same on all ranks by now. What it stands for follows from costs, which are each rank's own.
        if isinstance(plan, Plan):
            return plan
        return Plan.load(plan) if _is_path(plan) and Path(plan).exists() else followed

    ranks.check_same("comparing plans", ranks.attempt("reading the plan", lambda: _facts_of_plan(mine())))
    followed.check_covers(workload.sizes)
    followed.check_fits(cluster)
    return Decided(followed, costs, workload, notes=("the plan was given, not chosen",))


def decide_best(
    mode: Mode,
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    ranks: Ranks,
    bursts: float = 1.0,
    *,
    topic: str = "the plan",
) -> Decided:
    """Choose on rank 0, by its workload and costs, and follow on all; each time for a topic of its own."""
    choices: list[Choice] = []

    def decide() -> dict[str, Any]:
        choices.append(choose(workload, costs, cluster, mode, bursts=bursts))
        return {
            "plan": choices[0].plan.to_json(),
            "dense": choices[0].dense.to_json(),
            "costs": costs.to_json(),
            "workload": workload.to_json(),
        }

    data = ranks.from_rank_0(topic, decide)
    costs, workload = CostTable.from_json(data["costs"]), Workload.from_json(data["workload"])

    def compared() -> Choice:
        return choices[0] if choices else choose(workload, costs, cluster, mode, bursts=bursts)

    choice = ranks.attempt(f"{topic}: comparing it", compared)
    choice = replace(choice, plan=Plan.from_json(data["plan"]), dense=Plan.from_json(data["dense"]))
    return Decided(choice.plan, costs, workload, choice)


def is_trusted(
    choice: Choice, given_up: GivenUp | None, workload: Workload, costs: CostTable, cluster: Cluster
) -> bool:
    """Whether a chosen plan is still the better one after what was measured of the last one that was given up.

    By how much that took longer than it is predicted now, any compressed plan is expected to (assumed: what is not
    understood of one concerns the others too), and dense takes what has just been measured of it. So the plan that was
    given up is not chosen again by what was predicted of it before.
    """
    if given_up is None or choice.plan.is_dense:
        return True
    slower = max(1.0, given_up.step_us / predict_us(workload, given_up.plan, costs, cluster))
    return choice.step_us * slower < (given_up.dense_us or choice.dense_us)


def given_plan(plan: Plan | str | Path, workload: Workload, costs: CostTable, cluster: Cluster) -> Plan:
    """A plan as the user named it."""
    if isinstance(plan, Plan):
        return plan
    if _is_path(plan):
        return Plan.load(plan)
    check_names_compressor(str(plan))
    return uniform(str(plan), workload, costs, cluster)


def _is_path(plan: str | Path) -> bool:
    return isinstance(plan, Path) or plan.endswith(".json") or "/" in plan


def _asked_plan(plan: Plan | str | Path | None) -> str | None:
    """What ranks must agree on before they read a plan."""
    if plan is None:
        return None
    if isinstance(plan, Plan) or _is_path(plan):
        return "a Plan, or a saved one"
    return "dense" if plan == "dense" else str(parse_compressor(str(plan)))


def _facts_of_plan(plan: Plan) -> dict[str, Any]:
    """What must be the same on all ranks, what a user can do something about first."""
    facts = {
        f"the strategy of {name!r} in the plan": str(bucket.strategy)
        for bucket in plan.buckets
        for name in bucket.names
    }
    return facts | {"the whole plan's digest": plan.digest}


def check_names_compressor(plan: str) -> None:
    """Raise BadPlan unless a plan's text is `dense` or a compressor."""
    if plan == "dense":
        return
    try:
        parse_compressor(plan)
    except ValueError as error:
        raise BadPlan(
            f"plan={plan!r} is neither the path of a saved plan nor a compressor: {error}.\n"
            "  Use 'dense', 'bf16', 'int8', 'sign', 'topk(0.01)', a .json path, or a fxcomp.Plan."
        ) from None


def _measured_on_job(
    captured: Captured,
    training: Training,
    batch: Any,
    costs: CostTable,
    cluster: Cluster,
    ranks: Ranks,
    transport: Transport,
    *,
    skip_nonfinite: bool,
    feedback: ErrorFeedback,
    velocities_of: Callable[[Plan], Velocities] | None,
) -> tuple[CostTable, StepMeasurement]:
    """Add what this job's regions cost, from its own dense step, all ranks running, and how far prediction was off."""
    workload = analyze(captured.graph, costs, cluster, skip_nonfinite=skip_nonfinite)
    data = ranks.from_rank_0("the dense plan", lambda: uniform("dense", workload, costs, cluster).to_json())
    plan = Plan.from_json(data)
    rewriting = partial(rewrite, cluster=cluster, rank=ranks.rank, feedback=feedback, skip_nonfinite=skip_nonfinite)
    program = rewriting(captured, plan, costs)

    def no_rebuild(*_: Any) -> Program:
        raise AssertionError("a step that is only measured is captured once")

    device = training.device
    nothing = Residuals({}, device), CompressorStates({}, device)
    step = CompiledStep(training, plan, no_rebuild, Runtime(transport, device), *nothing, velocities_of=velocities_of)
    leaves = pytree.tree_leaves(batch)
    wire_us = costs.collective_us(CollectiveKind.ALL_REDUCE, Level.WORLD, workload.dense_bytes, cluster)
    mine = next(repeats for limit_us, repeats in MEASURED_STEPS if wire_us < limit_us)
    repeats = int(ranks.from_rank_0("how many steps are timed", lambda: mine))  # a rank that times one more would wait
    here = measure_step(step, program, networks(program.graph, transport, costs, cluster), leaves, repeats)
    # All ranks judge by the same numbers: one that switched back to dense alone would wait for the others for ever.
    everyone = ranks.gather("timing the dense step", [[on.step_us, on.compute_us] for on in here])
    alone, *others = as_slowest(here, everyone)
    compute = apportion(program, alone, "measured in the emitted step, all ranks running")
    starts = [on.launch_us for on in others if on.launch_us is not None]
    costs = replace(
        costs,
        compute={**costs.compute, **compute},
        pack_gb_per_s=alone.pack_gb_per_s or costs.pack_gb_per_s,
        launch_us=statistics.fmean(starts) if starts else costs.launch_us,
    )

    def fitted() -> tuple[dict[str, Any], float]:
        found, error = contention_of(costs, rewriting(captured, plan, costs).graph, cluster, [alone, *others])
        return {kind.value: asdict(one) for kind, one in found.items()}, error

    # By rank 0's tasks, like the plan; meanwhile the others leave it the processors.
    told, error = ranks.from_rank_0("fitting contention", fitted)
    costs = replace(costs, contention={CollectiveKind(kind): Contention(**one) for kind, one in told.items()})
    return replace(costs, error=min(max(SMALLEST_ERROR, error), LARGEST_ERROR)), others[0]


MEASURED_STEPS = ((0.3e6, 8), (1e6, 5), (2e6, 3), (6e6, 2), (math.inf, 1))
"""How many dense steps are timed with the network and without, in turns, by what their wire takes at most, in µs: the
same number on every rank. One of each goes before them and does not count."""

SMALLEST_ERROR = 0.05
"""A prediction is never trusted further than this: the median error over models, links and plans (docs/costs.md)."""

LARGEST_ERROR = 0.5


def residual_layout(
    plan: Plan, cluster: Cluster, rank: int, feedback: ErrorFeedback = CLASSIC
) -> dict[int, BucketLayout]:
    """Where residuals lie, for each bucket that is fed back: the rest of them needs none."""
    found: dict[int, BucketLayout] = {}
    for number, bucket in enumerate(plan.buckets):
        bound = bucket.strategy.bound([(size,) for size in bucket.sizes], cluster)
        if bound is not None and feedback.surrounds(bound):
            found[number] = bucket_layout(bucket, cluster, rank)
    return found


def velocity_layout(plan: Plan, cluster: Cluster, rank: int) -> dict[int, BucketLayout]:
    """Where velocities lie: every bucket has some."""
    return {number: bucket_layout(bucket, cluster, rank) for number, bucket in enumerate(plan.buckets)}


def bucket_layout(bucket: Bucket, cluster: Cluster, rank: int) -> BucketLayout:
    """What a rank keeps of a bucket: all of it, or its shard where a host's ranks share the work."""
    shards, shard = shard_of(bucket, cluster, rank)
    compressor = bucket.strategy.compressor
    is_summed = compressor is None or compressor.is_linear
    return BucketLayout(
        bucket.names,
        bucket.sizes,
        shards,
        shard,
        on_host=bucket.strategy.device is Device.CPU,
        divisor=cluster.ranks_at(bucket.strategy.level) if is_summed else 1,
    )


def state_layout(
    plan: Plan, shapes: Mapping[str, Sequence[int]], cluster: Cluster, rank: int
) -> dict[int, StateLayout]:
    """What compressors keep besides residuals, for each bucket whose compressor keeps something."""
    layout: dict[int, StateLayout] = {}
    for number, bucket in enumerate(plan.buckets):
        compressor = bucket.strategy.compressor
        if compressor is None or not compressor.has_state:
            continue
        shards, shard = shard_of(bucket, cluster, rank)
        segments = bucket.segments(shards, shard)
        level, whole = bucket.strategy.level, [shapes[name] for name in bucket.names]
        if bucket.strategy.is_hierarchical:
            whole = [(size,) for _, size in segments]
        bound = compressor.bound_to(whole, cluster.ranks_at(level))
        place = cluster.group(level, rank).index(rank)
        layout[number] = StateLayout(bound, segments, place, shard, bucket.strategy.device is Device.CPU)
    return layout


def shard_of(bucket: Bucket, cluster: Cluster, rank: int) -> tuple[int, int]:
    """Into how many shards a bucket is cut, and which is this rank's."""
    return (cluster.ranks_per_host, cluster.local_rank(rank)) if bucket.strategy.is_hierarchical else (1, 0)


# Options


def _check_is_plan(plan: object) -> None:
    if isinstance(plan, str) and not _is_path(plan):
        check_names_compressor(plan)
    elif not isinstance(plan, Plan | str | Path | None):
        raise BadPlan(
            f"plan is a fxcomp.Plan, the path of a saved one or a compressor; it is a {type(plan).__name__}.\n"
            "  Use 'dense', 'bf16', 'int8', 'sign', 'topk(0.01)', a .json path, or a fxcomp.Plan."
        )


def _why_no_replanning(*, planned: bool, feedback: ErrorFeedback, verified: VerifiedSteps) -> str:
    """What forbids to change the plan later; empty if nothing does."""
    if planned:
        return "the plan was given, and fxcomp changes only what it chose.\n  Leave plan= out, or compile another step."
    if feedback.momentum:
        return (
            "velocities of momentum correction belong to the plan that they were gathered under.\n"
            "  Save a state, compile another step, and load it there."
        )
    if verified.is_all:
        return (
            "every step is verified, which takes longer than training does, so none can be timed.\n"
            "  Verify more seldom: verify_every=2 leaves every other step to time."
        )
    return ""


def _check_replan(replan: str, why_not: str) -> None:
    """Raise BadOption for what is no option, or could never be done."""
    if Replan.parse(replan) is Replan.AUTO and why_not:
        raise BadOption(f"replan='auto' cannot be done here: {why_not}")


def _check_is_costs(costs: object) -> None:
    if not isinstance(costs, CostTable | str | Path | None):
        raise BadOption(f"costs is a fxcomp.CostTable or the path of a saved one; it is a {type(costs).__name__}")


def _checked_mode(mode: str, max_grad_norm: float | None) -> Mode:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise BadOption(f"max_grad_norm must be above 0, or None for no clipping; it is {max_grad_norm}")
    return Mode.parse(mode)
