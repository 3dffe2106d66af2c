"""Say what a step is for. Data that all ranks have agreed on, and a step's number: nothing else is asked.

    verified ─► none, unless quiet ─► timed, if some steps are ─► a look ─► a check ─► timed, if all are

The first that holds takes the step, so a step is for one thing at most: each makes the step longer, and would spoil the
times of another. All ranks find the same one. A rank may still be unable to do it, for want of memory or with a batch
unlike the first one; whoever observes the step says what happens then. Turns of a race are the race's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps


class Use(Enum):
    """What a step is for, beside training."""

    VERIFY = "verify"
    """It is compared with eager PyTorch."""
    LOOK = "look"
    """Families of compressors are tried on its gradients."""
    CHECK = "check"
    """What the plan in force loses of its gradients is measured."""
    TIMED = "timed"
    """Its lines are timed one by one."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """The uses of steps to come, as agreed by now. What ranks agree on later makes another calendar."""

    verified: VerifiedSteps = NO_STEPS
    """Counted from the first step of the job."""
    timed_every: int = 0
    """One in so many steps is timed; 0 for none."""
    timed_from: int = 0
    """The first step of the plan that is timed."""
    is_quiet: bool = True
    """One plan is followed, the one that stays: no race is on or due, and no warm-up."""
    look_from: int | None = None
    """The first step that may take the next look; None while none is due."""
    check_from: int | None = None
    """The first step that may take the next check; None while none is due."""

    def use_of(self, step: int) -> Use | None:
        """Say what a step is for; None for most."""
        if step in self.verified:
            return Use.VERIFY
        if not self.is_quiet:
            return None
        is_timed = self._is_timed(step)
        if is_timed and self.timed_every > 1:
            return Use.TIMED
        if self.look_from is not None and step >= self.look_from:
            return Use.LOOK
        if self.check_from is not None and step >= self.check_from:
            return Use.CHECK
        return Use.TIMED if is_timed else None

    def _is_timed(self, step: int) -> bool:
        """Tell the first step of each `timed_every` that is not verified: such a one takes longer."""
        if self.timed_every == 0 or step < self.timed_from or step in self.verified:
            return False
        place = (step - self.timed_from) % self.timed_every
        return all(step - k in self.verified for k in range(1, place + 1))
