"""compile_step: from the user's model, loss and optimizer to a compiled step.

capture ─► compare ranks ─► decide ─► put the plan in force ─► CompiledStep
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.optimizer import GivenOptimizers, all_optimizers
from fxcomp.capture.shared_buffers import check_parameters_are_read
from fxcomp.capture.step_capture import StepCapture, capture_first, facts_to_agree_on
from fxcomp.capture.surroundings import surroundings
from fxcomp.capture.training import LossFn, Training
from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.graph.captured import Captured
from fxcomp.graph.update_kinds import update_kinds
from fxcomp.options import StepOptions
from fxcomp.pipeline import Compiler
from fxcomp.plan.check_feedback import check_plan
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.plan.update_kind import burst_share
from fxcomp.plan.verified_steps import SAMPLED
from fxcomp.planning.decide import Planner, costs_as_given
from fxcomp.ranks import Ranks
from fxcomp.site import Site
from fxcomp.state.inputs import Example, Inputs
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
    cluster: Cluster | None = None,
    costs: CostTable | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    per_parameter: Mapping[str, str] | None = None,
    mode: str = "balanced",
    error_budget: str | float | None = None,
    error_feedback: ErrorFeedback = CLASSIC,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    skip_nonfinite: bool = False,
    find_unused_parameters: bool = False,
    verify_every: int | str = SAMPLED,
    replan: str = "offer",
    race: str = "auto",
    accumulate: int = 1,
    process_group: Any = None,
    scaler: torch.amp.GradScaler | None = None,
) -> CompiledStep:
    """Compile a data-parallel training step; every rank of the process group calls this with the same arguments.

    `loss_fn(model, batch)` returns the scalar loss, or `(loss, aux)`; a batch is any pytree of tensors. A loss may be
    a `WeightedLoss(sum, count)`: gradients are then those of all ranks' sum over all ranks' count. The returned
    step is called with a batch, updates the model and the optimizer in place, and returns what `loss_fn` does.
    Gradients are averaged over all ranks as DistributedDataParallel does it; parameters, buffers and the optimizer's
    state start as rank 0's.

    `cluster` says which rank sits where and what links cost; without it, hosts are told by name and links are measured.
    `costs` replaces all measuring: a CostTable, or the path of a saved one, which rank 0 reads for all. `plan` replaces
    the choice: a Plan, the path of a saved one, or one compressor for all matrices (`dense`, `bf16`, `int8`, `sign`,
    `topk(0.01)`; biases and norms then stay dense). `per_parameter` pins some parameters by hand: patterns of their
    names with a compressor or strategy each, like `{"*.embedding.weight": "dense", "lm_head.*": "int8"}`; the last one
    that matches decides. `mode` bounds what may be lost: `lossless`, `balanced`, `aggressive`. `error_budget` does so
    in its place, by what compressors lose of this job's gradients: as much as a uniform setting (`topk(0.01)`,
    `int4 > int4`), a mode, or a relative squared error. Then every family of compressors is offered, and parameters
    follow the gradients while the job runs. `error_feedback` has the variants of error feedback, and warm-up.
    `max_grad_norm` clips the averaged gradients by their global norm, `max_grad_value` each element of them.
    `skip_nonfinite` leaves a step out, on all ranks, where any rank's gradient is not finite: parameters and the
    optimizer's state stay as they were, and residuals up to one rounding; all updates wait for the last bucket.
    `find_unused_parameters` lets the loss leave out parameters for some batches, on each rank others, as
    DistributedDataParallel does; what no rank uses in a step stays as it is, with its optimizer state and residuals.
    `verify_every` says which steps are compared with eager PyTorch, loss, gradients and update: `sampled` (2, 5, 10,
    20, 50 and so on), every N-th, or `never`. `replan` says what happens when the running step shows that a cost is
    wrong: `offer` (the report says so, and `step.replan()` plans anew), `auto` (all ranks plan anew at the same step),
    `off` (nothing is timed). `race` says who decides between the few best plans: `auto` (they take turns in the first
    hundred steps, and the fastest stays), `off` (the prediction). `accumulate` makes a step of so many micro-batches,
    one a call: their gradients are summed up in fp32, and the last call of the group alone sends and updates;
    `step(batch, last=True)` ends a shorter group. Leave the loss the mean of its own micro-batch. `process_group` has
    the ranks that average with each other, as a group or a `DeviceMesh` of one dimension, where a job has other
    parallel dimensions; those are left alone, and ranks outside of it need not call this.

    `scaler` is the GradScaler of a loop in fp16: the step multiplies the loss by its scale and gradients by the inverse
    while they are packed, and leaves the step out on all ranks where one's gradient is not finite, residuals unchanged
    to the bit. `scaler.update()` stays the loop's; `scale`, `unscale_` and `step` go.

    Raises FxcompError's subclasses, each naming what is wrong and what to do. Where it fails on one rank, it
    fails on all.
    """
    given = {
        "cluster": cluster, "costs": costs, "plan": plan, "per_parameter": per_parameter, "mode": mode,
        "error_budget": error_budget,
        "error_feedback": error_feedback, "max_grad_norm": max_grad_norm, "max_grad_value": max_grad_value,
        "skip_nonfinite": skip_nonfinite, "find_unused_parameters": find_unused_parameters,
        "verify_every": verify_every, "replan": replan, "race": race, "accumulate": accumulate,
        "process_group": process_group, "scaler": scaler,
    }  # fmt: skip
    with Ranks.meeting(cluster, "compile_step", process_group) as ranks:
        options = ranks.attempt("checking options", lambda: _checked(given, optimizer, ranks))
        capture = _captured(model, loss_fn, optimizer, example_batch, options, ranks)
        training = capture.training
        table = costs_as_given(costs, ranks)
        site = Site.of(ranks, cluster, training.device)
        ranks.share(itertools.chain(model.parameters(), model.buffers()))
        shared = share_optimizer_state(training, ranks)

        compiler = Compiler(site.cluster, site.rank, options.feedback, options.skip_nonfinite, options.accumulate)
        kinds = update_kinds(capture.first.graph)
        planner = Planner(site, options, compiler, capture.first.graph, burst_share(kinds))
        inputs = Inputs(training, options.accumulate)
        example = Example(capture.first, inputs, pytree.tree_leaves(example_batch), capture.guard)
        decision = planner.first(table, example)
        check_plan(options.feedback, decision.plan, inputs.shapes, site.cluster, kinds)
        site.make_groups_for(decision.plan)
        seed = ranks.from_rank_0("the seed of random compressors", torch.initial_seed)
        force = PlanInForce(decision, compiler, site, capture, inputs, seed)
        step = CompiledStep(force, planner, site, options)
        step.notes += shared
        return step


def _checked(given: dict[str, Any], optimizer: GivenOptimizers, ranks: Ranks) -> StepOptions:
    options = StepOptions.checked(**given)
    options.check_optimizers(all_optimizers(optimizer), alone=ranks.world_size == 1)
    return options


def _captured(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: GivenOptimizers,
    batch: Any,
    options: StepOptions,
    ranks: Ranks,
) -> StepCapture:
    """Capture the step on every rank, and make sure that all ranks have captured the same."""

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
        options.pins.check_model(model)
        if ranks.world_size > 1:
            check_parameters_are_read(captured.graph)
        return training, captured

    training, first = ranks.attempt("capturing the step", captured)
    ranks.check_same("comparing models", facts_to_agree_on(training, first) | options.facts())
    return StepCapture.agreed(training, first, batch, ranks)
