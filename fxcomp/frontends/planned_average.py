"""Common methods of frontends that average by a plan: inspect, save, load, close."""

from __future__ import annotations

import atexit
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxcomp.cost.timeline import Timeline
from fxcomp.errors import FxcompError
from fxcomp.frontends.backward_passes import BackwardPasses
from fxcomp.plan.plan import Plan
from fxcomp.ranks import Ranks
from fxcomp.state.checkpoint import NOTHING_YET, states_of, to_tensors
from fxcomp.state.checksums import sealed
from fxcomp.state.saved_state import Given, states_given


class PlannedAverage:
    """Plan in force and its error-feedback state."""

    def __init__(self, job: BackwardPasses | None) -> None:
        self._job = job
        """None before a hook's first backward pass."""
        self._given: Given = None
        """State that was loaded before the first backward pass."""

    # Inspecting

    @property
    def plan(self) -> Plan | None:
        """Plan in force; None while the first backward passes are dense."""
        return None if self._job is None or self._job.decision is None else self._job.decision.plan

    @property
    def source(self) -> str:
        """Emitted step as Python source; empty before there is a plan."""
        return "" if self._job is None else self._job.source

    @property
    def timeline(self) -> Timeline | None:
        """Predicted timeline of a step; None before there is a plan."""
        return None if self._job is None else self._job.timeline

    @property
    def is_racing(self) -> bool:
        """True during a race, or if one is scheduled."""
        return self._job is not None and self._job.is_racing

    def report(self) -> str:
        """Explain the plan and the predicted step as text. Raises FxcompError before there is a plan."""
        if self._job is None or self._job.decision is None:
            raise FxcompError(
                "there is no plan yet: the first backward passes on more than one rank send dense, and record when"
                " gradients are ready.\n  Ask again after some steps, or name a plan."
            )
        return self._job.report()

    def metrics(self, *, residuals: bool = False) -> dict[str, Any]:
        """Return metrics of the last backward pass, as CompiledStep.metrics; empty before the first.

        `residuals` adds the residual norm.
        """
        return {} if self._job is None else self._job.metrics(residuals=residuals)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, compressor states and plan, or a marker before there is a plan.

        Loaded states that wait for the first backward pass are returned unchanged.
        """
        job = self._job
        waiting = states_given(self._given if job is None else job.given if job.follower is None else None)
        if len(waiting) == 1:
            return dict(waiting[0])
        saved = {} if job is None else job.state_dict()
        return sealed(saved) if saved else {NOTHING_YET: list(waiting)}

    def checkpoint(self) -> dict[str, Tensor]:
        """Return this rank's state as plain tensors, under names that are unique among ranks.

        `fxcomp.read_checkpoint` reads it. Random generators are not included.
        """
        return to_tensors(self.state_dict(), dist.get_rank())

    def load_state_dict(self, state: Given) -> None:
        """Restore a `state` of `state_dict` or `checkpoint`. Must run on every rank. Raises BadState.

        Before the first backward pass, the state is kept, and its plan is followed from that pass on.
        """
        if self._job is not None:
            return self._job.load_state_dict(state)
        try:
            self._given = states_of(state) or None
            atexit.unregister(Ranks.stay_away)
        except FxcompError as error:  # if it ends this process, the others learn it in their first backward pass
            atexit.register(Ranks.stay_away, "ddp_hook", None, error)
            raise

    def close(self) -> None:
        """Release the process groups, without communication. The next backward pass raises."""
        if self._job is not None:
            self._job.close()
