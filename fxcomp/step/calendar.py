"""Choose the use of each step from the step's number and data that are equal on all ranks.

    verified ─► timed to choose a plan ─► turn of a race ─► none, during the warm-up ─► measurement of errors (*look*)

A step gets the leftmost use that applies. Each use lengthens the step, so a step has at most one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps

WINDOW = 100
"""Steps per window. The median step times of windows are compared to detect drift."""

SETTLED = 20
"""Minimum number of steps under a plan before a look, which needs the median step time."""


LASTS = ("patience", "patient_until")
"""Saved fields of a calendar, besides BEGINS and IS_SETTLED."""

BEGINS = "begins"
"""Key of the saved first step of the warm-up: 0 after the warm-up, None before a plan is chosen."""

IS_SETTLED = "is_settled"
"""Key of the saved value of `Calendar.is_settled`."""


class Use(Enum):
    """Uses of a step, besides training."""

    VERIFY = "verify"
    """The step is compared with eager PyTorch."""
    TIME = "time"
    """The emitted lines are timed, to choose a plan."""
    TURN = "turn"
    """The step belongs to a turn of a race."""
    LOOK = "look"
    """Errors of a compressor family are measured."""


@dataclass(frozen=True, slots=True)
class RaceTurn:
    """Steps of one plan in a race; `number` is the index of the plan."""

    number: int
    steps: tuple[int, ...]

    @property
    def ends(self) -> int:
        return self.steps[-1] + 1


@dataclass(slots=True)
class Calendar:
    """Uses of steps, equal on all ranks. Steps are numbered from the first step of the job."""

    verified: VerifiedSteps = NO_STEPS
    warm_from: tuple[int, ...] = (0,)
    """First step of each warm-up stage. The last entry belongs to the plan that stays."""
    followed_from: int = 0
    timed: tuple[int, ...] = ()
    """Steps timed to choose a plan; empty once it is chosen."""
    checked: tuple[int, ...] = ()
    """Steps whose times are compared with an earlier job's costs; empty after the comparison."""
    turn: RaceTurn | None = None
    """Current turn, or first turn of a scheduled race; None without a race."""
    patience: int = 1
    """Length of the latest pause of drift checks, in windows."""
    patient_until: int = 0
    look_from: int | None = None
    """Earliest step of the next look."""
    verified_too: int | None = None
    """Step to verify after the latest new capture on any rank."""

    # A step

    def use_of(self, step: int) -> Use | None:
        """Return the use of a step; None if it only trains."""
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
        return step in self.verified or step == self.verified_too

    def stage_at(self, step: int) -> int:
        """Return the index of a step's warm-up stage; after the warm-up, the number of stages."""
        return max(0, sum(first <= step for first in self.warm_from) - 1)

    def is_warm_at(self, step: int) -> bool:
        """Return True after the warm-up."""
        return step >= self.warm_from[-1]

    def is_quiet_at(self, step: int) -> bool:
        """Return True if `is_settled` and the step is after the warm-up."""
        return self.is_settled and self.is_warm_at(step)

    @property
    def is_settled(self) -> bool:
        """True if a plan was chosen, and no race is running or scheduled."""
        return not self.timed and not self.checked and self.turn is None

    # After a step

    def judges_after(self, steps: int) -> bool:
        """Return True if a window of the plan ends after `steps` steps."""
        passed = steps - self.followed_from
        return self.is_quiet_at(steps - 1) and passed > 0 and passed % WINDOW == 0

    # Scheduling

    def free_steps(self, step: int, count: int) -> tuple[int, ...]:
        """Return the first `count` steps from `step` on that are not in `verified`.

        `verified_too` is ignored, because ranks set it at different steps.
        """
        found: list[int] = []
        while len(found) < count:
            if step not in self.verified:
                found.append(step)
            step += 1
        return tuple(found)

    def stay(self) -> None:
        """End the warm-up for all steps, also for earlier ones at which the job may resume."""
        self.warm_from = (0,)

    def be_patient(self, step: int, *, changed: bool) -> None:
        """Pause drift checks: for one window if the plan changed, else twice as long as before."""
        self.patience = 1 if changed else 2 * self.patience
        self.patient_until = step + self.patience * WINDOW

    # Saved and loaded

    def to_json(self, steps: int) -> dict[str, int | None]:
        """Return the data of a state saved after `steps` steps, which may be before the plan began."""
        lasts = {name: getattr(self, name) for name in LASTS}
        return {**lasts, BEGINS: None if self.timed else min(steps, self.warm_from[0]), IS_SETTLED: self.is_settled}

    def resume(self, step: int, saved: Mapping[str, Any] | None = None) -> None:
        """Continue at another step under the same plan.

        Without `saved`, the pause of drift checks ends.
        """
        self.followed_from = step
        for name, value in (("patience", 1), ("patient_until", step)):
            setattr(self, name, value if saved is None else saved[name])
