"""Capture the whole training step: forward, backward and the user's own optimizer, as one flat FX graph.

    loss_fn(model, batch) ─make_fx─► forward and backward, functionalized ─┐
    optimizer.step()      ─make_fx─► one small in-place graph a parameter  ├─► one graph; inputs and gradients labelled
    clip_grad_norm_       ─────────► norm, coefficient, scaled gradients  ─┘

The optimizer stays in place, right after its gradient: no copies of parameters. Numbers that schedulers change (the
learning rate, momenta, betas, weight decay) are inputs of the graph, so that they stay live without another capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp.capture.assemble import assemble
from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.forward_backward import check_forward_backward, trace_forward_backward
from fxcomp.capture.optimizer import check_optimizer, live_numbers
from fxcomp.capture.shared_memory import check_written
from fxcomp.capture.step_guard import StepGuard, settled
from fxcomp.capture.step_inputs import FIXED_SIZES, StepInputs, Varying
from fxcomp.capture.training import LossFn, Training
from fxcomp.capture.unreached import warn_unreached
from fxcomp.errors import StepChanged
from fxcomp.graph.captured import Captured


def capture(training: Training, batch: Any, varying: Varying = FIXED_SIZES) -> Captured:
    """Trace one training step on fake tensors; nothing of the user's is changed.

    Outputs of the graph: the loss, then the auxiliary results; buffers and parameters change in place.
    """
    check_optimizer(training.optimizer)  # its options may have changed since the first capture
    inputs = StepInputs(training, batch, varying)
    body, outputs = trace_forward_backward(training, inputs)
    if varying and outputs.mention(inputs.symbols):  # right for these sizes alone
        return replace(capture(training, batch), guard=_fits_nothing_else)
    check_forward_backward(body, training.model)
    check_written(body, inputs.named)
    return assemble(body, outputs, training, inputs)


def _fits_nothing_else(_: Sequence[Tensor]) -> bool:
    return False


def capture_first(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    max_grad_norm: float | None = None,
) -> tuple[Training, Captured]:
    """Check the user's objects, create the optimizer's state, and capture a step that is about to be compiled."""
    batch_type(batch)  # refuses what no batch may hold
    training = Training.of(model, loss_fn, optimizer, max_grad_norm)
    captured = settled(StepGuard(training), lambda: capture(training, batch))
    warn_unreached(captured.without_gradient)
    return training, captured


def capture_again(training: Training, batch: Any, varying: Varying, first: Captured) -> Captured:
    """Capture a compiled step for another batch. Raises StepChanged if other parameters get a gradient.

    A plan covers certain gradients; another set of them needs another plan, on all ranks at once.
    """
    again = capture(training, batch, varying)
    if changed := sorted(set(first.gradient_names) ^ set(again.gradient_names)):
        raise StepChanged(
            "for this batch other parameters get a gradient than when the step was compiled: "
            f"{', '.join(changed[:3])}.\n"
            "  Call compile_step again on all ranks, or let every parameter take part in every loss."
        )
    return again


def facts_to_agree_on(training: Training, captured: Captured) -> dict[str, Any]:
    """Everything of a first capture that must be the same on all ranks; the batch's shape may differ."""
    named = list(training.model.named_parameters())
    facts: dict[str, Any] = {f"the shape of {name!r}": list(p.shape) for name, p in named}
    facts |= {f"requires_grad of {name!r}": p.requires_grad for name, p in named}
    for name, buffer in training.model.named_buffers():
        facts[f"the shape of the buffer {name!r}"] = list(buffer.shape)
        facts[f"the dtype of the buffer {name!r}"] = str(buffer.dtype)
    facts |= {f"a gradient of {name!r}": True for name in captured.gradient_names}
    facts["the optimizer"] = type(training.optimizer).__name__
    for number, group in enumerate(training.optimizer.param_groups):
        for key, value in {**group, **live_numbers(group)}.items():
            if isinstance(value, bool | int | float | str | type(None)):
                facts[f"{key} of parameter group {number}"] = value
    facts["max_grad_norm"] = training.max_grad_norm
    return facts
