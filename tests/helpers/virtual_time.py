"""Real ranks that train really, on clocks that only what is priced moves: a step takes what its timeline says.

`slower` multiplies what tasks take, by the stream or the line that they are, from a step on: planted drift without a
timed assertion. A whole step takes what is simulated with that, times what `VirtualTime.surprise` says.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fxcomp.cluster.cluster import Processors
from fxcomp.codegen.program import Program
from fxcomp.cost.timeline import simulate
from fxcomp.graph.lines import timed_lines
from fxcomp.graph.regions import cut
from fxcomp.plan.kinds import Stream
from fxcomp.planning.decide import Planner
from fxcomp.step import step_times
from fxcomp.step.execution import Execution
from fxcomp.step.observer import StepUnderWay

LINKS = "links"
"""All collectives."""


def no_surprise(_: Program) -> float:
    return 1.0


@dataclass
class VirtualTime:
    """A clock, and what moves it. One for a rank."""

    factors: Mapping[str, float] | None = None
    """By a line's method, or LINKS: how much longer such tasks take."""
    surprise: Callable[[Program], float] = no_surprise
    """The factor by which a whole step takes longer than its tasks explain."""
    wall_s: float = 0.0

    def step_us(self, program: Program, processors: Processors) -> float:
        """Return the time of a whole step."""
        factors = self.factors or {}
        methods = {node.name: line.method for node, _, line in timed_lines(cut(program.graph))}
        tasks = [
            replace(task, duration_us=task.duration_us * factors.get(methods.get(task.name, ""), 1.0))
            if task.stream not in (Stream.INTER, Stream.INTRA)
            else replace(task, duration_us=task.duration_us * factors.get(LINKS, 1.0))
            for task in (span.task for span in program.timeline.spans)
        ]
        return simulate(tasks, processors).step_time_us * self.surprise(program)


@contextmanager
def virtual_time(clock: VirtualTime) -> Generator[None]:
    """Steps compiled here are timed on a virtual clock."""

    def run(execution: Execution, under_way: StepUnderWay, *arguments: Any) -> Any:
        result = really_run(execution, under_way, *arguments)
        clock.wall_s += clock.step_us(under_way.program, under_way.force.decision.costs.processors) / 1e6
        return result

    def sum_us(_: Planner, size: int) -> float:
        return size * (clock.factors or {}).get(LINKS, 1.0)

    really_run = Execution._run
    wall = SimpleNamespace(look=lambda: clock.wall_s, us=lambda start, end: 1e6 * (end - start))
    with (
        patch.object(Execution, "_run", run),
        patch.object(step_times, "Clock", lambda _: wall),
        patch.object(Planner, "sum_us", sum_us),
    ):
        yield
