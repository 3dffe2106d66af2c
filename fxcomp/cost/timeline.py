"""Run tasks on streams, on paper: the only simulator and the only clock that we predict with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Stream(Enum):
    """A queue in which work runs in order."""

    COMPUTE = "compute"  # the device; compressors placed on it run here too
    INTRA = "intra"  # the links inside a host
    INTER = "inter"  # the links between hosts
    D2H = "d2h"
    H2D = "h2d"
    CPU = "cpu"  # the compressor pool

    # Members are single objects; Enum's own hash runs in Python and took a third of the simulator's time.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Task:
    """Work that occupies one stream for a while, after other work."""

    name: str
    stream: Stream
    duration_us: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    task: Task
    start_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.task.duration_us


@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of a step: the prediction."""

    spans: tuple[Span, ...]

    @property
    def step_time_us(self) -> float:
        return max((span.end_us for span in self.spans), default=0.0)

    def busy_us(self, stream: Stream) -> float:
        return sum(span.task.duration_us for span in self.spans if span.task.stream is stream)

    @property
    def exposed_us(self) -> float:
        """How long compute stands still: the step without what compute does itself."""
        return self.step_time_us - self.busy_us(Stream.COMPUTE)


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run tasks in the order given, each as soon as its stream and its predecessors allow."""
    starts, _ = _run(tasks)
    return Timeline(tuple(Span(task, start) for task, start in zip(tasks, starts, strict=True)))


def step_time_us(tasks: Sequence[Task]) -> float:
    """`simulate(tasks).step_time_us` without the spans, for a search that asks thousands of times."""
    _, end = _run(tasks)
    return end


def _run(tasks: Sequence[Task]) -> tuple[list[float], float]:
    """When each task starts, and when the last one ends."""
    free = dict.fromkeys(Stream, 0.0)
    end: dict[str, float] = {}
    starts: list[float] = []
    for task in tasks:
        stream = task.stream
        start = free[stream]
        for name in task.after:
            if end[name] > start:
                start = end[name]
        starts.append(start)
        free[stream] = end[task.name] = start + task.duration_us
    return starts, max(free.values())
