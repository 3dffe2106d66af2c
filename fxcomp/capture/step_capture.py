"""Capture a job's step: first to plan it, then again for batches and surroundings that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxcomp.capture.batch_type import BatchType, batch_type
from fxcomp.capture.optimizer import live_numbers
from fxcomp.capture.shared_buffers import SharedBuffers, check_parameters_are_read
from fxcomp.capture.step_guard import StepGuard, settled
from fxcomp.capture.step_inputs import Varying
from fxcomp.capture.training import Training
from fxcomp.capture.unreached import warn_unreached
from fxcomp.capture.whole_step import capture
from fxcomp.errors import StepChanged
from fxcomp.graph.captured import Captured
from fxcomp.ranks import ALONE, Ranks


def capture_first(training: Training, batch: Any) -> Captured:
    """Capture a step that is about to be compiled."""
    captured = settled(StepGuard(training), lambda: capture(training, batch))
    warn_unreached(captured.without_gradient)
    return captured


def facts_to_agree_on(training: Training, captured: Captured) -> dict[str, Any]:
    """Everything of a first capture that must be the same on all ranks; the batch's shape may differ."""
    named = list(training.model.named_parameters())
    facts: dict[str, Any] = {f"the shape of {name!r}": list(p.shape) for name, p in named}
    facts |= {f"the type of {name!r}": str(p.dtype) for name, p in named}
    facts |= {f"requires_grad of {name!r}": p.requires_grad for name, p in named}
    for name, buffer in training.model.named_buffers():
        facts[f"the shape of the buffer {name!r}"] = list(buffer.shape)
        facts[f"the dtype of the buffer {name!r}"] = str(buffer.dtype)
    facts |= {f"a gradient of {name!r}": True for name in captured.gradient_names}
    facts["the optimizer"] = ", ".join(type(optimizer).__name__ for optimizer in training.optimizers)
    for number, group in enumerate(training.groups):
        for key, value in {**group, **live_numbers(group)}.items():
            if isinstance(value, bool | int | float | str | type(None)):
                facts[f"{key} of parameter group {number}"] = value
    facts["a count beside the loss"] = captured.is_weighted
    facts["max_grad_norm"] = training.max_grad_norm
    facts["max_grad_value"] = training.max_grad_value
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
        if captured.is_weighted != self.first.is_weighted:
            raise StepChanged(
                "loss_fn returns a WeightedLoss for some batches and a plain loss for others, which have no common"
                " mean.\n"
                "  Return a WeightedLoss for all of them, or for none."
            )
        if changed := sorted(set(self.first.gradient_names) ^ set(captured.gradient_names)):
            raise StepChanged(
                "for this batch other parameters get a gradient than when the step was compiled: "
                f"{', '.join(changed[:3])}.\n"
                "  Pass find_unused_parameters=True to compile_step, or let every parameter take part in every loss."
            )
        if not self.alone:
            check_parameters_are_read(captured.graph)
            self.shared_buffers.mark(captured.graph)
        return captured
