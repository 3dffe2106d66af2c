"""Let a hook's plan and the best dense one take turns, where the prediction may be wrong about which is faster.

    pass     8 ... 13   14 ... 19   20 ... 25   26 ... 31
    follows  the plan   dense       the plan    dense       ─► the slowest rank's medians ─► who stays

A plan that is predicted to be much faster is followed without a trial.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fxcomp import compat
from fxcomp.frontends.hook_program import HookProgram, Layout
from fxcomp.runtime.clock import Clock
from fxcomp.search.decision import Decision
from fxcomp.state.gradient_state import GradientState

BLOCK, BLOCKS = 6, 4
"""Passes of a turn, of which the first does not count, and turns."""

SURE = 0.7
"""A plan needs no trial if it is predicted to take at most so much of a dense step."""


@dataclass(slots=True)
class Followed:
    """A decision that passes follow, with what it keeps and its programs."""

    decision: Decision
    state: GradientState
    programs: dict[Layout, HookProgram] = field(default_factory=dict[Layout, HookProgram])
    scale: float = 1.0
    """The factor of the loss that what is kept is in the unit of."""

    def follow_scale(self, scale: float) -> None:
        """Let what is kept be in the unit of another factor of the loss."""
        if scale != self.scale:
            self.state.multiply(scale / self.scale)
            self.scale = scale

    def tell(self, note: str) -> None:
        """Add to what a report says of the decision."""
        self.decision = replace(self.decision, notes=(*self.decision.notes, note))

    def take_over(self, other: Followed, ranks: int) -> None:
        """Bring with the next gradients what another state owes, which goes on no more."""
        other.follow_scale(self.scale)
        self.state.also_owe(other.state.owed_here(other.decision.plan.sizes, ranks))


def needs_trial(decision: Decision) -> bool:
    """Tell whether the prediction leaves room for doubt that the chosen plan is faster than dense."""
    choice = decision.choice
    if choice is None or decision.dense is None or decision.plan.is_dense:
        return False
    return choice.step_us > SURE * choice.dense_us


Lane = TypeVar("Lane")


class Trial(Generic[Lane]):
    """Two lanes that take turns: the plan, and dense."""

    def __init__(self, plan: Lane, dense: Lane, first: int, clock: Clock) -> None:
        self.lanes = (plan, dense)
        self._first, self._clock = first, clock
        self._looks: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = ([], [])
        self._last: Any = None

    def lane_at(self, number: int) -> Lane:
        """Return what a pass follows."""
        return self.lanes[self._lane(number)]

    def _lane(self, number: int) -> int:
        return max(0, number - self._first) // BLOCK % 2

    def end_pass(self, number: int) -> None:
        """Time a pass from the end of the one before."""
        now = self._clock.look()
        if self._last is not None and number >= self._first and (number - self._first) % BLOCK:
            self._looks[self._lane(number)].append((self._last, now))
        self._last = now

    def is_over_after(self, number: int) -> bool:
        return number + 1 >= self._first + BLOCK * BLOCKS

    def medians_us(self, device: Any) -> list[float]:
        """What a pass takes here under the plan, and dense; waits for the device."""
        compat.synchronize(device)
        return [statistics.median(self._clock.us(*looks) or 0.0 for looks in lane) for lane in self._looks]


def said(plan_us: float, dense_us: float) -> str:
    """Write the note on a trial."""
    who = "dense is followed" if plan_us > dense_us else "the plan stays"
    return f"passes took {plan_us / 1e3:.4g} ms under the plan and {dense_us / 1e3:.4g} dense, in turns: {who}"
