"""Time every emitted line of a few steps on this rank, as a timeline to compare with the predicted one.

step.profile(steps=5)          the next five steps without another use
step.report()                  shows the timed steps next to the prediction
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxcomp.codegen.program import Program
from fxcomp.cost.timeline import Span, Task, Timeline
from fxcomp.errors import BadOption
from fxcomp.graph.edit import value_bytes
from fxcomp.graph.info import info
from fxcomp.graph.lines import TIMED_METHODS, Line, timed_lines
from fxcomp.graph.regions import Region, cut
from fxcomp.plan.kinds import POOL, Stream
from fxcomp.plan.plan import Plan
from fxcomp.planning.timed_steps import TimedStep, Way
from fxcomp.runtime.stopwatch import Call, Reading
from fxcomp.step.calendar import Use
from fxcomp.step.observer import Observer, StepUnderWay

_WANTED = frozenset({None})
"""Only steps without another use, because other uses take longer or follow racing plans."""


@dataclass(slots=True)
class _Profiled:
    number: int
    plan: Plan
    timed: TimedStep
    timeline: Timeline | None = None

    def read(self) -> Timeline | None:
        """Return the timeline; None before the device has finished."""
        reading = None if self.timeline is not None else self.timed.reading()
        if reading is not None:
            self.timeline = measured_timeline(self.timed.program, reading)
        return self.timeline


class Profiler(Observer):
    """Times the lines of steps on request. Ranks do not communicate."""

    def __init__(self) -> None:
        self.wants: frozenset[Use | None] = frozenset()
        self._steps: list[_Profiled] = []
        self._asked = 0
        self._under_way: _Profiled | None = None
        self._run: Any = None

    def begin(self, steps: int) -> None:
        """Time the next `steps` steps, and drop earlier timelines. Raises BadOption."""
        if steps < 1:
            raise BadOption(f"step.profile(steps=...) takes a number of steps, 1 or more; it is {steps}")
        self._steps, self._asked, self.wants = [], steps, _WANTED

    def measured(self, plan: Plan) -> Mapping[int, Timeline]:
        """Return the timelines of steps under a plan, by step number."""
        found = {each.number: each.read() for each in self._steps if each.plan == plan}
        return {number: timeline for number, timeline in found.items() if timeline is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        if len(self._steps) >= self._asked:
            return ()
        return (f"step.profile: {len(self._steps)} of {self._asked} steps are timed by now",)

    def before(self, step: StepUnderWay) -> None:
        self._under_way = self._run = None
        if not step.is_like_first:
            return
        timed = TimedStep(step.program, step.runtime, Way.OVERLAPPED, TIMED_METHODS)
        step.run = self._run = timed.run
        self._under_way = _Profiled(step.number, step.force.plan, timed)

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:  # noqa: ARG002
        if self._under_way is None or step.run is not self._run or step.runtime.counters.skipped:
            return
        self._steps.append(self._under_way)
        if len(self._steps) >= self._asked:
            self.wants = frozenset()


def measured_timeline(program: Program, reading: Reading) -> Timeline:
    """Return the timeline of a timed step, with the prediction's task names. Gaps are times when compute waited."""
    predicted = {span.task.name: span.task for span in program.timeline.spans}
    spans = [_as(predicted, *each) for each in _measured(program, reading)]
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_us)))


_Measured = tuple[str, Stream, float, float]
"""Task name, stream, start and end in µs."""


def _measured(program: Program, reading: Reading) -> Iterator[_Measured]:
    pieces = cut(program.graph)
    for piece in pieces:
        if isinstance(piece, Region) and (piece.name, 0) in reading.main:
            yield piece.name.replace("_", " "), Stream.COMPUTE, *reading.main[piece.name, 0]
    lines = list(timed_lines(pieces))
    for node, call, line in lines:
        if line.method not in ("wait", "d2h", "h2d"):
            yield from _line(node, call, line, reading)
    yield from _on_wires(_collectives(lines), reading)


@dataclass(frozen=True, slots=True)
class _Collective:
    name: str
    launch: Call
    wait: Call | None
    stream: Stream
    on_pool: bool

    def end_us(self, reading: Reading) -> float | None:
        """Return the end that the backend reports, in µs, or the end of the wait, which may be later."""
        if self.launch in reading.ends:
            return reading.ends[self.launch]
        times = reading.pool if self.on_pool else reading.main
        return times[self.wait][1] if self.wait in times else None


def _collectives(lines: Sequence[tuple[Node, Call, Line]]) -> Iterator[_Collective]:
    calls = {node: call for node, call, _ in lines}
    for node, call, line in lines:
        # Ranks other than the root may have no data.
        if line.method == "launch" and (value_bytes(node.args[0]) or value_bytes(node)):
            wait = next((calls[user] for user in node.users if user in calls and calls[user][0] == "wait"), None)
            on_pool = any(info(source).stream in (*POOL, Stream.D2H) for source in node.all_input_nodes)
            yield _Collective(node.name, call, wait, info(node).stream or Stream.INTER, on_pool)


def _line(node: Node, call: Call, line: Line, reading: Reading) -> Iterator[_Measured]:
    name = f"start {node.name}" if line.method == "launch" else node.name
    if call in reading.pool:
        stream = Stream.CPU if line.method == "launch" else info(node).stream or Stream.CPU
        yield name, stream, *reading.pool[call]
    elif call in reading.main:
        yield name, Stream.COMPUTE, *reading.main[call]


def _on_wires(collectives: Iterable[_Collective], reading: Reading) -> Iterator[_Measured]:
    """Yield collectives. Each occupies its link from its launch, or from the end of the link's previous collective."""
    known: list[tuple[float, float, _Collective]] = []
    for each in collectives:
        times, end_us = reading.pool if each.on_pool else reading.main, each.end_us(reading)
        if each.launch in times and end_us is not None:
            known.append((end_us, times[each.launch][1], each))
    free_us: dict[Stream, float] = {}
    for end_us, launched_us, each in sorted(known, key=lambda one: one[0]):
        start_us = max(launched_us, free_us.get(each.stream, 0.0))
        if end_us > start_us:
            free_us[each.stream] = end_us
            yield each.name, each.stream, start_us, end_us


def _as(predicted: Mapping[str, Task], name: str, stream: Stream, start_us: float, end: float) -> Span:
    known = predicted.get(name)
    return Span(Task(name, stream, end - start_us, known.after if known is not None else ()), start_us, end)
