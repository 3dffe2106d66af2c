"""Simulator of a step: tasks on streams.

A stream runs its tasks in order, each after its predecessors. Compute, the compressor pool and the network's software
may share processors. If they request more than there are, each gets a fair share and takes longer.

    compute   ████████████▒▒▒▒▒▒▒▒▒▒████          ▒ slowed: shares one processor with the transport
    inter                 ░░░░░░░░░░

`step_time_us` returns the length alone, in C++ if kernels are built (csrc/timeline.cpp). The Python code specifies it.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxcomp.cluster.cluster import UNSHARED, Processors
from fxcomp.compressors import kernels
from fxcomp.plan.kinds import Stream


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    stream: Stream
    duration_us: float
    """Time with all requested processors."""
    after: tuple[str, ...] = ()
    load: float = 0.0
    """Number of requested processors; for compute, `Processors.compute`."""
    overlap_speed: float = 1.0
    """Relative speed while compute leaves no processor free, because a woken thread waits for a time slice."""


@dataclass(frozen=True, slots=True)
class Span:
    task: Task
    start_us: float
    end_us: float

    @property
    def slowed_us(self) -> float:
        """Time lost for lack of processors."""
        return max(0.0, self.end_us - self.start_us - self.task.duration_us)


@dataclass(frozen=True, slots=True)
class Timeline:
    spans: tuple[Span, ...]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "task": span.task.name,
                "stream": span.task.stream.value,
                "start_ms": span.start_us / 1e3,
                "end_ms": span.end_us / 1e3,
            }
            for span in self.spans
        ]

    @property
    def step_time_us(self) -> float:
        return max((span.end_us for span in self.spans), default=0.0)

    def busy_us(self, stream: Stream) -> float:
        """Return a stream's busy time, including slowdown."""
        return sum(span.end_us - span.start_us for span in self.spans if span.task.stream is stream)

    def slowed_us(self, stream: Stream) -> float:
        return sum(span.slowed_us for span in self.spans if span.task.stream is stream)

    @property
    def done_us(self) -> float:
        """End of all spans except the host's."""
        return max((span.end_us for span in self.spans if span.task.stream is not Stream.HOST), default=0.0)

    @property
    def exposed_us(self) -> float:
        """Time that compute waits for streams other than the host."""
        return self.done_us - self.busy_us(Stream.COMPUTE)


def simulate(tasks: Sequence[Task], processors: Processors = UNSHARED) -> Timeline:
    """Start each task as early as possible."""
    starts, ends = _run(tasks, processors)
    return Timeline(tuple(map(Span, tasks, starts, ends)))


def step_time_us(tasks: Sequence[Task], processors: Processors = UNSHARED) -> float:
    """Return `simulate(tasks, processors).step_time_us` without making spans."""
    if not kernels.available():
        return max(_run(tasks, processors)[1], default=0.0)
    return _step_times(tasks, [array("d", [task.duration_us for task in tasks])], processors)[0]


def step_times_us(
    tasks: Sequence[Task], durations_us: Sequence[Sequence[float]], processors: Processors = UNSHARED
) -> list[float]:
    """Return the step time for each row of task durations."""
    if kernels.available():
        return _step_times(tasks, [array("d", row) for row in durations_us], processors)
    varied = ([replace(task, duration_us=us) for task, us in zip(tasks, row, strict=True)] for row in durations_us)
    return [max(_run(each, processors)[1], default=0.0) for each in varied]


def _step_times(tasks: Sequence[Task], durations: Sequence[array[float]], processors: Processors) -> list[float]:
    number = {task.name: k for k, task in enumerate(tasks)}
    # Arrays fill faster than ctypes'; `_demand` and `_overlap_speed` are inlined to save calls.
    compute, count, is_alone = processors.compute, processors.count, processors.has_spare
    columns = (
        array("i", [_PLACE[task.stream] for task in tasks]),
        durations[0],
        array("d", [compute if task.stream is Stream.COMPUTE else min(task.load, count) for task in tasks]),
        array("d", [1.0] * len(tasks) if is_alone else [task.overlap_speed for task in tasks]),
        array("i", [len(task.after) for task in tasks]),
        array("i", [number[name] for task in tasks for name in task.after]),
    )
    addresses = [ctypes.c_void_p(column.buffer_info()[0]) for column in columns]
    step_time = kernels.function("fxcomp_step_time", ctypes.c_double)
    times: list[float] = []
    for row in durations:
        addresses[1] = ctypes.c_void_p(row.buffer_info()[0])
        times.append(step_time(ctypes.c_int32(len(tasks)), *addresses, ctypes.c_double(count)))
    return times


_PLACE = {stream: place for place, stream in enumerate(Stream)}


def _demand(task: Task, processors: Processors) -> float:
    return processors.compute if task.stream is Stream.COMPUTE else min(task.load, processors.count)


def _overlap_speed(task: Task, processors: Processors) -> float:
    return 1.0 if processors.has_spare else task.overlap_speed


def _run(tasks: Sequence[Task], processors: Processors) -> tuple[list[float], list[float]]:
    state = _State(tasks)
    rates = [1.0] * len(tasks)
    ends, running = state.ends, state.running
    while True:
        state.start_what_may()
        now = [k for k in running if k >= 0]
        if not now:
            break
        computes = running[_PLACE[Stream.COMPUTE]] >= 0
        limits = [_overlap_speed(tasks[k], processors) if computes else 1.0 for k in now]
        shares = _shares([_demand(tasks[k], processors) for k in now], limits, processors.count)
        for k, rate in zip(now, shares, strict=True):
            if math.isinf(ends[k]):
                ends[k] = state.clock + tasks[k].duration_us / rate
            elif rate != rates[k]:
                ends[k] = state.clock + (ends[k] - state.clock) * rates[k] / rate
            rates[k] = rate
        state.end_at(min(ends[k] for k in now))
    assert all(state.done), "tasks wait for each other"
    return state.starts, ends


class _State:
    def __init__(self, tasks: Sequence[Task]) -> None:
        number = {task.name: k for k, task in enumerate(tasks)}
        self.tasks = tasks
        self.after = [[number[name] for name in task.after] for task in tasks]
        self.queues = [[k for k, task in enumerate(tasks) if task.stream is stream] for stream in Stream]
        self.heads, self.running = [0] * len(self.queues), [-1] * len(self.queues)
        self.starts, self.ends, self.done = [0.0] * len(tasks), [math.inf] * len(tasks), [False] * len(tasks)
        self.clock = 0.0

    def start_what_may(self) -> None:
        moved = True
        while moved:
            moved = False
            for place, queue in enumerate(self.queues):
                while self.running[place] < 0 and self.heads[place] < len(queue):
                    k = queue[self.heads[place]]
                    if not all(self.done[j] for j in self.after[k]):
                        break
                    self.heads[place] += 1
                    self.starts[k] = self.clock
                    moved = True
                    if self.tasks[k].duration_us > 0:
                        self.running[place] = k
                    else:
                        self.ends[k], self.done[k] = self.clock, True

    def end_at(self, clock: float) -> None:
        self.clock = clock
        for place, k in enumerate(self.running):
            if k >= 0 and self.ends[k] <= clock:
                self.done[k], self.running[place] = True, -1


LEAST = 1e-9
"""Smaller processor demands count as 0."""


def _shares(demands: Sequence[float], limits: Sequence[float], count: float) -> list[float]:
    """Return each task's speed.

    A task requests demand * limit processors. If `count` processors satisfy all requests, the speed is the limit.
    Otherwise it is the granted processors / the demand: processors are shared in proportion to max(1, demand), and
    the others share the rest of a task that requests less.
    """
    rates, asked, left, weight = list(limits), 0.0, count, 0.0
    weights = [max(1.0, demand) for demand in demands]
    for k, demand in enumerate(demands):  # not sum(), whose rounding depends on Python's version
        asked += demand * limits[k]
        weight += weights[k]
    if asked <= count:
        return rates
    for k in sorted(range(len(demands)), key=lambda k: demands[k] * limits[k] / weights[k]):
        if demands[k] > LEAST:
            got = min(demands[k] * limits[k], left * weights[k] / weight)
            rates[k] = got / demands[k]
            left -= got
        weight -= weights[k]
    return rates


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Return the spans that determine the step's length, in order.

    Each span is a predecessor of the next span, or precedes it on its stream. Contention for processors is ignored.
    """
    before, _ = _queues(timeline)
    spans = {span.task.name: span for span in timeline.spans}
    path: list[Span] = []
    span = _latest(timeline.spans)
    while span is not None:
        path.append(span)
        span = _latest(_earlier(span, spans, before))
    return tuple(reversed(path))


def exposed_by_task(timeline: Timeline) -> dict[str, float]:
    """Return the µs that compute waits for each task; they sum to the timeline's exposed time.

    A wait is attributed to the awaited task that ends last. Time before this task's start is attributed to the task
    that delayed the start.
    """
    before, last = _queues(timeline)
    spans = {span.task.name: span for span in timeline.spans}
    waits: dict[str, float] = {}
    clock = 0.0
    for span in timeline.spans:
        if span.task.stream is Stream.COMPUTE:
            awaited = _latest([spans[name] for name in span.task.after])
            _share_out(awaited, clock, span.start_us, spans, before, waits)
            clock = span.end_us
    last.pop(Stream.HOST, None)
    _share_out(_latest(list(last.values())), clock, timeline.done_us, spans, before, waits)
    return waits


def _queues(timeline: Timeline) -> tuple[dict[str, Span], dict[Stream, Span]]:
    """Return each span's predecessor on its stream, and each stream's last span."""
    before: dict[str, Span] = {}
    last: dict[Stream, Span] = {}
    for span in timeline.spans:
        stream = span.task.stream
        if stream in last:
            before[span.task.name] = last[stream]
        last[stream] = span
    return before, last


def _share_out(
    blocker: Span | None,
    start_us: float,
    end_us: float,
    spans: dict[str, Span],
    before: dict[str, Span],
    waits: dict[str, float],
) -> None:
    while blocker is not None and end_us > start_us:
        begun_us = max(start_us, blocker.start_us)
        if end_us > begun_us:
            name = blocker.task.name
            waits[name] = waits.get(name, 0.0) + end_us - begun_us
        end_us = min(end_us, begun_us)
        blocker = _latest(_earlier(blocker, spans, before))


def _earlier(span: Span, spans: dict[str, Span], before: dict[str, Span]) -> list[Span]:
    name = span.task.name
    return [spans[other] for other in span.task.after] + ([before[name]] if name in before else [])


def _latest(spans: Sequence[Span]) -> Span | None:
    return max(spans, key=lambda span: span.end_us, default=None)
