"""Lay the plots of some runs out as one page: each number against steps, and against time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from fxcomp.report.document import Column, Table, count
from fxcomp.report.html.blocks import figure, paragraph, table, text
from fxcomp.report.html.frame import anchor, framed
from fxcomp.report.html.line_plot import LARGEST, PlotLine, line_of, line_plot, names_of
from fxcomp.report.runs import LoggedRun, Series, are_few

METRICS: Mapping[str, tuple[str, str]] = {
    "loss": ("Loss", ""),
    "sent_mb": ("Bytes sent", " MB"),
    "residual_norm": ("Norm of residuals", ""),
    "step_ms": ("Step", " ms"),
    "exposed_ms": ("Wait for the network", " ms"),
}
"""The numbers that are drawn by default: their titles and units."""

_SAID = {
    "loss": "The loss as it was logged.",
    "sent_mb": "MB that a rank gave to collectives in a step.",
    "residual_norm": "The norm of all that the logging rank has left out of its gradients so far.",
    "step_ms": "The median of recent steps.",
    "exposed_ms": "The time of a step in which nothing but the network is waited for; the median of recent steps.",
}
_READING = (
    "Long lines are thinned: each column of a plot keeps its lowest and its highest point. A line is not joined where"
    " steps are missing (more than five times the usual distance) or fall back. A cross at the upper edge is a value"
    f" that is not a finite number, or beyond {LARGEST:g}. An axis is logarithmic where its values are positive and"
    " span a factor of 100."
)
_NOTES = "Notes"
_UNITS = (("hours", 3600.0, 2 * 3600.0), ("minutes", 60.0, 2 * 60.0), ("seconds", 1.0, 0.0))


def to_html(runs: Sequence[LoggedRun], smooth: int = 1) -> str:
    """Write the whole page. With `smooth` lines are means over so many points, above the points themselves."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.series))
    sections = {"": _table_of(runs)}
    for metric in metrics:
        sections[_title(metric, sections)] = _plots(runs, metric, smooth)
    notes = [note for run in runs for note in run.notes]
    smoothed = f" Thick lines are means over {smooth} points; pale ones are the points." if smooth > 1 else ""
    sections[_NOTES] = "\n".join(map(paragraph, [_READING + smoothed, *notes]))
    top = f"<h1>{text(', '.join(run.name for run in runs))}</h1>"
    return framed(f"{count(len(runs), 'run')}", top, sections)


def _title(metric: str, others: Collection[str]) -> str:
    """Title a number apart from the other sections, which are linked to by letters and digits alone."""
    title, _ = METRICS.get(metric, (metric, ""))
    taken = [anchor(other) for other in (_NOTES, *others)]
    numbered = (f"{title} ({number})" for number in itertools.count(2))
    return next(each for each in itertools.chain((title,), numbered) if anchor(each) not in taken)


def _plots(runs: Sequence[LoggedRun], metric: str, smooth: int) -> str:
    """Draw one number over steps and over time."""
    _, unit = METRICS.get(metric, ("", ""))
    timed = [run for run in runs if run.seconds is not None]
    longest = max((run.seconds[-1] for run in timed if run.seconds), default=0.0)
    clock, length_s, _ = next(each for each in _UNITS if longest >= each[2])

    drawn: list[str] = []
    named: list[PlotLine] = []
    for name, those, says in (("steps", runs, "{:,.6g}".format), (clock, timed, "{:.4g}".format)):
        lines = [
            line
            for number, run in enumerate(runs)
            if run in those and (series := run.series.get(metric)) is not None
            for line in _lines(run, number, series, None if name == "steps" else length_s, smooth)
        ]
        plot = line_plot(lines, says, unit)
        if plot:
            drawn.append(figure(plot, f"over {name}"))
            named.extend(lines)
        elif lines:
            drawn.append(
                paragraph(f"No value of {metric} over {name} can be drawn: none is a finite number up to {LARGEST:g}.")
            )
    said = paragraph(_SAID[metric], "dim") if metric in _SAID else ""
    return f'{said}{names_of(named)}<div class="pair">\n{"".join(drawn)}\n</div>'


def _lines(run: LoggedRun, number: int, series: Series, unit_s: float | None, smooth: int) -> Sequence[PlotLine]:
    """Make the line of a run's number, and that of its means; over time in a unit, or over steps."""
    steps = [run.steps[place] for place in series.places]
    xs = steps
    if unit_s is not None and run.seconds is not None:
        xs = [run.seconds[place] / unit_s for place in series.places]
    line = line_of(run.name, number, steps, xs, series.values)
    if smooth == 1:
        return (line,)
    return line, line.smoothed(smooth)


_COLUMNS = (
    Column("run", is_text=True),
    Column("lines"),
    Column("last step"),
    Column("seconds"),
    Column("loss at the end"),
    Column("GB sent", is_optional=True),
    Column("not finite", is_optional=True),
    Column("plans", is_text=True, is_optional=True),
)
_LAST = 10


def _table_of(runs: Sequence[LoggedRun]) -> str:
    """Sum each run up in a row."""
    rows: list[Sequence[str]] = []
    for run in runs:
        loss = run.series.get("loss")
        last = [value for value in loss.values[-_LAST:] if math.isfinite(value)] if loss is not None else []
        bad = sum(not math.isfinite(value) for series in run.series.values() for value in series.values)
        plans = [f"{digest[:8]} from step {step}" for step, digest in run.plans]
        rows.append(
            (
                run.name,
                f"{len(run.steps):,}",
                f"{run.steps[-1]:,.0f}",
                "" if run.seconds is None else f"{run.seconds[-1]:,.1f}",
                f"{sum(last) / len(last):.4g}" if last else "",
                _sent(run),
                f"{bad:,}",
                "; ".join(plans[:1] + (["…"] if len(plans) > 2 else []) + plans[1:][-1:]),
            )
        )
    caption = (
        f"The loss at the end is the mean of the last {_LAST} lines, as far as they are finite. Bytes are summed up"
        " where all steps but a few were logged."
    )
    return table(Table(_COLUMNS, rows)) + f'<p class="dim">{caption}</p>'


def _sent(run: LoggedRun) -> str:
    """Sum up what a run has sent; empty where more than a few of its steps do not say it."""
    sent = run.series.get("sent_mb")
    if sent is None:
        return ""
    known = {place: value for place, value in zip(sent.places, sent.values, strict=True) if math.isfinite(value)}
    steps = max(run.steps) - min(run.steps) + 1
    missing = steps - len({run.steps[place] for place in known})
    if not known or not are_few(missing, steps):
        return ""
    is_whole = missing == 0 and len(known) == len(sent.values)
    return f"{'' if is_whole else 'at least '}{math.fsum(known.values()) / 1e3:.3g}"
