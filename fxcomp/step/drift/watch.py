"""Time a few of a plan's steps, and keep what each cost took in them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxcomp import compat
from fxcomp.codegen.load import rebound
from fxcomp.codegen.program import Program
from fxcomp.graph.lines import TIMED_METHODS
from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps
from fxcomp.runtime.clock import Clock
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.stopwatch import Stopwatch
from fxcomp.step.calendar import Calendar, Use
from fxcomp.step.drift.predicted_costs import Cost, PredictedCosts, predict_costs
from fxcomp.step.observer import Observer, StepUnderWay

TIMING_US = 300.0
"""The cost of timing a step of 100 lines: 0.3 us a line for two looks at the clock, 0.2 us to read them (measured, AMD
EPYC, both cores busy, 2026-11), and up to 3 us with callbacks and sums (assumed)."""

TIMING_SHARE = 1e-3
"""The share of a job that timing may take."""

MOST_SELDOM = 10
"""At least one in so many steps is timed, so that at most 400 are judged together (assumed)."""


def timing_interval(step_us: float, verified: VerifiedSteps = NO_STEPS, *, works_later: bool = False) -> int:
    """Time one step of about this length in so many: as TIMING_SHARE allows, and verifying leaves steps to time.

    On a device that works later nothing goes aside in a step that is timed, so few are.
    """
    if works_later:
        return MOST_SELDOM
    share = TIMING_US / max(step_us, 1.0) / TIMING_SHARE
    least = 2 if verified.every == 2 else 1  # of each two steps, one is verified
    return min(MOST_SELDOM, max(least, math.ceil(share)))


@dataclass(frozen=True, slots=True)
class _TimedProgram:
    """A program on a runtime, with a clock around each of its lines."""

    program: Program
    runtime: Runtime
    predicted: PredictedCosts
    stopwatch: Stopwatch
    step: Any

    def run(self, arguments: Sequence[Any]) -> Any:
        self.stopwatch.start()
        try:
            return self.step(self.stopwatch.lines, *arguments)
        finally:
            self.stopwatch.stop()


class Watch(Observer):
    """Times some steps of a plan, and keeps what each cost took in them. Each rank has its own."""

    wants = frozenset({Use.TIMED})

    def __init__(self, calendar: Calendar, clock: Clock, pool_clock: Clock | None = None) -> None:
        self._calendar = calendar
        self._clock, self._pool_clock = clock, pool_clock
        self._timed: _TimedProgram | None = None
        self._run: Any = None
        """Runs the step under way with a clock; None if it is not timed."""
        self._pending: int | None = None
        """The step that was timed last, while it has not been read."""
        self._samples: deque[tuple[int, dict[Cost, float]]] = deque(maxlen=2 * calendar.window)
        """The measured costs of timed steps, with the step's number."""

    def forget(self) -> None:
        """Forget everything: another plan is followed."""
        self._timed = self._pending = None
        self._samples.clear()

    def before(self, step: StepUnderWay) -> None:
        """Time a step with a batch like the first one; a profiler would count among its times."""
        self._run = None
        if not step.is_like_first or compat.is_profiling():
            return
        self._collect()
        timed, program, runtime = self._timed, step.program, step.runtime
        if timed is None or timed.program is not program or timed.runtime is not runtime:
            stopwatch = Stopwatch(runtime, TIMED_METHODS, self._clock, self._pool_clock)
            function = rebound(program.module, stopwatch.region)
            timed = self._timed = _TimedProgram(program, runtime, predict_costs(program), stopwatch, function)
        step.run = self._run = timed.run

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:  # noqa: ARG002
        """Keep the times of a step unless it was left out, or somebody else had it run in another way."""
        if step.is_like_first and step.run is self._run and not step.runtime.counters.skipped:
            self._pending = step.number

    def rows(self, steps: int, predicted: PredictedCosts, costs: Sequence[Cost]) -> list[float]:
        """List the numbers that ranks compare: for each cost the prediction and two windows' medians, -1 if unknown.

        A window in which half of the steps or more could not be timed knows nothing. A rank predicts nothing for what
        it does not do.
        """
        self._collect()
        length = self._calendar.timed_every * self._calendar.window
        windows = [[costs for step, costs in self._samples if begin <= step < begin + length]
                   for begin in (steps - 2 * length, steps - length)]  # fmt: skip
        rows: list[float] = []
        for cost in costs:
            rows.append(predicted.predicted_us.get(cost, -1.0))
            for window in windows:
                known = [sample[cost] for sample in window if cost in sample]
                rows.append(statistics.median(known) if 2 * len(known) > self._calendar.window else -1.0)
        return rows

    def _collect(self) -> None:
        """Read the last timed step, now that a device may be done with it."""
        if self._pending is not None and self._timed is not None:
            reading = self._timed.stopwatch.reading()
            if reading is not None:
                self._samples.append((self._pending, self._timed.predicted.measured_us(reading)))
        self._pending = None
