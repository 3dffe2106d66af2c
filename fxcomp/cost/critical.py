"""Read from a timeline the critical path, and the tasks that compute waits for."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.cost.timeline import Span, Timeline
from fxcomp.plan.streams import Stream


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Return the spans that the step's length depends on, first to last.

    Each one ends when the next may start: it makes what that needs, or occupies its stream until then. A span that only
    slowed one of these, for want of processors, is not in it.
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
    """Return the µs that compute waits for each task, by name; they add up to the timeline's exposed time.

    Every moment in which compute waits belongs to the task it waits for just then: the last to arrive, and before that
    whatever kept it from starting.
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
    _share_out(_latest(list(last.values())), clock, timeline.step_time_us, spans, before, waits)
    return waits


def _queues(timeline: Timeline) -> tuple[dict[str, Span], dict[Stream, Span]]:
    """Return the span that each one follows on its stream, and the last of each stream."""
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
    """Go back from the end of a wait along what it waited for."""
    while blocker is not None and end_us > start_us:
        begun_us = max(start_us, blocker.start_us)
        if end_us > begun_us:
            name = blocker.task.name
            waits[name] = waits.get(name, 0.0) + end_us - begun_us
        end_us = min(end_us, begun_us)
        blocker = _latest(_earlier(blocker, spans, before))


def _earlier(span: Span, spans: dict[str, Span], before: dict[str, Span]) -> list[Span]:
    """Return the spans before a span: its predecessors, and the one ahead on its stream."""
    name = span.task.name
    return [spans[other] for other in span.task.after] + ([before[name]] if name in before else [])


def _latest(spans: Sequence[Span]) -> Span | None:
    return max(spans, key=lambda span: span.end_us, default=None)
