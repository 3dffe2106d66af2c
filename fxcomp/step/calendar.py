"""Say what a step is for. Data that all ranks have agreed on, and a step's number: nothing else is asked.

    verified ─► one of the first steps ─► a turn of a race ─► none, before the plan that stays ─► a look

The first that holds takes the step, so a step is for one thing at most: each makes the step longer, and would spoil the
times of another. All ranks find the same one. A rank may still be unable to do it, for want of memory or with a batch
unlike the first one; whoever observes the step says what happens then.

The schedule (`schedule.py`) enters what ranks agree on later: a turn, the step from which a plan is followed, the first
step that may take the next look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxcomp.errors import BadState
from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps

WINDOW = 100
"""Steps between two comparisons of the step's time with the settled one, and whose median is compared."""

SETTLED = 20
"""Steps under a plan before gradients are looked at: so many make a median, and warm what they use."""


LASTS = ("patience", "patient_until")
"""The part of a calendar that a saved state holds, beside IS_SETTLED."""

IS_SETTLED = "is_settled"
"""In a saved state: the plan had been chosen, and no race was on or due."""


class Use(Enum):
    """The uses of a step, beside training."""

    VERIFY = "verify"
    """It is compared with eager PyTorch."""
    TIME = "time"
    """Its lines are timed, so that a plan can be chosen."""
    TURN = "turn"
    """It counts for the plan whose turn it is."""
    LOOK = "look"
    """A family of compressors is tried on its gradients."""


@dataclass(frozen=True, slots=True)
class RaceTurn:
    """The steps that count for one of the plans that race, by its number."""

    number: int
    steps: tuple[int, ...]

    @property
    def ends(self) -> int:
        """After so many steps the turn is over."""
        return self.steps[-1] + 1


@dataclass(slots=True)
class Calendar:
    """The uses of steps to come, as agreed by now. Steps are counted from the first one of the job."""

    verified: VerifiedSteps = NO_STEPS
    warm_from: tuple[int, ...] = (0,)
    """The first steps of the stages of a warm-up, and of the plan that stays."""
    followed_from: int = 0
    """The first step of the plan that is followed now."""
    timed: tuple[int, ...] = ()
    """The first steps of a job, by which its plan is chosen; empty once it has one."""
    checked: tuple[int, ...] = ()
    """The first steps of a job that check an earlier job's costs; empty once that is done."""
    turn: RaceTurn | None = None
    """The turn that is on, or the first one to come; None while no plans race."""
    patience: int = 1
    """Windows for which no drift is judged after the last one was acted on."""
    patient_until: int = 0
    look_from: int | None = None
    """The first step that may take the next look; None while none is due."""
    verified_too: int | None = None
    """One more verified step: the last one that was agreed on after a new capture on some rank."""

    # A step

    def use_of(self, step: int) -> Use | None:
        """Say what a step is for; None for most."""
        if self.is_verified(step):
            return Use.VERIFY
        if self.timed:
            return Use.TIME if step in self.timed else None
        if self.turn is not None:
            return Use.TURN if step in self.turn.steps else None
        if not self.is_quiet_at(step):
            return None
        if self.look_from is not None and step >= max(self.look_from, self.followed_from + SETTLED):
            return Use.LOOK
        return None

    def is_verified(self, step: int) -> bool:
        """Return whether a step is compared with eager PyTorch."""
        return step in self.verified or step == self.verified_too

    def stage_at(self, step: int) -> int:
        """Number the stage of a step; the plan that stays is the last one."""
        return max(0, sum(first <= step for first in self.warm_from) - 1)

    def is_warm_at(self, step: int) -> bool:
        """Return whether a step follows the plan that stays, or one that races with it."""
        return step >= self.warm_from[-1]

    def is_quiet_at(self, step: int) -> bool:
        """Tell a step that follows the plan that stays, with no race on or due."""
        return self.is_settled and self.is_warm_at(step)

    @property
    def is_settled(self) -> bool:
        """The plan is to stay: it was chosen, and no race is on or due."""
        return not self.timed and not self.checked and self.turn is None

    # After a step

    def judges_after(self, steps: int) -> bool:
        """Return whether ranks compare a full window of steps with the settled time after so many."""
        passed = steps - self.followed_from
        return self.is_quiet_at(steps - 1) and passed > 0 and passed % WINDOW == 0

    # Entering

    def free_steps(self, step: int, count: int) -> tuple[int, ...]:
        """Find the first steps from one on that are not verified by plan.

        Ranks learn of `verified_too` at different times. Such a step counts for nothing else.
        """
        found: list[int] = []
        while len(found) < count:
            if step not in self.verified:
                found.append(step)
            step += 1
        return tuple(found)

    def stay(self) -> None:
        """Follow one plan from now on: no warm-up is left, however far back a job goes on."""
        self.warm_from = (0,)

    def be_patient(self, step: int, *, changed: bool) -> None:
        """Wait twice as long after a drift that led to no other plan: no plan puts it right, and it may come again."""
        self.patience = 1 if changed else 2 * self.patience
        self.patient_until = step + self.patience * WINDOW

    # Saved and loaded

    def to_json(self) -> dict[str, int]:
        """Return what lasts when a job is started again: what it has waited for already, and if its plan stays."""
        return {**{name: getattr(self, name) for name in LASTS}, IS_SETTLED: self.is_settled}

    def resume(self, step: int, saved: Mapping[str, Any] | None = None) -> None:
        """Go on at another step of the job, under the same plan. Raises BadState.

        Without `saved` nothing is waited for yet. Turns, looks and the warm-up are those of this start.
        """
        self.followed_from = step
        for name, value in (("patience", 1), ("patient_until", step)):
            known = value if saved is None else saved.get(name, value)
            if not isinstance(known, int):
                raise BadState(
                    f"the state's calendar has {name} = {known!r}, which is no number of steps.\n"
                    "  Load a state as state_dict() returned it."
                )
            setattr(self, name, known)
