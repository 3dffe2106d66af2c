"""Let plans take turns in the running job until one is measured best: end each turn, and say whose the next one is.

`Race` has the rules, and whoever follows plans, the step or the backward passes of a hook, has the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxcomp.search.decision import Raced
from fxcomp.search.runners import Runner
from fxcomp.site import Site
from fxcomp.state.saved_state import Given
from fxcomp.step.calendar import Calendar
from fxcomp.step.observer import Observer
from fxcomp.step.race import LONGEST, WARM_STEPS, Race
from fxcomp.step.step_times import StepTimes


class Referee(Observer):
    """Holds races, one at a time. Every rank calls it after the same steps."""

    def __init__(
        self,
        calendar: Calendar,
        times: StepTimes,
        site: Site,
        take_turn: Callable[[int], object],
        settle: Callable[[Raced], object],
    ):
        """`take_turn` follows the plan of a number, `settle` the winner of a race that is over."""
        self._calendar, self._times, self._site = calendar, times, site
        self._take_turn, self._settle = take_turn, settle
        self._race: Race | None = None
        """The race that is on, or due."""
        self.raced: Raced | None = None
        """The last race that is over."""

    @property
    def is_racing(self) -> bool:
        """Plans take turns, or will soon: nothing is compared with its prediction."""
        return self._race is not None

    def takes_turns(self, step: int) -> bool:
        """Return whether a race is on after so many steps."""
        return self._race is not None and step >= self._race.begins

    def note(self, step: int) -> str:
        """Tell a race that is on, or due; empty if there is none."""
        if self.takes_turns(step):
            return f"plans are racing: they take turns until one is measured best, in {LONGEST} steps at the most"
        return "" if self._race is None else f"plans will race from step {self._race.begins} on"

    def line_up(self, runners: Sequence[Runner], step: int) -> None:
        """Let plans race, the first of which is followed now, once it is warm: not in a warm-up of error feedback."""
        self._race = Race(runners, max(step, self._calendar.warm_from[-1]) + WARM_STEPS, self._calendar)

    def call_off(self) -> None:
        """Hold no race: another plan is followed."""
        self._race = self._calendar.turn = None

    def between(self, steps: int) -> None:
        """Agree on what a turn's steps took, and let the next plan have its turn, or the best one stay."""
        race = self._race
        if race is None or steps != race.turn.ends:
            return
        race.end_turn(self._times.slowest(race.turn.steps, self._site))
        self._times.forget()
        if race.result is None:
            self._take_turn(race.turn.number)
        else:
            self._race, self.raced = None, race.result
            self._settle(race.result)

    def wait(self, step: int) -> None:
        """Let a race that is not over begin later: a warm-up lasts longer, or a state is loaded."""
        if self._race is not None:
            self.line_up(self._race.runners, step)

    def resume(self, steps: int, given: Given) -> None:  # noqa: ARG002
        """Let a race that was not over begin again."""
        self.wait(steps)
