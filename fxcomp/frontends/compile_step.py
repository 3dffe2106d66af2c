"""compile_step: compile a model, loss and optimizer into a training step.

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


@torch.inference_mode(False)  # tensors made in inference mode could not be trained
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
    """Compile a data-parallel training step. Every rank of the process group calls it with the same arguments.

    `model` must not be wrapped, except by `torch.compile`, whose inner module is used. `optimizer` is one optimizer or
    a list. `loss_fn(model, batch)` returns the scalar loss, or `(loss, aux)`. A batch is any tree of tensors;
    `example_batch` is used for capture. A `WeightedLoss(sum, count)` is averaged as the sum over all ranks divided by
    the count over all ranks. The returned step takes a batch, updates model and optimizer in place, and returns the
    result of `loss_fn`. Gradients are averaged as in DistributedDataParallel. All ranks start with rank 0's parameters,
    buffers and optimizer state.

    `compress` selects the compression: a mode that bounds the error (`lossless`, `balanced`, `aggressive`, `lossy`); a
    plan (one setting for all matrices such as `bf16`, `int8` or `topk(0.01)`, a strategy's text, the path of a saved
    plan, or a Plan); or a Compress, which adds error budgets, pins (strategies by parameter name), the job's length,
    warm-up and error feedback.

    `cluster` gives the host of each rank and the link costs; by default, hosts are distinguished by name and links are
    measured. `costs` replaces all measurements: a CostTable, or the path of a saved one, which rank 0 reads for all.
    `process_group` is the group, or the `DeviceMesh` of one dimension, whose ranks average with each other; other ranks
    need not call this.

    `max_grad_norm` clips the averaged gradients by their global norm, `max_grad_value` clips each element. `accumulate`
    is the number of micro-batches of a step, one per call. Their gradients are averaged in fp32, and only the last call
    communicates and updates; `step(batch, last=True)` ends a shorter group.
    `scaler` is the GradScaler of an fp16 loop. The step scales the loss and unscales gradients; if a gradient is not
    finite, all ranks skip the step and keep their residuals. The loop calls `scaler.update()`, but not `scale`,
    `unscale_` and `step`.

    `skip_nonfinite` skips a step on all ranks if any gradient is not finite. Parameters and optimizer state do not
    change; residuals are restored with at most one rounding error. Therefore updates wait for the last bucket. With
    `find_unused_parameters`, the loss may leave out parameters, which may differ by rank. A parameter that no rank uses
    keeps its value, optimizer state and residual. `checks` selects checks of results, plans and costs.

    Raises subclasses of FxcompError. A failure on one rank raises on all ranks.
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
        exact = start.exact_gradients(first.graph)
        compiler = start.compiler(skip_nonfinite=options.skip_nonfinite, micro_batches=options.accumulate, exact=exact)
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
    def captured() -> tuple[Training, Captured]:
        if not callable(loss_fn):  # pyright: ignore[reportUnnecessaryComparison]
            raise BadOption(f"loss_fn is called with the model and a batch; it is a {type(loss_fn).__name__}")
        batch_type(batch)  # raises for unsupported batches
        surroundings()  # raises in modes that prevent capture
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
