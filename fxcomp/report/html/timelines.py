"""Draw tracks one above the other on one scale, and list every task with its price and its source.

A drawing is laid out in shares of its width, so that zooming makes it wider and no text longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fxcomp.cost.timeline import Span, Timeline, critical_path
from fxcomp.plan.kinds import WIRES, Stream
from fxcomp.report.document import Column, Table, decimals, ms
from fxcomp.report.explanation import Explanation, kind_of
from fxcomp.report.html.blocks import folded, legend, table, text
from fxcomp.report.html.charts import round_step
from fxcomp.report.tracks import LANES, Grounds, TaskFacts, Track, facts_of

_LANE, _GAP, _TITLE, _AXIS = 20, 4, 24, 20  # heights, in pixels
_TICKS, _FINE = 8, 8  # how many in all, and as many between two once zoomed
_THIN = 0.12  # percent of the width below which a task is drawn with a stroke, or nobody would see it
_NUMBERED, _NUMBERED_WHERE_NARROW = 1.4, 6.0  # percent of the width from which a task carries its bucket's number
_CAPTION = (
    "Zoom with the buttons, or with Ctrl and the wheel; point at a task for its price and the source of that."
    " Red underlines the critical path: what the step's length depends on."
)
_KINDS = {
    "compute": "compute",
    "compression": "compression",
    "packing": "packing, starting collectives",
    "exchanges": "the loss function's exchanges",
    "wire": "a bucket on the wire or in a copy, by number",
}


def draw(explanation: Explanation, tracks: Sequence[Track]) -> str:
    """Draw all tracks on one scale; those that fill less than half of it once more, if the last one does."""
    scale_us = max(track.timeline.step_time_us for track in tracks)
    told = [(track, facts_of(explanation, track)) for track in tracks]
    drawings = [_figure(told, scale_us)]
    small = [each for each in told if 0 < each[0].timeline.step_time_us < scale_us / 2]
    if small and small[-1] is told[-1]:
        names = ", ".join(track.name for track, _ in small)
        larger_us = max(track.timeline.step_time_us for track, _ in small)
        drawings += [f"<h3>{text(names)}, enlarged</h3>", _figure(small, larger_us)]
    drawings.append(f'<p class="dim">{_CAPTION}</p>')
    used = {_kind(span) for each in tracks for span in each.timeline.spans if span.task.duration_us}
    marks = [(kind, word) for kind, word in _KINDS.items() if kind in used]
    return "\n".join([*drawings, legend([*marks, ("mark", "critical path")])])


def list_tasks(explanation: Explanation, tracks: Sequence[Track]) -> str:
    """List every task of every track, with numbers for sources, which are long and few."""
    sources: dict[tuple[Grounds, str], int] = {}
    tables = [_task_table(explanation, track, sources) for track in tracks]
    notes = "".join(f"<li value={number}>{text(_source(*each))}</li>" for each, number in sources.items())
    return folded("Every task, with its price and the source of it", f"{''.join(tables)}<ol>{notes}</ol>")


def _source(grounds: Grounds, source: str) -> str:
    return source if source.startswith(grounds.value.removesuffix("d")) else f"{grounds.value}: {source}"


_COLUMNS = (
    Column("task", is_text=True),
    Column("on", is_text=True),
    Column("from ms"),
    Column("ms"),
    Column("price ms"),
    Column("by", is_text=True),
    Column("bucket", is_text=True, is_optional=True),
)


def _task_table(explanation: Explanation, track: Track, sources: dict[tuple[Grounds, str], int]) -> str:
    digits, facts = decimals(track.timeline.step_time_us) + 1, facts_of(explanation, track)
    rows: list[Sequence[str]] = []
    for span in sorted(track.timeline.spans, key=lambda span: span.start_us):
        task, known = span.task, facts[span.task.name]
        if known.grounds is Grounds.NONE:
            continue
        number = sources.setdefault((known.grounds, known.source), len(sources) + 1)
        times = (span.start_us, span.end_us - span.start_us, task.duration_us)
        shown = (task.name, LANES[task.stream], *(ms(us, digits) for us in times))
        rows.append((*shown, f"{known.grounds.value} ({number})", known.of))
    return f"<h3>{text(track.name)}</h3>{table(Table(_COLUMNS, rows))}"


def _figure(told: Sequence[tuple[Track, Mapping[str, TaskFacts]]], scale_us: float) -> str:
    """Draw these tracks, the whole scale filling the width."""
    labels: list[str] = []
    shapes: list[str] = []
    top = 0
    digits = decimals(scale_us)
    for track, facts in told:
        name = f"{track.name}, {ms(track.timeline.step_time_us, decimals(track.timeline.step_time_us))} ms"
        labels.append(f'<div class="track" style="height:{_TITLE}px">{text(name)}</div>')
        top += _TITLE
        critical = {span.task.name for span in critical_path(track.timeline)} if not track.is_measured else set[str]()
        for stream in _busy(track.timeline):
            labels.append(f'<div style="height:{_LANE + _GAP}px">{LANES[stream]}</div>')
            shapes += _lane(track.timeline, stream, facts, critical, top, scale_us)
            top += _LANE + _GAP
    labels.append('<div class="unit">ms</div>')
    drawing = "\n".join([*_grid(top, scale_us, digits), *shapes])
    svg = f'<svg height="{top + _AXIS}" role="img" aria-label="timelines">{drawing}</svg>'
    tools = "".join(f'<button type="button" data-zoom="{factor}">{word}</button>'
                    for factor, word in (("2", "zoom in"), ("0.5", "zoom out"), ("0", "whole step")))  # fmt: skip
    return (
        f'<figure class="timelines"><div class="tools">{tools}</div><div class="lanes">'
        f'<div class="labels">{"".join(labels)}</div><div class="scroll">{svg}</div></div>'
        "</figure>"
    )


def _busy(timeline: Timeline) -> list[Stream]:
    return [stream for stream in LANES if timeline.busy_us(stream) > 0]


def _lane(
    timeline: Timeline,
    stream: Stream,
    facts: Mapping[str, TaskFacts],
    critical: Iterable[str],
    top: int,
    scale_us: float,
) -> list[str]:
    """Draw one stream's tasks, those on the critical path underlined."""
    end = _share(timeline.step_time_us, scale_us)
    shapes = [f'<rect class="lane" x="0" y="{top}" width="{end:.4f}%" height="{_LANE}"/>']
    for span in timeline.spans:
        if span.task.stream is not stream or span.end_us <= span.start_us:
            continue
        left, width = _share(span.start_us, scale_us), _share(span.end_us - span.start_us, scale_us)
        kind, bucket = _kind(span), facts[span.task.name].bucket
        odd, thin = " odd" if kind == "wire" and bucket is not None and bucket % 2 else "", " thin" * (width < _THIN)
        place = f'x="{left:.4f}%" y="{top}" width="{width:.4f}%" height="{_LANE}"'
        said = text(_said(span, facts[span.task.name]))
        shapes.append(f'<rect class="task {kind}{odd}{thin}" {place}><title>{said}</title></rect>')
        if span.task.name in critical:
            place = f'x="{left:.4f}%" y="{top + _LANE}" width="{width:.4f}%" height="2"'
            shapes.append(f'<rect class="critical" {place}/>')
        if bucket is not None and stream is not Stream.COMPUTE and width >= _NUMBERED:
            kind = "on" if width >= _NUMBERED_WHERE_NARROW else "on wide-only"
            shapes.append(f'<text class="{kind}" x="{left + width / 2:.4f}%" y="{top + 14}">{bucket}</text>')
    return shapes


def _said(span: Span, known: TaskFacts) -> str:
    """Write what is shown of a task under the pointer."""
    took, price = span.end_us - span.start_us, span.task.duration_us
    digits = 3 if took < 100e3 else 1
    lines = [span.task.name, f"{ms(took, digits)} ms, from {ms(span.start_us, digits)} to {ms(span.end_us, digits)}"]
    if took > price * 1.001:
        lines.append(f"price {ms(price, digits)} ms; slowed for want of processors")
    lines += [f"bucket {known.bucket}, {known.of}"] if known.of else []
    return "\n".join([*lines, _source(known.grounds, known.source)])


def _kind(span: Span) -> str:
    stream = span.task.stream
    return "wire" if stream in (*WIRES, Stream.D2H, Stream.H2D) else kind_of(span.task.name)


def _grid(height: int, scale_us: float, digits: int) -> list[str]:
    """Draw the time axis: a line and a number at round times, finer ones for who has zoomed."""
    step_us = round_step(scale_us, _TICKS)
    lines: list[str] = []
    for number in range(int(scale_us / step_us) + 1):
        x = _share(number * step_us, scale_us)
        anchor = "start" if number == 0 else "end" if x > 94 else "middle"
        lines.append(f'<line class="grid" x1="{x:.4f}%" x2="{x:.4f}%" y1="0" y2="{height}"/>')
        label = "0" if number == 0 else ms(number * step_us, 0 if step_us >= 1e3 else digits)
        kind = "tick" if number % 2 == 0 else "tick wide-only"
        lines.append(f'<text class="{kind}" text-anchor="{anchor}" x="{x:.4f}%" y="{height + 15}">{label}</text>')
    fine: list[str] = []
    for number in range(int(scale_us / step_us * _FINE) + 1):
        if number % _FINE:
            x = _share(number * step_us / _FINE, scale_us)
            label = f"{number * step_us / _FINE / 1e3:.6g}"
            fine.append(f'<line class="grid" x1="{x:.4f}%" x2="{x:.4f}%" y1="0" y2="{height}"/>')
            fine.append(f'<text class="tick" text-anchor="middle" x="{x:.4f}%" y="{height + 15}">{label}</text>')
    return [*lines, f'<g class="fine">{"".join(fine)}</g>']


def _share(us: float, scale_us: float) -> float:
    """Percent of the width."""
    return 100 * us / scale_us if scale_us else 0.0
