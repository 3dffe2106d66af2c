"""Time a few of a plan's steps, and keep what each cost took in them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxcomp.codegen.load import rebound
from fxcomp.codegen.program import Program
from fxcomp.graph.lines import TIMED_METHODS
from fxcomp.plan.verified_steps import NO_STEPS, VerifiedSteps
from fxcomp.runtime.clock import Clock
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.stopwatch import Stopwatch
from fxcomp.step.drift.predicted_costs import Cost, PredictedCosts, predict_costs

WINDOW = 20
"""The number of timed steps that make a median. Two windows in a row are judged together."""

TIMING_US = 300.0
"""The cost of timing a step of 100 lines: 0.3 us a line for two looks at the clock, 0.2 us to read them (measured, AMD
EPYC, both cores busy, 2026-11), and up to 3 us with callbacks and sums (assumed)."""

TIMING_SHARE = 1e-3
"""The share of a job that timing may take."""

MOST_SELDOM = 10
"""At least one in so many steps is timed, so that at most 400 are judged together (assumed)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One in `every` steps is timed; `window` of them make a median. The calendar says which steps these are."""

    every: int
    window: int = WINDOW

    @classmethod
    def of(cls, step_us: float, verified: VerifiedSteps = NO_STEPS) -> Schedule:
        """Time steps of about this length as often as TIMING_SHARE allows and verifying leaves steps to time."""
        share = TIMING_US / max(step_us, 1.0) / TIMING_SHARE
        least = 2 if verified.every == 2 else 1  # of each two steps, one is verified
        return cls(min(MOST_SELDOM, max(least, math.ceil(share))))

    @property
    def judged_every(self) -> int:
        """After so many steps two windows are full, if every step that should be timed was."""
        return 2 * self.every * self.window


@dataclass(frozen=True, slots=True)
class _TimedProgram:
    """A program on a runtime, with a clock around each of its lines."""

    program: Program
    runtime: Runtime
    predicted: PredictedCosts
    stopwatch: Stopwatch
    step: Any


class Watch:
    """Times some steps of a plan, and keeps what each cost took in them. Each rank has its own."""

    def __init__(self, schedule: Schedule, clock: Clock, pool_clock: Clock | None = None) -> None:
        self.schedule = schedule
        self._clock, self._pool_clock = clock, pool_clock
        self._timed: _TimedProgram | None = None
        self._pending: int | None = None
        """The step that was timed last, while it has not been read."""
        self._samples: deque[tuple[int, dict[Cost, float]]] = deque(maxlen=2 * schedule.window)
        """The measured costs of timed steps, with the step's number."""
        self.begun = 0
        """The first step of the plan that is timed."""

    def restart(self, step: int) -> None:
        """Forget everything: from this step on another plan is followed."""
        self._timed, self._pending, self.begun = None, None, step
        self._samples.clear()

    def is_due(self, steps: int) -> bool:
        """Tell whether ranks judge after so many steps: all at the same one."""
        passed = steps - self.begun
        return passed > 0 and passed % self.schedule.judged_every == 0

    def run(self, step: int, program: Program, runtime: Runtime, arguments: Sequence[Any]) -> Any:
        """Run a step and time it."""
        self._collect()
        timed = self._timed
        if timed is None or timed.program is not program or timed.runtime is not runtime:
            stopwatch = Stopwatch(runtime, TIMED_METHODS, self._clock, self._pool_clock)
            function = rebound(program.module, stopwatch.region)
            timed = self._timed = _TimedProgram(program, runtime, predict_costs(program), stopwatch, function)
        timed.stopwatch.start()
        try:
            result = timed.step(timed.stopwatch.lines, *arguments)
        finally:
            timed.stopwatch.stop()
        self._pending = None if runtime.counters.skipped else step
        return result

    def rows(self, steps: int, predicted: PredictedCosts, costs: Sequence[Cost]) -> list[float]:
        """List the numbers that ranks compare: for each cost the prediction and two windows' medians, -1 if unknown.

        A window in which half of the steps or more could not be timed knows nothing. A rank predicts nothing for what
        it does not do.
        """
        self._collect()
        length = self.schedule.every * self.schedule.window
        windows = [[costs for step, costs in self._samples if begin <= step < begin + length]
                   for begin in (steps - 2 * length, steps - length)]  # fmt: skip
        rows: list[float] = []
        for cost in costs:
            rows.append(predicted.predicted_us.get(cost, -1.0))
            for window in windows:
                known = [sample[cost] for sample in window if cost in sample]
                rows.append(statistics.median(known) if 2 * len(known) > self.schedule.window else -1.0)
        return rows

    def _collect(self) -> None:
        """Read the last timed step, now that a device may be done with it."""
        if self._pending is not None and self._timed is not None:
            reading = self._timed.stopwatch.reading()
            if reading is not None:
                self._samples.append((self._pending, self._timed.predicted.measured_us(reading)))
        self._pending = None
