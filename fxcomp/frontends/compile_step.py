"""compile_step: from the user's model, loss and optimizer to a compiled step.

capture ─► Start: agree, decide (`start.py`) ─► put the plan in force ─► CompiledStep
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.optimizer import GivenOptimizers, all_optimizers
from fxcomp.capture.step_capture import StepCapture, capture_first, check_parameters_are_read, facts_to_agree_on
from fxcomp.capture.step_guard import surroundings
from fxcomp.capture.training import LossFn, Training
from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadOption
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.graph.captured import Captured
from fxcomp.graph.update_kinds import update_kinds
from fxcomp.options import CHECKED, Checks, GivenCosts, StepOptions
from fxcomp.plan.compress import Compress, GivenCompress
from fxcomp.progress import compiling, log, phase
from fxcomp.ranks import Ranks
from fxcomp.state.inputs import Inputs
from fxcomp.state.rank_0s_state import share_optimizer_state
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.plan_in_force import PlanInForce


@torch.inference_mode(False)  # what is made inside it, residuals too, could not be trained any more
def compile_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: GivenOptimizers,
    example_batch: Any,
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    process_group: Any = None,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    skip_nonfinite: bool = False,
    find_unused_parameters: bool = False,
    checks: Checks = CHECKED,
) -> CompiledStep:
    """Compile a data-parallel training step; every rank of the process group calls this with the same arguments.

    `model` is not wrapped; of what `torch.compile` has made, the inside is taken. `optimizer` is one, or several in a
    list. `loss_fn(model, batch)` returns the scalar loss, or `(loss, aux)`; a batch is any tree of tensors, of mappings
    and dataclasses too, and `example_batch` one by which the step is captured. A
    loss may be a `WeightedLoss(sum, count)`: gradients are then those of all ranks' sum over all ranks' count. The
    returned step is called with a batch, updates the model and the optimizer in place, and returns what `loss_fn` does.
    Gradients are averaged over all ranks as DistributedDataParallel does it; parameters, buffers and the optimizer's
    state start as rank 0's.

    `compress` says how gradients travel: a mode, which bounds what may be lost (`lossless`, `balanced`, `aggressive`,
    `lossy`), a plan in place of a choice (one setting for all matrices such as `bf16`, `int8` or `topk(0.01)`, a
    strategy's text, the path of a saved plan, a Plan), or a Compress, which has the rest: error budgets, pins by name,
    the job's length, warm-up and error feedback.

    `cluster` says which rank sits where and what links cost; without it, hosts are told by name and links are measured.
    `costs` replaces all measuring: a CostTable, or the path of a saved one, which rank 0 reads for all. `process_group`
    has the ranks that average with each other, as a group or a `DeviceMesh` of one dimension, where a job has other
    parallel dimensions; those are left alone, and ranks outside of it need not call this.

    `max_grad_norm` clips the averaged gradients by their global norm, `max_grad_value` each element of them.
    `accumulate` makes a step of so many micro-batches, one a call: their gradients are summed up in fp32, and the last
    call of the group alone sends and updates; `step(batch, last=True)` ends a shorter group. Leave the loss the mean of
    its own micro-batch. `scaler` is the GradScaler of a loop in fp16: the step multiplies the loss by its scale and
    gradients by the inverse while they are packed, and leaves the step out on all ranks where one's gradient is not
    finite, residuals unchanged to the bit. `scaler.update()` stays the loop's; `scale`, `unscale_` and `step` go.

    `skip_nonfinite` leaves a step out, on all ranks, where any rank's gradient is not finite: parameters and the
    optimizer's state stay as they were, and residuals up to one rounding; all updates wait for the last bucket.
    `find_unused_parameters` lets the loss leave out parameters for some batches, on each rank others, as
    DistributedDataParallel does; what no rank uses in a step stays as it is, with its optimizer state and residuals.
    `checks` says what the running step checks of itself: results against eager PyTorch, plans against each other, and
    costs against their prediction.

    Raises FxcompError's subclasses, each naming what is wrong and what to do. Where it fails on one rank, it
    fails on all.
    """

    def checked() -> StepOptions:
        options = StepOptions(
            compress=Compress.of(compress),
            cluster=cluster,
            costs=costs,
            process_group=process_group,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            accumulate=accumulate,
            scaler=scaler,
            skip_nonfinite=skip_nonfinite,
            find_unused_parameters=find_unused_parameters,
            checks=checks,
        )
        options.check_optimizers(all_optimizers(optimizer))
        return options

    with compiling("compile_step"), Ranks.meeting(cluster, "compile_step", process_group) as ranks:
        options = ranks.attempt("checking options", checked)
        with phase("capturing the step"):
            training, first = _captured(model, loss_fn, optimizer, example_batch, options, ranks)
        model = training.model
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        facts, shared = facts_to_agree_on(training, first), itertools.chain(model.parameters(), model.buffers())
        here = ModelHere(shapes, training.device, facts, shared, first.gradient_names)
        start = Start.of("compile_step", ranks, options, here)
        capture = StepCapture.agreed(training, first, example_batch, ranks)
        notes = share_optimizer_state(training, ranks)
        compiler = start.compiler(skip_nonfinite=options.skip_nonfinite, micro_batches=options.accumulate)
        kinds, inputs = update_kinds(first.graph), Inputs(training, options.accumulate)
        planner = start.planner(compiler, first.graph, kinds)
        decision = start.decide(planner, kinds, is_whole=True)
        warmup = options.compress.warmup_for(decision.plan)
        with phase("writing the step"):
            force = PlanInForce(decision, compiler, start.trained, capture, inputs, warmup)
            step = CompiledStep(force, planner, start.site, options)
        buckets, ms = decision.plan.buckets, step.timeline.step_time_us / 1e3
        compressed = sum(not bucket.strategy.is_dense for bucket in buckets)
        log.info("%d of %d buckets are compressed; a step is predicted to take %.4g ms", compressed, len(buckets), ms)
        step.notes += notes
        return step


def _captured(
    model: nn.Module, loss_fn: LossFn, optimizer: GivenOptimizers, batch: Any, options: StepOptions, ranks: Ranks
) -> tuple[Training, Captured]:
    """Capture the step on every rank."""

    def captured() -> tuple[Training, Captured]:
        if not callable(loss_fn):  # pyright: ignore[reportUnnecessaryComparison]
            raise BadOption(f"loss_fn is called with the model and a batch; it is a {type(loss_fn).__name__}")
        batch_type(batch)  # refuses what no batch may hold
        surroundings()  # refuses modes under which no step is captured
        training = Training.of(
            model,
            loss_fn,
            optimizer,
            options.max_grad_norm,
            options.max_grad_value,
            finds_unused=options.find_unused_parameters,
            scaler=options.scaler,
        )
        captured = capture_first(training, batch)
        options.compress.pinned.check_model(training.model)
        if ranks.world_size > 1:
            check_parameters_are_read(captured.graph)
        return training, captured

    return ranks.attempt("capturing the step", captured)
