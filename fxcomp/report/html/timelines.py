"""Draw tracks (predicted or measured steps) on one scale, and list all tasks.

Positions are percentages of the width, so that zooming does not scale text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxcomp.cost.timeline import Span, critical_path
from fxcomp.plan.kinds import WIRES, Stream
from fxcomp.report.document import Table, decimals, ms
from fxcomp.report.explanation import Explanation, kind_of
from fxcomp.report.html.line_plot import round_step
from fxcomp.report.html.render import Drawing, drawn
from fxcomp.report.tracks import LANES, Grounds, TaskFacts, Track, facts_of

_TICKS, _FINE = 8, 8  # intervals between ticks, and parts of an interval once zoomed
_THIN = 0.12  # percent of the width below which a task gets a visible stroke
_NUMBERED = 1.4  # percent of the width from which a task shows its bucket
_CAPTION = (
    "Zoom with the buttons, or with Ctrl and the wheel; point at a task for its price and the price's source."
    " Red underlines the critical path, which determines the step's length."
)
_KINDS = {
    "compute": "compute",
    "compression": "compression",
    "packing": "packing, starting collectives",
    "exchanges": "the loss function's exchanges",
    "wire": "a bucket on the wire or in a copy, by number",
}

Told = tuple[Track, Mapping[str, TaskFacts]]


class _Row(NamedTuple):
    """A track's title, or a stream's tasks with the step's end in percent of the width."""

    name: str
    end: float = 0.0
    tasks: Sequence[_Task] = ()


class _Task(NamedTuple):
    """A task's rectangle, in percent of the width, with CSS classes, tooltip and bucket index."""

    left: float
    width: float
    kind: str
    words: str
    number: int | None
    is_critical: bool


def draw(explanation: Explanation, tracks: Sequence[Track]) -> Sequence[Drawing]:
    """Draw all tracks on one scale.

    If the last track is shorter than half of the longest, a second drawing shows all such short tracks, enlarged.
    """
    told = [(track, facts_of(explanation, track)) for track in tracks]
    scale_us = max(track.timeline.step_time_us for track in tracks)
    drawings = [_figure("", told, scale_us)]
    small = [each for each in told if 0 < each[0].timeline.step_time_us < scale_us / 2]
    if small and small[-1] is told[-1]:
        larger_us = max(track.timeline.step_time_us for track, _ in small)
        drawings.append(_figure(", ".join(track.name for track, _ in small), small, larger_us))
    used = {_kind(span) for each in tracks for span in each.timeline.spans if span.task.duration_us}
    marks = [*((kind, word) for kind, word in _KINDS.items() if kind in used), ("mark", "critical path")]
    return [*drawings, drawn("paragraph", _CAPTION, "dim"), drawn("legend", marks)]


def list_tasks(explanation: Explanation, tracks: Sequence[Track]) -> Drawing:
    """List every task of every track. A task refers to its source by number."""
    sources: dict[str, int] = {}
    return drawn("tasks", [(track.name, _table(explanation, track, sources)) for track in tracks], sources)


def _table(explanation: Explanation, track: Track, sources: dict[str, int]) -> Table:
    digits, facts = decimals(track.timeline.step_time_us) + 1, facts_of(explanation, track)
    rows: list[Sequence[str]] = []
    for span in sorted(track.timeline.spans, key=lambda span: span.start_us):
        task, known = span.task, facts[span.task.name]
        if known.grounds is not Grounds.NONE:
            number = sources.setdefault(_source(known), len(sources) + 1)
            times = [ms(us, digits) for us in (span.start_us, span.end_us - span.start_us, task.duration_us)]
            rows.append((task.name, LANES[task.stream], *times, f"{known.grounds.value} ({number})", known.of))
    names = ("task", "on", "from ms", "ms", "price ms", "by", "bucket")
    return Table(names, rows, text=("task", "on", "by", "bucket"), optional=("bucket",))


def _source(known: TaskFacts) -> str:
    grounds, source = known.grounds.value, known.source
    return source if source.startswith(grounds.removesuffix("d")) else f"{grounds}: {source}"


def _figure(title: str, told: Sequence[Told], scale_us: float) -> Drawing:
    rows: list[_Row] = []
    for track, facts in told:
        length_us = track.timeline.step_time_us
        rows.append(_Row(f"{track.name}, {ms(length_us, decimals(length_us))} ms"))
        critical = set[str]() if track.is_measured else {span.task.name for span in critical_path(track.timeline)}
        for stream in LANES:
            spans = [
                span for span in track.timeline.spans if span.task.stream is stream and span.end_us > span.start_us
            ]
            if spans:
                tasks = [_task(span, facts[span.task.name], critical, scale_us) for span in spans]
                rows.append(_Row(LANES[stream], _share(length_us, scale_us), tasks))
    step_us, digits = round_step(scale_us, _TICKS), decimals(scale_us)
    ticks, fine = range(int(scale_us / step_us) + 1), range(int(scale_us / step_us * _FINE) + 1)
    words = ["0", *(ms(number * step_us, 0 if step_us >= 1e3 else digits) for number in ticks[1:])]
    finer = [(_share(k * step_us / _FINE, scale_us), f"{k * step_us / _FINE / 1e3:.6g}") for k in fine if k % _FINE]
    round_ticks = [(_share(number * step_us, scale_us), words[number]) for number in ticks]
    return drawn("timelines", title, rows, round_ticks, finer)


def _task(span: Span, known: TaskFacts, critical: set[str], scale_us: float) -> _Task:
    left, width = _share(span.start_us, scale_us), _share(span.end_us - span.start_us, scale_us)
    kind, bucket = _kind(span), known.bucket
    classes = kind + " odd" * (kind == "wire" and bool((bucket or 0) % 2)) + " thin" * (width < _THIN)
    is_numbered = span.task.stream is not Stream.COMPUTE and width >= _NUMBERED
    return _Task(left, width, classes, _words(span, known), bucket if is_numbered else None, span.task.name in critical)


def _words(span: Span, known: TaskFacts) -> str:
    took, price = span.end_us - span.start_us, span.task.duration_us
    digits = 3 if took < 100e3 else 1
    lines = [span.task.name, f"{ms(took, digits)} ms, from {ms(span.start_us, digits)} to {ms(span.end_us, digits)}"]
    if took > price * 1.001:
        lines.append(f"price {ms(price, digits)} ms; slowed for want of processors")
    lines += [f"bucket {known.bucket}, {known.of}"] if known.of else []
    return "\n".join([*lines, _source(known)])


def _kind(span: Span) -> str:
    stream = span.task.stream
    return "wire" if stream in (*WIRES, Stream.D2H, Stream.H2D) else kind_of(span.task.name)


def _share(us: float, scale_us: float) -> float:
    return round(100 * us / scale_us, 4) if scale_us else 0.0
