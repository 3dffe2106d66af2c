"""Timing of a job's first steps, which train densely, to choose its plan. All ranks time the same steps.

    step         first       alternating               last
    way          OVERLAPPED  HELD, OVERLAPPED, ...     ONE_BY_ONE; OVERLAPPED on an asynchronous device

The first step allocates. It counts only if no other OVERLAPPED step was timed.

OVERLAPPED steps run as usual. HELD steps start all collectives at the first wait. ONE_BY_ONE steps also time each
operator. Only `between` communicates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from fxcomp import compat
from fxcomp.planning.timed_steps import TimedStep, Way, around_us
from fxcomp.site import Site
from fxcomp.step.observer import StepUnderWay

LONG_US = 3e6
"""Time of a dense step, in µs, above which fewer steps are timed."""

WAYS = (Way.OVERLAPPED, *(Way.HELD, Way.OVERLAPPED) * 3, Way.ONE_BY_ONE)
WAYS_IF_LONG = (Way.OVERLAPPED, Way.HELD, Way.ONE_BY_ONE)

MOST_TRIES = 3
"""Maximum number of repetitions while a rank lacks timed steps. Then a plan is chosen without timed steps."""


class FirstSteps:
    def __init__(self, site: Site, free_steps: Callable[[int, int], tuple[int, ...]], step: int = 0):
        """Begin at `step`. `free_steps` is `Calendar.free_steps`."""
        self._site, self._free_steps, self._tries = site, free_steps, 0
        self._ways: Sequence[Way] = WAYS
        self.numbers = free_steps(step, len(WAYS))
        self._first = self.numbers[0]
        self._timed: dict[int, TimedStep] = {}
        self._feeds_us: list[float] = []
        """Times of the work before a step's program, in µs."""
        self.are_enough = False
        """True if every rank has timed every way; set when timing ends."""

    def before(self, step: StepUnderWay) -> None:
        if not step.is_like_first or step.number not in self.numbers:
            return
        way = self._way_of(self.numbers.index(step.number))
        timed = self._timed[step.number] = TimedStep(step.program, step.runtime, way)
        step.run = timed.run
        self._feeds_us.append(around_us(lambda: step.force.feed(step.batch), 1))

    def _way_of(self, place: int) -> Way:
        way = self._ways[place]
        return Way.OVERLAPPED if way is Way.ONE_BY_ONE and compat.works_later(self._site.device) else way

    def between(self, steps: int) -> bool:
        """Return True if timing has ended after `steps` steps. Every rank calls it."""
        if steps == self.numbers[0] + 1 and self._ways is WAYS:
            self._shorten()
        if steps <= self.numbers[-1]:
            return False
        self.are_enough = self._all_have_enough()
        if self.are_enough or self._tries == MOST_TRIES:
            return True
        self._tries += 1
        self.numbers = self._free_steps(steps, len(self._ways))
        return False

    def _shorten(self) -> None:
        compat.synchronize(self._site.device)
        took = max((timed.us or 0.0 for timed in self._timed.values()), default=0.0)
        everyone = self._site.gather_numbers("how long the first step takes", [took])
        if max(us for (us,) in everyone) > LONG_US:
            self._ways, self.numbers = WAYS_IF_LONG, self.numbers[: len(WAYS_IF_LONG)]

    def _all_have_enough(self) -> bool:
        compat.synchronize(self._site.device)
        wanted = {self._way_of(place) for place in range(len(self._ways))}
        has = wanted <= {timed.way for timed in self.steps}
        return all(everywhere for (everywhere,) in self._site.gather_numbers("which first steps were timed", [has]))

    @property
    def steps(self) -> list[TimedStep]:
        whole = {number: timed for number, timed in self._timed.items() if timed.us is not None}
        others = [timed for number, timed in whole.items() if number != self._first]
        return others if any(timed.way is Way.OVERLAPPED for timed in others) else list(whole.values())

    @property
    def feed_us(self) -> float:
        """Median time of the work before a step's program, in µs."""
        return statistics.median(self._feeds_us)
