"""Write steps as a trace in Chrome's JSON format, for Perfetto and chrome://tracing.

process   a step, predicted (dense or this plan) or measured; all begin at 0
thread    a stream
slice     a task, with its bucket, predicted time and source
flow      a bucket, from the compute of its last gradient to its update
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fxcomp.cost.timeline import Span, Timeline
from fxcomp.plan.kinds import Stream
from fxcomp.report.document import decimals, ms
from fxcomp.report.explanation import Explanation, bucket_of, kind_of
from fxcomp.report.tracks import LANES, TaskFacts, Track, facts_of, measured_track, predicted_tracks

Event = Mapping[str, Any]

_LANE_NUMBER = {stream: number for number, stream in enumerate(LANES, start=1)}
_ROUNDING_US = 1e-6
_MOST_BUCKETS = 100_000
"""Number of flow ids reserved per track."""


def to_trace(explanation: Explanation) -> dict[str, Any]:
    """Return predicted and profiled steps as JSON data."""
    tracks = [*predicted_tracks(explanation), *(measured_track(explanation, step) for step in explanation.measured)]
    events = [event for number, track in enumerate(tracks, start=1) for event in _track(explanation, track, number)]
    about = {"plan": explanation.plan.digest, "hardware": explanation.costs.hardware, "batch": explanation.batch}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _track(explanation: Explanation, track: Track, process: int) -> Iterator[Event]:
    facts, timeline = facts_of(explanation, track), track.timeline
    name = track.name if track.is_measured else f"predicted, {track.name}"
    length = ms(timeline.step_time_us, decimals(timeline.step_time_us))
    yield _named(process, 0, "process_name", name=f"{name}, {length} ms")
    yield _named(process, 0, "process_sort_index", sort_index=process)
    for stream, number in _LANE_NUMBER.items():
        if timeline.busy_us(stream) > 0:
            yield _named(process, number, "thread_name", name=LANES[stream])
            yield _named(process, number, "thread_sort_index", sort_index=number)
    for span in timeline.spans:
        if span.end_us > span.start_us:
            yield _slice(span, facts[span.task.name], process, is_measured=track.is_measured)
    for bucket, spans in flows_of(timeline).items():
        yield from _flow(spans, bucket, process)


def _named(process: int, thread: int, what: str, **arguments: str | int) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": arguments}


def _slice(span: Span, known: TaskFacts, process: int, *, is_measured: bool) -> Event:
    arguments: dict[str, Any] = {"grounds": known.grounds.value, "source": known.source}
    if not is_measured:
        arguments["price_us"] = span.task.duration_us
    if known.of:
        arguments |= {"bucket": known.bucket, "of": known.of}
    kind = kind_of(span.task.name) if span.task.stream is Stream.COMPUTE else span.task.stream.value
    place = {"pid": process, "tid": _LANE_NUMBER[span.task.stream]}
    times = {"ts": span.start_us, "dur": span.end_us - span.start_us}
    return {"ph": "X", "name": span.task.name, "cat": kind, **place, **times, "args": arguments}


def flows_of(timeline: Timeline) -> dict[int, list[Span]]:
    """Map each bucket to its spans, from its last gradient to its update, sorted by start."""
    spans = {span.task.name: span for span in timeline.spans}
    own: dict[int, list[Span]] = {}
    for span in timeline.spans:
        bucket = None if kind_of(span.task.name) == "compute" else bucket_of(span.task.name)
        if bucket is not None:
            own.setdefault(bucket, []).append(span)
    return {bucket: found for bucket, each in own.items() if len(found := _with_ends(each, spans)) > 1}


def _with_ends(own: Sequence[Span], spans: Mapping[str, Span]) -> list[Span]:
    """Add the span that computes the bucket's last gradient, and the span of its update."""
    names, begins_us = {span.task.name for span in own}, own[0].start_us
    lasting = [span for span in spans.values() if span.end_us > span.start_us]
    makers = [span for span in lasting if _computes(span) and span.task.name in own[0].task.after]
    makers = makers or [span for span in lasting if _computes(span) and span.end_us <= begins_us + _ROUNDING_US]
    users = [span for span in lasting if _updates(span) and not names.isdisjoint(span.task.after)]
    users.sort(key=lambda span: (not span.task.name.startswith("update"), span.start_us))
    maker = max(makers, key=lambda span: span.end_us, default=None)
    ends = [*([maker] if maker is not None else []), *users[:1]]
    return sorted([*ends, *(span for span in own if span in lasting)], key=lambda span: span.start_us)


def _computes(span: Span) -> bool:
    return span.task.stream is Stream.COMPUTE and kind_of(span.task.name) == "compute"


def _updates(span: Span) -> bool:
    return span.task.stream is Stream.COMPUTE and span.task.name.startswith(("update", "finish"))


def _flow(spans: Sequence[Span], bucket: int, process: int) -> Iterator[Event]:
    """Yield arrows between slices. An arrow ends inside a slice, because viewers find the slice by time."""
    for place, span in enumerate(spans):
        phase = "s" if place == 0 else "f" if place == len(spans) - 1 else "t"
        inside_us = span.start_us + (span.end_us - span.start_us) / 2
        event = {"ph": phase, "cat": "gradient", "name": f"bucket {bucket}", "id": process * _MOST_BUCKETS + bucket}
        binding = {"bp": "e"} if phase == "f" else {}
        yield {**event, "pid": process, "tid": _LANE_NUMBER[span.task.stream], "ts": inside_us, **binding}
