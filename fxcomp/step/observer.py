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
    """True if all its batches have the type of the job's first batch, for which times are predicted."""
    run: Callable[[Sequence[Any]], Any] | None = None
    """Function, set by an observer, that runs the emitted lines instead of `Executor.run`."""
    result: Any = None
    took: Sequence[Looks] = ()
    """Clock readings at begin and end of each micro-batch."""

    @property
    def says_how_long(self) -> bool:
        """True if the step's time counts: no use lengthened it, and its batches are like the first."""
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
    """None stands for steps that only train."""

    def before(self, step: StepUnderWay) -> None:
        """Prepare for the step."""

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:
        """Handle a step after its last line. Not called after an exception."""
