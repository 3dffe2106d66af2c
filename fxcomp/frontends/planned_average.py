"""Look at what averages the gradients of backward passes by a plan, save it, load it, close it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxcomp.cost.timeline import Timeline
from fxcomp.errors import FxcompError
from fxcomp.frontends.backward_passes import BackwardPasses
from fxcomp.plan.plan import Plan
from fxcomp.state.checkpoint import NOTHING_YET, states_of, to_tensors
from fxcomp.state.saved_state import Given, check_are_states, states_given


class PlannedAverage:
    """The plan in force, and what it owes."""

    def __init__(self, job: BackwardPasses | None) -> None:
        self._job = job
        """None before the first backward pass of a hook."""
        self._given: Given = None
        """A state that was loaded before it."""

    # Looking

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while the first backward passes send dense."""
        return None if self._job is None or self._job.decision is None else self._job.decision.plan

    @property
    def source(self) -> str:
        """The emitted step as Python source; empty before there is a plan."""
        return "" if self._job is None else self._job.source

    @property
    def timeline(self) -> Timeline | None:
        """The predicted step; None before there is a plan."""
        return None if self._job is None else self._job.timeline

    @property
    def is_racing(self) -> bool:
        """Plans take turns, or will soon; False before there is a plan, too."""
        return self._job is not None and self._job.is_racing

    def report(self) -> str:
        """Explain the plan and the predicted step as text. Raises FxcompError before there is a plan."""
        if self._job is None or self._job.decision is None:
            raise FxcompError(
                "there is no plan yet: the first backward passes on more than one rank send dense, and tell when"
                " gradients are ready.\n  Ask again after some steps, or name a plan."
            )
        return self._job.report()

    def metrics(self, *, residuals: bool = False) -> dict[str, Any]:
        """Sum the last backward pass up in numbers, as CompiledStep.metrics, with the norm of `residuals` if asked.

        Empty before the first one.
        """
        return {} if self._job is None else self._job.metrics(residuals=residuals)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state of error feedback and compressors, with the plan; before there is one it says so.

        A loaded state that waits for the first backward pass is returned as it is.
        """
        waiting = states_given(self._given)
        saved = dict(waiting[0]) if len(waiting) == 1 else {} if self._job is None else self._job.state_dict()
        return saved or {NOTHING_YET: True}

    def checkpoint(self) -> dict[str, Tensor]:
        """This rank's state as plain tensors under names that no other rank of the job uses.

        `fxcomp.read_checkpoint` reads it. Random generators are left to the loop, whose draws they are.
        """
        return to_tensors(self.state_dict(), dist.get_rank())

    def load_state_dict(self, state: Given) -> None:
        """Take back a `state` of `state_dict` or `checkpoint`; every rank calls it, as CompiledStep.load_state_dict.

        Before the first backward pass the state waits for it, and its plan is followed from there on. Raises BadState.
        """
        given: Given = states_of(state) or None
        if self._job is None:
            check_are_states(given or ())
            self._given = given
        else:
            self._job.load_state_dict(given)

    def close(self) -> None:
        """Give back the process groups; other ranks need not be there. The model's next backward pass raises."""
        if self._job is not None:
            self._job.close()
