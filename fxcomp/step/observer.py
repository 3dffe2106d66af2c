"""Observers of a running step: verification, measurement of compression errors, profiles.

    for each in observers that want this step:   each.before(step)
    the emitted step runs
    for each in observers that want this step:   each.after(step, aux)

All ranks have the same observers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxcomp.codegen.program import Program
from fxcomp.runtime.clock import Looks
from fxcomp.runtime.runtime import Runtime
from fxcomp.step.calendar import Use
from fxcomp.step.plan_in_force import PlanInForce


@dataclass(slots=True)
class StepUnderWay:
    """A step that is about to run, or has just run."""

    number: int
    use: Use | None
    force: PlanInForce
    batch: Any
    is_like_first: bool
    """All its batches are like the job's first one, which predictions are for."""
    run: Callable[[Sequence[Any]], Any] | None = None
    """Runs the emitted lines instead of `Executor.run`, if an observer sets it."""
    result: Any = None
    took: Sequence[Looks] = ()
    """Begin and end of each micro-batch."""

    @property
    def says_how_long(self) -> bool:
        """The step took as long as an ordinary one with a batch like the first."""
        return self.is_like_first and self.use in (None, Use.TURN)

    @property
    def program(self) -> Program:
        return self.force.program

    @property
    def runtime(self) -> Runtime:
        return self.force.runtime


class Observer:
    """Observer of the steps whose use is in `wants`."""

    wants: frozenset[Use | None] = frozenset()
    """None stands for training only."""

    def before(self, step: StepUnderWay) -> None:
        """Prepare for a step that is about to run."""

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:
        """Handle a step after its last line. Not called after an exception."""
