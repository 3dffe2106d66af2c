"""Draw timelines in characters, one row per stream."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.cost.timeline import Span, Timeline
from fxcomp.plan.kinds import Stream
from fxcomp.report.document import decimals, ms
from fxcomp.report.explanation import bucket_of, kind_of, parts_us
from fxcomp.report.tracks import LANES

_WORKING = (Stream.HOST, Stream.COMPUTE)
_MARKS = {"compute": "█", "compression": "▓", "packing": "░", "exchanges": "▒"}
_BUCKETS = "0123456789abcdefghijklmnopqrstuvwxyz"
_IDLE = "·"
_LABEL = 11  # columns before a timeline's first character


def draw_timelines(named: Sequence[tuple[str, Timeline]], width: int) -> list[str]:
    """Draw timelines on one scale. If the last timeline fills less than half of the scale, repeat it enlarged."""
    scale_us = max(timeline.step_time_us for _, timeline in named)
    name, last = named[-1]
    lines: list[str] = []
    for title, timeline in named:
        lines += [f"  {title}, {_ms(timeline.step_time_us)}", *_rows(timeline, width, scale_us)]
    lines.append(_axis(scale_us, width))
    if last.step_time_us < scale_us / 2:
        lines += [f"  {name}, enlarged", *draw_timeline(last, width)]
    return lines


def draw_timeline(timeline: Timeline, width: int) -> list[str]:
    return [*_rows(timeline, width, timeline.step_time_us), _axis(timeline.step_time_us, width)]


def legend(timelines: Sequence[Timeline]) -> str:
    used = {part for timeline in timelines for part, us in parts_us(timeline).items() if us}
    marks = [f"{mark} {name}" for name, mark in _MARKS.items() if name in used]
    if any(stream not in _WORKING for timeline in timelines for stream in _busy(timeline)):
        marks.append("0-9a-z a bucket on the wire")
    return "   ".join([*marks, f"{_IDLE} idle"])


def _ms(us: float) -> str:
    return f"{ms(us, decimals(us))} ms"


def _axis(scale_us: float, width: int) -> str:
    return f"{'':<{_LABEL}}0{_ms(scale_us):>{_cells(width) - 1}}"


def _cells(width: int) -> int:
    return max(8, width - _LABEL - 1)


def _rows(timeline: Timeline, width: int, scale_us: float) -> list[str]:
    cells = max(1, round(_cells(width) * timeline.step_time_us / scale_us)) if scale_us else _cells(width)
    return [f"  {LANES[stream]:<{_LABEL - 2}}{_row(timeline, stream, cells)}" for stream in _busy(timeline)]


def _busy(timeline: Timeline) -> list[Stream]:
    return [stream for stream in LANES if timeline.busy_us(stream) > 0]


def _row(timeline: Timeline, stream: Stream, cells: int) -> str:
    """Draw a stream with one character per cell (a time interval): the mark that fills most of the cell.

    A cell of the compute stream is drawn as idle if it is at most half full.
    """
    cell_us = timeline.step_time_us / cells
    filled: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in timeline.spans:
        if span.task.stream is not stream or not span.task.duration_us:
            continue
        mark = _mark(span)
        first, last = int(span.start_us / cell_us), min(cells - 1, int(span.end_us / cell_us))
        for cell in range(min(first, cells - 1), last + 1):
            us = min(span.end_us, (cell + 1) * cell_us) - max(span.start_us, cell * cell_us)
            filled[cell][mark] = filled[cell].get(mark, 0.0) + us
    least_us = cell_us / 2 if stream is Stream.COMPUTE else 0.0
    return "".join(_fullest(marks, least_us) for marks in filled)


def _fullest(marks: dict[str, float], least_us: float) -> str:
    if not marks or sum(marks.values()) <= least_us:
        return _IDLE
    return max(marks, key=lambda mark: marks[mark])


def _mark(span: Span) -> str:
    if span.task.stream in _WORKING:
        return _MARKS[kind_of(span.task.name)]
    bucket = bucket_of(span.task.name)
    return "*" if bucket is None else _BUCKETS[bucket % len(_BUCKETS)]
