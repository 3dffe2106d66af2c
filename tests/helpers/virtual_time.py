"""Real ranks that train really, on clocks that only what is priced moves: every line takes what its table says.

`slower` multiplies what costs take, by kind and name, from a step on: planted drift without a timed assertion. A whole
step takes what is simulated with that, times what `VirtualTime.surprise` says.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fxcomp.cluster.cluster import Processors
from fxcomp.codegen.program import Program
from fxcomp.cost.timeline import simulate
from fxcomp.graph.lines import TIMED_METHODS, CostKind
from fxcomp.runtime.stopwatch import Stopwatch
from fxcomp.runtime.watched_lines import Call
from fxcomp.step import step_times
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.drift import watch as watching
from fxcomp.step.drift.predicted_costs import Cost, PredictedCosts, predict_costs
from fxcomp.step.execution import Execution
from fxcomp.step.observer import StepUnderWay

Factor = Callable[[Cost], float]


def no_surprise(_: Program) -> float:
    return 1.0


@dataclass
class VirtualTime:
    """A clock, and what moves it. One for a rank."""

    sees_threads: bool
    factor: Factor = lambda _: 1.0
    surprise: Callable[[Program], float] = no_surprise
    """The factor by which a whole step takes longer than its lines explain."""
    now: float = 0.0
    wall_s: float = 0.0
    jitter: float = 0.0
    _ends: dict[Call, float] = field(default_factory=dict)
    _free: float = 0.0
    _state: int = 1

    def look(self) -> float:
        return self.now

    def us(self, start: float, end: float) -> float:
        return end - start

    def begin(self) -> None:
        self._ends.clear()
        self._free = self.now

    def spend(self, call: Call, predicted: PredictedCosts) -> None:
        """Do what a line does."""
        cost = predicted.lines.get(call)
        if cost is not None:
            calls = sum(1 for other in predicted.lines.values() if other == cost)
            self.now += predicted.predicted_us[cost] / calls * self._times(cost)
        for collective in predicted.collectives:
            if collective.launch == call:
                self._ends[call] = self._free = max(self.now, self._free) + collective.predicted_us * self._times(
                    collective.cost
                )
            elif collective.wait == call:
                self.now = max(self.now, self._ends[collective.launch])

    def step_us(self, program: Program, processors: Processors) -> float:
        """Return the time of a whole step, timed line by line or not."""
        costs = predict_costs(program).tasks
        tasks = [span.task for span in program.timeline.spans]
        tasks = [
            replace(t, duration_us=t.duration_us * (self.factor(costs[t.name]) if t.name in costs else 1.0))
            for t in tasks
        ]
        return simulate(tasks, processors).step_time_us * self.surprise(program)

    def end_of(self, call: Call) -> float:
        return self._ends[call]

    def _times(self, cost: Cost) -> float:
        self._state = self._state * 1103515245 % 2**31
        return self.factor(cost) * (1 + self.jitter * (2 * self._state / 2**31 - 1))


@contextmanager
def virtual_time(clock: VirtualTime) -> Generator[None]:
    """Steps compiled here are timed on a virtual clock, each of their lines and as a whole."""

    class Watched(Stopwatch):
        def __init__(self, runtime: Any, *_: Any) -> None:
            super().__init__(runtime, TIMED_METHODS, clock, clock)

        def start(self) -> None:
            clock.begin()
            super().start()

        def _spending(self, call: Callable[[], Call], run: Callable[..., Any]) -> Callable[..., Any]:
            def spent(*arguments: Any, **options: Any) -> Any:
                result = run(*arguments, **options)
                clock.spend(call(), known[-1])
                return result

            return spent

        def line(self, method: str, run: Callable[..., Any]) -> Callable[..., Any]:
            return super().line(method, self._spending(lambda: (method, self._counts[method]), run))

        def region(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            return super().region(name, self._spending(lambda: (name, 0), run))

        def _hear_of(self, call: Call, flight: Any) -> None:  # noqa: ARG002
            self._marks.ends[call] = clock.end_of(call)

    known: list[PredictedCosts] = []

    def remembered(*arguments: Any) -> PredictedCosts:
        known.append(read(*arguments))
        return known[-1]

    def run(execution: Execution, under_way: StepUnderWay, *arguments: Any) -> Any:
        result = really_run(execution, under_way, *arguments)
        clock.wall_s += clock.step_us(under_way.program, under_way.force.decision.costs.processors) / 1e6
        return result

    read, really_run = watching.predict_costs, Execution._run
    wall = SimpleNamespace(look=lambda: clock.wall_s, us=lambda start, end: 1e6 * (end - start))
    with (
        patch.object(watching, "Stopwatch", Watched),
        patch.object(watching, "predict_costs", remembered),
        patch.object(Execution, "_run", run),
        patch.object(step_times, "clock_of", lambda _: wall),
    ):
        yield


def slower(factors: Mapping[tuple[CostKind, str], float]) -> Factor:
    """Costs of a kind and a name take so many times as long; a name of "" stands for all."""
    return lambda cost: factors.get((cost.kind, cost.what), factors.get((cost.kind, ""), 1.0))


def scheduled(step: CompiledStep, every: int, window: int) -> None:
    """Time a compiled step more often than the real clock would allow."""
    step.in_force.calendar.timed_every, step.in_force.calendar.window = every, window
