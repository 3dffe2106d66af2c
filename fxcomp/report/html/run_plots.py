"""Plot logged runs on one page: each metric over steps and over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fxcomp.report.document import Table, count
from fxcomp.report.html.line_plot import LARGEST, PlotLine, line_of, line_plot, names_of
from fxcomp.report.html.render import Drawing, anchor, drawn, write_page
from fxcomp.report.runs import LoggedRun, are_few


class Metric(NamedTuple):
    """A number to plot: title, unit, and a sentence below the title."""

    title: str
    unit: str = ""
    sentence: str = ""


METRICS: Mapping[str, Metric] = {
    "loss": Metric("Loss", "", "The loss as it was logged."),
    "sent_mb": Metric("Bytes sent", " MB", "MB that a rank gave to collectives in a step."),
    "residual_norm": Metric(
        "Norm of residuals", "", "The norm of all that the logging rank has left out of its gradients so far."
    ),
    "step_ms": Metric("Step", " ms", "The median of recent steps."),
    "exposed_ms": Metric(
        "Wait for the network",
        " ms",
        "The part of a step that waits for the network alone; the median of recent steps.",
    ),
}
"""Metrics plotted by default, by name in the log."""

_READING = (
    "Long lines are thinned: each column of a plot keeps its lowest and its highest point. A line is not joined where"
    " steps are missing (more than five times the usual distance) or fall back. A cross at the upper edge is a value"
    f" that is not a finite number, or beyond {LARGEST:g}. An axis is logarithmic where its values are positive and"
    " span a factor of 100."
)
_NOTES = "Notes"
_UNITS = (("hours", 3600.0, 2 * 3600.0), ("minutes", 60.0, 2 * 60.0), ("seconds", 1.0, 0.0))
_LAST = 10
_CAPTION = (
    f"The loss at the end is the mean of the last {_LAST} lines, as far as they are finite. Bytes are summed up where"
    " all steps but a few were logged."
)


def to_html(runs: Sequence[LoggedRun], smooth: int = 1) -> str:
    """Return the page, with moving averages over `smooth` points if `smooth` exceeds 1."""
    sections: dict[str, Sequence[Drawing]] = {
        "": (drawn("table", _table_of(runs)), drawn("paragraph", _CAPTION, "dim"))
    }
    for name in dict.fromkeys(name for run in runs for name in run.series):
        metric = METRICS.get(name, Metric(name))
        sections[_title(metric.title, sections)] = _plots(runs, name, metric, smooth)
    smoothed = f" Thick lines are means over {smooth} points; pale ones are the points." if smooth > 1 else ""
    notes = [_READING + smoothed, *(note for run in runs for note in run.notes)]
    sections[_NOTES] = [drawn("paragraph", note) for note in notes]
    return write_page(count(len(runs), "run"), ", ".join(run.name for run in runs), sections)


def _title(title: str, others: Collection[str]) -> str:
    """Add a number to a title whose anchor is taken."""
    taken = [anchor(other) for other in (_NOTES, *others)]
    numbered = (f"{title} ({number})" for number in itertools.count(2))
    return next(each for each in itertools.chain((title,), numbered) if anchor(each) not in taken)


def _plots(runs: Sequence[LoggedRun], name: str, metric: Metric, smooth: int) -> list[Drawing]:
    timed = [run for run in runs if run.seconds is not None]
    longest = max((run.seconds[-1] for run in timed if run.seconds), default=0.0)
    clock, length_s, _ = next(each for each in _UNITS if longest >= each[2])
    plots: list[Drawing] = []
    named: list[PlotLine] = []
    for over, those, says in (("steps", runs, "{:,.6g}".format), (clock, timed, "{:.4g}".format)):
        lines = [
            line
            for number, run in enumerate(runs)
            if run in those and (series := run.series.get(name)) is not None
            for line in _lines(run, number, series, None if over == "steps" else length_s, smooth)
        ]
        if plot := line_plot(lines, says, metric.unit):
            plots.append(drawn("figure", plot, f"over {over}"))
            named += lines
        elif lines:
            sentence = f"No value of {name} over {over} can be drawn: none is a finite number up to {LARGEST:g}."
            plots.append(drawn("paragraph", sentence))
    about = [drawn("paragraph", metric.sentence, "dim")] if metric.sentence else []
    return [*about, names_of(named), drawn("side_by_side", plots)]


def _lines(
    run: LoggedRun, number: int, series: Mapping[int, float], unit_s: float | None, smooth: int
) -> Sequence[PlotLine]:
    steps = [run.steps[place] for place in series]
    xs = steps
    if unit_s is not None and run.seconds is not None:
        xs = [run.seconds[place] / unit_s for place in series]
    line = line_of(run.name, number, steps, xs, list(series.values()))
    return (line,) if smooth == 1 else (line, line.smoothed(smooth))


def _table_of(runs: Sequence[LoggedRun]) -> Table:
    texts, optional = ("run", "plans"), ("GB sent", "not finite", "plans")
    names = ("run", "lines", "last step", "seconds", "loss at the end", "GB sent", "not finite", "plans")
    return Table(names, [_row_of(run) for run in runs], texts, optional)


def _row_of(run: LoggedRun) -> Sequence[str]:
    losses = list(run.series.get("loss", {}).values())
    last = [value for value in losses[-_LAST:] if math.isfinite(value)]
    bad = sum(not math.isfinite(value) for series in run.series.values() for value in series.values())
    plans = [f"{digest[:8]} from step {step}" for step, digest in run.plans]
    return (
        run.name,
        f"{len(run.steps):,}",
        f"{run.steps[-1]:,.0f}",
        "" if run.seconds is None else f"{run.seconds[-1]:,.1f}",
        f"{sum(last) / len(last):.4g}" if last else "",
        _sent(run),
        f"{bad:,}",
        "; ".join(plans[:1] + (["…"] if len(plans) > 2 else []) + plans[1:][-1:]),
    )


def _sent(run: LoggedRun) -> str:
    """Return the GB that a run sent, as text; empty if many steps lack the number."""
    sent = run.series.get("sent_mb", {})
    known = {place: value for place, value in sent.items() if math.isfinite(value)}
    steps = max(run.steps) - min(run.steps) + 1
    missing = steps - len({run.steps[place] for place in known})
    if not known or not are_few(missing, steps):
        return ""
    is_whole = missing == 0 and len(known) == len(sent)
    return f"{'' if is_whole else 'at least '}{math.fsum(known.values()) / 1e3:.3g}"
