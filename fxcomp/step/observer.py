"""Observe a running step: verification, looks at gradients, profiles.

    for each in observers that want this step:   each.before(step)
    the emitted step runs
    for each in observers that want this step:   each.after(step, aux)

All ranks have the same observers, and each acts at the same steps.
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
    """The batch is like the first one, which predictions are for; at the end, all batches of its group."""
    run: Callable[[Sequence[Any]], Any] | None = None
    """Runs the emitted lines on their arguments, where an observer has them run in another way."""
    result: Any = None
    took: Sequence[Looks] = ()
    """When each of its micro-batches ran."""

    @property
    def says_how_long(self) -> bool:
        """Its whole time is that of a step: it is like the first one, and no longer than others."""
        return self.is_like_first and self.use in (None, Use.TURN)

    @property
    def program(self) -> Program:
        return self.force.program

    @property
    def runtime(self) -> Runtime:
        return self.force.runtime


class Observer:
    """Sees the steps that it wants. This one wants none."""

    wants: frozenset[Use | None] = frozenset()
    """The uses of steps that it sees; None stands for training alone."""

    def before(self, step: StepUnderWay) -> None:
        """Prepare for a step that is about to run."""

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:
        """Take in a step whose last line has run; not called where something was raised."""
