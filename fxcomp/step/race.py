"""Let the few best plans take turns in the running job, and keep the one that is fastest there.

    heats    every runner, the plan in force first: HEAT steps
    rounds   those that may still win, TURN steps each, until one is left or all have COUNTED steps
    appeals  those that are out after a heat alone, though predicted to be near the best: HEAT steps once more
    end      the least median stays; of those that noise hides from it, the one that loses least of the gradient

A turn's first step is not counted: it allocates. Steps that are verified belong to no turn. A step counts only where
every rank timed it, by the slowest rank's time. All ranks keep the same numbers, so they turn at the same steps.
Nothing here communicates, and nothing is switched: the schedule enters the turns.

What else the machine does makes steps longer, never shorter. So until FEW steps of a runner are counted its shortest
one stands for it, and a heat in a bad moment is run again in another one.

What a race costs, in steps of the winner, is what the others' steps take beyond it. A runner that takes x times as
long runs its heat, which costs HEAT · (x - 1), and is out. A turn that is expected to bring the whole above BUDGET is
cut to one step, or left out where even that is too much. BUDGET is 2 % of the first thousand steps: 20 steps. Dense
that takes five times as long costs 8 of them, bf16 that takes three times as long 4; a runner that is as fast as the
winner costs what its turns' first steps take longer. A turn can exceed the budget where the prediction is far too low.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fxcomp.search.decision import Raced
from fxcomp.search.runners import Runner
from fxcomp.step.calendar import RaceTurn

WARM_STEPS = 2
"""The first steps under a plan, which allocate, are no part of a race."""

TURN = 4
"""The steps of a turn."""

HEAT = 2
"""The steps of a runner's first turn."""

COUNTED = 12
"""So many counted steps are enough for a median."""

LONGEST = 100
"""A race ends after so many steps, whatever is known."""

BUDGET = 0.02 * 1000
"""The most that a race may cost, in steps of the best runner."""

SPREAD = 0.05
"""The relative standard deviation of a step's time (assumed), until ENOUGH steps are counted."""
ENOUGH = 8
LEAST_SPREAD = 0.005
"""Steps are never taken to be steadier than this."""

OUT = 3.0
"""A runner is out when it is slower than the best by so many standard errors."""

OUT_AT_FIRST = 0.5
"""Relative: a runner of which there is only a turn's first step is out if it is slower than the best by more."""

FEW = 8
"""A runner with fewer counted steps is judged by the shortest of all its steps."""

NEAR = 0.25
"""Relative: a runner that is predicted to be slower than the best by no more is heard a second time."""

TIE = 0.02
"""Relative: a runner that is slower than the best by more never ties with it, however noisy the steps are."""


@dataclass(slots=True)
class _Entrant:
    """A runner, with what is known of it by now."""

    runner: Runner
    times_ms: list[float] = field(default_factory=list[float])
    """The counted steps."""
    first_ms: list[float] = field(default_factory=list[float])
    """The first steps of turns."""
    turns: int = 0
    is_beaten: bool = False
    is_too_dear: bool = False
    """The budget has not one more step of it."""

    @property
    def is_known(self) -> bool:
        return bool(self.times_ms or self.first_ms)

    @property
    def median_ms(self) -> float:
        """The median of counted steps; of first steps where there are no others."""
        return statistics.median(self.times_ms or self.first_ms)

    @property
    def is_out(self) -> bool:
        return self.is_beaten or self.is_too_dear

    @property
    def at_best_ms(self) -> float:
        """The median; the shortest of all steps where FEW are not counted yet."""
        return self.median_ms if len(self.times_ms) >= FEW else min(self.times_ms + self.first_ms)


class Race:
    """A race of a few plans: whose turn it is, until which step, and who has won. The same on every rank."""

    def __init__(self, runners: Sequence[Runner], step: int, free_steps: Callable[[int, int], tuple[int, ...]]):
        """Begin after `step` steps with the first runner, which is followed now; the calendar gives `free_steps`."""
        self.runners = tuple(runners)
        self._entrants = [_Entrant(runner) for runner in runners]
        self._free_steps = free_steps
        self.begins = step
        """The race begins after so many steps."""
        self._order = list(range(1, len(runners)))
        """Those that have yet to run in this round."""
        self._spent_ms = 0.0
        self.turn = RaceTurn(0, free_steps(step, HEAT))
        """The turn that is on, or the first one to come."""
        self.result: Raced | None = None
        """Set when the race is over."""

    def end_turn(self, slowest_ms: Sequence[float | None]) -> None:
        """Note what the steps of a turn took, None where it is not known; then it is another one's turn."""
        entrant, step = self._entrants[self.turn.number], self.turn.ends
        entrant.turns += 1
        first, *counted = slowest_ms
        entrant.first_ms += [ms for ms in (first,) if ms is not None]
        entrant.times_ms += [ms for ms in counted if ms is not None]
        best_ms = self._best_ms
        if best_ms is not None:
            self._spent_ms += sum(max(0.0, ms - best_ms) for ms in slowest_ms if ms is not None)
        while self.result is None:
            if not self._order:
                self._end_round(step)
                if self.result is not None:
                    return
            number = self._order.pop(0)
            length = self._length_for(self._entrants[number])
            if length:
                self.turn = RaceTurn(number, self._free_steps(step, length))
                return
            self._entrants[number].is_too_dear = True

    def _length_for(self, entrant: _Entrant) -> int:
        """Choose the length of a turn by what it is expected to cost; 0 if the budget has not one step of it.

        What is expected to cost nothing runs, whatever others have cost.
        """
        best_ms, length = self._best_ms, HEAT if entrant.turns == 0 or entrant.is_beaten else TURN
        if best_ms is None:
            return length
        expected_ms = entrant.median_ms if entrant.is_known else entrant.runner.step_us / 1e3
        more_ms, left_ms = max(0.0, expected_ms - best_ms), BUDGET * best_ms - self._spent_ms
        return length if more_ms == 0 or length * more_ms <= left_ms else int(more_ms <= left_ms)

    @property
    def _known(self) -> list[_Entrant]:
        return [entrant for entrant in self._entrants if entrant.is_known]

    @property
    def _left(self) -> list[int]:
        return [number for number, entrant in enumerate(self._entrants) if not entrant.is_out]

    @property
    def _best(self) -> _Entrant | None:
        """The least median; one of counted steps before one of first steps alone."""
        return min(self._known, key=lambda each: (not each.times_ms, each.median_ms), default=None)

    @property
    def _best_ms(self) -> float | None:
        return None if self._best is None else self._best.median_ms

    def _end_round(self, step: int) -> None:
        """See who is out; begin another round, or end the race."""
        best, left = self._best, self._left
        if best is not None:
            for entrant in self._known:
                entrant.is_beaten = self._is_beaten(entrant, best)
            left = self._left
            if len(left) == 1 or all(len(self._entrants[k].times_ms) >= COUNTED for k in left):
                left = self._appeals(best)
        if not left or self._free_steps(step, TURN * len(left))[-1] >= self.begins + LONGEST:
            self._finish(step)
        else:
            self._order = left

    def _is_beaten(self, entrant: _Entrant, best: _Entrant) -> bool:
        margin_ms = OUT * self._standard_error(entrant, best)
        if not entrant.times_ms:
            margin_ms = max(margin_ms, OUT_AT_FIRST * best.median_ms)
        return entrant.at_best_ms - best.median_ms > margin_ms

    def _appeals(self, best: _Entrant) -> list[int]:
        """Name those that are out after one heat, though predicted to be near the best."""
        most_us = (1 + NEAR) * best.runner.step_us
        return [
            k
            for k, each in enumerate(self._entrants)
            if each.is_beaten and not each.is_too_dear and each.turns == 1 and each.runner.step_us <= most_us
        ]

    def _finish(self, step: int) -> None:
        winner = self._winner()
        runners = tuple(
            replace(each.runner, measured_ms=each.median_ms if each.is_known else None, steps=len(each.times_ms))
            for each in self._entrants
        )
        stays_ms = self._entrants[winner].median_ms if self._entrants[winner].is_known else math.nan
        all_ms = [ms for each in self._entrants for ms in (*each.first_ms, *each.times_ms)]
        cost_ms = sum(all_ms) - len(all_ms) * stays_ms if all_ms else 0.0
        self.result = Raced(runners, winner, self.begins, step, cost_ms)

    def _winner(self) -> int:
        """Find the fastest; where noise hides the difference, the one that loses least."""
        best = self._best
        if best is None:
            return 0  # no step was timed by all ranks: the plan in force stays
        ties: list[int] = []
        for k, entrant in enumerate(self._entrants):
            if entrant is best:
                ties.append(k)
            elif entrant.times_ms and not entrant.is_out:
                behind_ms = entrant.median_ms - best.median_ms
                if behind_ms <= min(self._standard_error(entrant, best), TIE * best.median_ms):
                    ties.append(k)
        return min(ties, key=lambda k: (self._entrants[k].runner.loss, self._entrants[k].median_ms))

    def _standard_error(self, one: _Entrant, other: _Entrant) -> float:
        """Estimate the standard error of the difference of two medians, by the spread of all counted steps."""
        off = [
            abs(ms / each.median_ms - 1) for each in self._entrants for ms in each.times_ms if len(each.times_ms) > 1
        ]
        spread = max(LEAST_SPREAD, 1.48 * statistics.median(off)) if len(off) >= ENOUGH else SPREAD  # normal
        errors = [1.25 * spread * each.median_ms / math.sqrt(max(1, len(each.times_ms))) for each in (one, other)]
        return math.hypot(*errors)
