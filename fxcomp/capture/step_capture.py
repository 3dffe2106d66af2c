"""Capture a job's step: first to plan it, then again for batches and surroundings that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxcomp.capture.batch_type import BatchType, batch_type
from fxcomp.capture.shared_buffers import SharedBuffers, check_parameters_are_read
from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.step_inputs import Varying
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture_again
from fxcomp.graph.captured import Captured
from fxcomp.ranks import ALONE, Ranks


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

        Local: ranks do not communicate in it. Raises CaptureFailed, and StepChanged where the plan does not fit.
        """
        captured = capture_again(self.training, batch, varying, self.first)
        if not self.alone:
            check_parameters_are_read(captured.graph)
            self.shared_buffers.mark(captured.graph)
        return captured
