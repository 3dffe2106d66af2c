"""Capture a job's step: first to plan it, then again for batches and surroundings that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxcomp.capture.batch_type import BatchType, batch_type
from fxcomp.capture.optimizer import live_numbers
from fxcomp.capture.shared_buffers import SharedBuffers, check_parameters_are_read
from fxcomp.capture.step_guard import StepGuard, settled
from fxcomp.capture.step_inputs import Varying
from fxcomp.capture.training import LossFn, Training
from fxcomp.capture.unreached import warn_unreached
from fxcomp.capture.whole_step import capture
from fxcomp.errors import StepChanged
from fxcomp.graph.captured import Captured
from fxcomp.ranks import ALONE, Ranks


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


@dataclass(frozen=True, slots=True)
class StepCapture:
    """The first capture of a step, and the way to more of them."""

    training: Training
    first: Captured
    kind: BatchType
    """The type of the first batch."""
    guard: StepGuard
    shared_buffers: SharedBuffers
    alone: bool = True

    @classmethod
    def agreed(cls, training: Training, first: Captured, batch: Any, ranks: Ranks = ALONE) -> StepCapture:
        """Agree on the buffers that all ranks take from rank 0; every rank calls it with its first capture."""
        shared_buffers = SharedBuffers.agree(first.graph, ranks)
        shared_buffers.mark(first.graph)
        kind, _ = batch_type(batch)
        return cls(training, first, kind, StepGuard(training), shared_buffers, ranks.world_size == 1)

    def again(self, batch: Any, varying: Varying) -> Captured:
        """Capture for another batch; `varying` has the dimensions of its tensors, by leaf, that become symbols.

        Local: ranks do not communicate in it. Raises CaptureFailed, and StepChanged where other parameters get a
        gradient: another set of them needs another plan, on all ranks at once.
        """
        captured = capture(self.training, batch, varying)
        if changed := sorted(set(self.first.gradient_names) ^ set(captured.gradient_names)):
            raise StepChanged(
                "for this batch other parameters get a gradient than when the step was compiled: "
                f"{', '.join(changed[:3])}.\n"
                "  Call compile_step again on all ranks, or let every parameter take part in every loss."
            )
        if not self.alone:
            check_parameters_are_read(captured.graph)
            self.shared_buffers.mark(captured.graph)
        return captured
