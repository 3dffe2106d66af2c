"""Race the plans with the best predictions in the running job (*runners*), and keep the fastest.

A *turn* is a few steps in a row under one runner.

    heat     first turn of each runner, HEAT steps; the plan in force begins
    rounds   turns of TURN steps for the best MOST_AFTER_HEATS runners, later for the best MOST_LATER, until one runner
             is left or each has COUNTED counted steps
    appeal   another heat for a runner that is out after one heat, if its prediction is near the best runner's
    end      the shortest median step time wins, or the smallest compression error in a statistical tie

The first step of a turn allocates and is not counted. Verified steps belong to no turn. Another step counts if every
rank timed the step. Its time is the time on the slowest rank. `Race` neither communicates nor switches plans.

A runner with fewer than FEW counted steps is compared by its shortest step, because other load only lengthens steps.

The cost of a race is its time minus the time of as many steps under the winner. If predictions hold, a heat costs at
most HEAT · (FAR - 1) = 2 of the winner's steps.
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
"""Number of steps before the race. They run the plan in force, and allocate memory."""

TURN = 4
"""Number of steps of a turn after the heat. With 3, batch sizes that repeat every third step might never count."""

HEAT = 2
"""Number of steps of a runner's first turn."""

COUNTED = 7
"""Counted steps that suffice for a median: 1 of the heat, 3 of each of two turns."""

MOST_AFTER_HEATS, MOST_LATER = 3, 2
"""Maximum number of runners after the heats, and after each later round."""

LONGEST = 48
"""Maximum length of a race, in steps. With 28, one verified step would leave out the last round of four runners."""

FAR = 2.0
"""A runner does not run if its predicted time is more than twice the larger of the best runner's predicted and measured
times. Predictions err by less.
"""

SPREAD = 0.05
"""Relative standard deviation of a step's time (assumed), until ENOUGH steps are counted."""
ENOUGH = 8
LEAST_SPREAD = 0.005
"""Lower bound of the measured spread."""

OUT = 3.0
"""A runner is out if it is slower than the best by more than this, in standard errors."""

OUT_AT_FIRST = 0.5
"""A runner without counted steps is out only if it is more than 50 % slower than the best."""

FEW = 8

NEAR = 0.25
"""A beaten runner predicted within 25 % of the best gets a second heat."""

TIE = 0.02
"""A runner more than 2 % slower than the best never ties with it."""


@dataclass(slots=True)
class _Entrant:
    runner: Runner
    times_ms: list[float] = field(default_factory=list[float])
    """Times of counted steps."""
    first_ms: list[float] = field(default_factory=list[float])
    """Times of the first steps of turns."""
    turns: int = 0
    is_out: bool = False

    @property
    def is_known(self) -> bool:
        return bool(self.times_ms or self.first_ms)

    @property
    def median_ms(self) -> float:
        """Median time of counted steps, or of first steps if none is counted."""
        return statistics.median(self.times_ms or self.first_ms)

    @property
    def at_best_ms(self) -> float:
        """Median, or the shortest time if fewer than FEW steps are counted; infinite without times."""
        if len(self.times_ms) >= FEW:
            return self.median_ms
        return min(self.times_ms + self.first_ms, default=math.inf)


class Race:
    """State of a race, identical on every rank."""

    def __init__(self, runners: Sequence[Runner], step: int, free_steps: Callable[[int, int], tuple[int, ...]]):
        """Begin at `step` with the plan in force. `free_steps` is `Calendar.free_steps`."""
        self.runners = tuple(runners)
        self._entrants = [_Entrant(runner) for runner in runners]
        self._free_steps = free_steps
        self.begins = step
        self._order = list(range(1, len(runners)))
        self._most = MOST_AFTER_HEATS
        self.turn = RaceTurn(0, free_steps(step, HEAT))
        self.result: Raced | None = None

    def end_turn(self, slowest_ms: Sequence[float | None]) -> None:
        """Record a turn's step times in ms (None: not timed), then choose the next turn or end the race."""
        entrant, step = self._entrants[self.turn.number], self.turn.ends
        entrant.turns += 1
        first, *counted = slowest_ms
        entrant.first_ms += [ms for ms in (first,) if ms is not None]
        entrant.times_ms += [ms for ms in counted if ms is not None]
        while self.result is None:
            if not self._order:
                self._end_round(step)
                if self.result is not None:
                    return
            number = self._order.pop(0)
            entrant = self._entrants[number]
            if entrant.turns > 0 or not self._is_far(entrant):
                length = HEAT if entrant.turns == 0 or entrant.is_out else TURN  # a runner that is out appeals
                self.turn = RaceTurn(number, self._free_steps(step, length))
                return
            entrant.is_out = True

    def _is_far(self, entrant: _Entrant) -> bool:
        best = self._best
        return best is not None and entrant.runner.step_us > FAR * max(1e3 * best.median_ms, best.runner.step_us)

    @property
    def _known(self) -> list[_Entrant]:
        return [entrant for entrant in self._entrants if entrant.is_known]

    @property
    def _left(self) -> list[int]:
        return [number for number, entrant in enumerate(self._entrants) if not entrant.is_out]

    @property
    def _best(self) -> _Entrant | None:
        """Runner with the shortest median; runners without counted steps come last."""
        return min(self._known, key=lambda each: (not each.times_ms, each.median_ms), default=None)

    def _end_round(self, step: int) -> None:
        best, left = self._best, self._left
        if best is not None:
            for entrant in self._known:
                entrant.is_out = self._is_beaten(entrant, best)
            tie_ms = (1 + TIE) * min(entrant.at_best_ms for entrant in self._known)
            left = [self._entrants[number] for number in self._left]
            for entrant in sorted(left, key=lambda each: (max(each.at_best_ms, tie_ms), each.runner.loss))[
                self._most :
            ]:
                entrant.is_out = True
            self._most, left = MOST_LATER, self._left
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
        most_us = (1 + NEAR) * best.runner.step_us
        return [
            k
            for k, each in enumerate(self._entrants)
            if each.is_out and each.turns == 1 and each.runner.step_us <= most_us
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
        """Estimate the standard error of the difference of two medians, from the counted steps of all runners."""
        off = [
            abs(ms / each.median_ms - 1) for each in self._entrants for ms in each.times_ms if len(each.times_ms) > 1
        ]
        spread = max(LEAST_SPREAD, 1.48 * statistics.median(off)) if len(off) >= ENOUGH else SPREAD
        errors = [1.25 * spread * each.median_ms / math.sqrt(max(1, len(each.times_ms))) for each in (one, other)]
        return math.hypot(*errors)
