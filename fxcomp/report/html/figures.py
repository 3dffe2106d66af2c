"""Draw what a report's sections say: one figure a section, of the same facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fxcomp.report.by_layer import Row, layers_of, summed
from fxcomp.report.document import Column, Table, count, decimals, mb, ms
from fxcomp.report.explanation import Explanation, parts_us
from fxcomp.report.html.blocks import figure, legend, table
from fxcomp.report.html.charts import Bar, bars
from fxcomp.report.tracks import tracks_of

_MOST_LAYERS, _SMALL = 16, 0.005
"""The most layers that are drawn one by one, and the share of the bytes below which one is not."""

Figure = Callable[[Explanation], str]
"""Draws a figure; empty where there is nothing to draw."""


def steps(explanation: Explanation) -> str:
    """Draw the predicted steps, and the measured one."""
    choice, digits = explanation.choice, decimals(explanation.step_us)
    name = "chosen" if explanation.is_chosen else "this plan"
    named = [(name, explanation.step_us, "best")]
    if choice is not None:
        named += [("dense", choice.dense_us, "other"), ("bf16 everywhere", choice.bf16_us, "other")]
    named.append(("no communication", explanation.workload.free_us, "other"))
    if not math.isnan(explanation.measured_ms):
        named.append(("measured", 1e3 * explanation.measured_ms, "measured"))
    return bars([Bar(each, us, f"{ms(us, digits)} ms", kind) for each, us, kind in named])


def race(explanation: Explanation) -> str:
    """Draw the plans that raced, or that may: predicted above measured."""
    digits, raced, choice = decimals(explanation.step_us), explanation.raced, explanation.choice
    runners = raced.runners if raced is not None else choice.runners if choice is not None else ()
    rows: list[Bar] = []
    for number, runner in enumerate(runners):
        stays = raced is not None and number == raced.winner
        rows.append(Bar(runner.name, runner.step_us, f"{ms(runner.step_us, digits)} ms", "other"))
        if runner.measured_ms is not None:
            us, after = 1e3 * runner.measured_ms, ", stays" if stays else ""
            rows.append(Bar("", us, f"{ms(us, digits)} ms{after}", "best" if stays else "measured"))
    marks = [("six", "predicted"), ("two", "measured"), ("good", "measured, and stays")]
    return bars(rows) + legend(marks if raced is not None else marks[:1])


def layers(explanation: Explanation) -> str:
    """Draw what every layer sends, beside what it would send dense, and list what it loses."""
    found = sorted(layers_of(explanation), key=lambda layer: -layer.dense_bytes)
    if not found:
        return ""
    least = _SMALL * sum(layer.dense_bytes for layer in found)
    shown = [layer for layer in found[:_MOST_LAYERS] if layer.dense_bytes >= least]
    rest = found[len(shown) :]
    others = [summed(count(len(rest), "other layer"), rest)] if rest else []
    drawn: list[Bar] = []
    rows: list[Sequence[str]] = []
    for layer in (*shown, *others):
        drawn += _weighed(layer)
        by = explanation.short(layer.strategies[0]) if len(layer.strategies) == 1 else ""
        error = "" if layer.error is None else f"{layer.error:.3g}"
        rows.append((layer.title, mb(layer.dense_bytes), mb(layer.sent_bytes), by, error))
    caption = (
        "The bytes of each layer's gradients, and those that a rank sends of them over the slowest links. An error is"
        f" the share of the layer's own squares; the whole plan loses {explanation.spent:.3g} of the gradient's square."
    )
    columns = (
        Column("layer", is_text=True),
        Column("MB"),
        Column("MB sent"),
        Column("sent by", is_text=True),
        Column("error"),
    )
    marks = legend([("six", "MB of the gradient"), ("one", "MB sent by a rank")])
    return figure(bars(drawn) + marks, caption) + table(Table(columns, rows))


def _weighed(layer: Row) -> tuple[Bar, Bar]:
    dense, sent = layer.dense_bytes, layer.sent_bytes
    return Bar(layer.title, dense, mb(dense), "other"), Bar("", sent, mb(sent))


def prediction(explanation: Explanation) -> str:
    """Compare what was predicted with what was measured: the step, its wait, and its parts if lines were timed."""
    digits, rows = decimals(explanation.step_us), list[tuple[str, float, float]]()
    if not math.isnan(explanation.measured_ms):
        rows.append(("step", explanation.step_us, 1e3 * explanation.measured_ms))
    if not math.isnan(explanation.exposed_ms):
        rows.append(("exposed", explanation.timeline.exposed_us, 1e3 * explanation.exposed_ms))
    profiled = [track for track in tracks_of(explanation) if track.is_measured]
    for track in profiled:
        expected, found = parts_us(explanation.timeline), parts_us(track.timeline)
        rows += [(f"{name}, {track.name.removeprefix('measured, ')}", expected.get(name, 0.0), us)
                 for name, us in found.items() if name != "contention" and (us or expected.get(name))]  # fmt: skip
    for runner in explanation.raced.runners if explanation.raced is not None else ():
        if runner.measured_ms is not None:
            rows.append((f"{runner.name}, in the race", runner.step_us, 1e3 * runner.measured_ms))
    if not rows:
        return ""
    drawn = [bar for name, *both in rows for bar in _both(name, both[0], both[1], digits)]
    columns = (Column("", is_text=True), Column("predicted ms"), Column("measured ms"), Column("off by"))
    cells = [(name, ms(us, digits), ms(took, digits), f"{us / took - 1:+.1%}" if took > 0 else "")
             for name, us, took in rows]  # fmt: skip
    return bars(drawn) + legend([("six", "predicted"), ("two", "measured")]) + table(Table(columns, cells))


def _both(name: str, predicted_us: float, measured_us: float, digits: int) -> tuple[Bar, Bar]:
    return (
        Bar(name, predicted_us, f"{ms(predicted_us, digits)} ms", "other"),
        Bar("", measured_us, f"{ms(measured_us, digits)} ms", "measured"),
    )


FIGURES: Mapping[str, Figure] = {
    "": steps,
    "Race": race,
    "Worth trying": race,
}
"""The figure above a section of the report, by its title."""
