"""Write a report as one HTML file: its sections, with drawings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fxcomp.report.by_layer import layers_of, summed
from fxcomp.report.document import Block, Table, count, decimals, mb, ms
from fxcomp.report.explanation import Explanation, parts_us
from fxcomp.report.html.render import Drawing, drawn, write_page
from fxcomp.report.html.timelines import draw, list_tasks
from fxcomp.report.sections import report_of
from fxcomp.report.tracks import tracks_of

TIMELINE = "Timeline"
_FIRST = (
    "",
    TIMELINE,
    "Critical path",
    "Bytes and error by layer",
    "Race",
    "Worth trying",
    "Not taken",
    "Break-even bandwidth",
    "Prediction against measurement",
)
"""Titles of the first sections; the others follow in the report's order."""


def to_html(explanation: Explanation) -> str:
    report = report_of(explanation)
    parts: dict[str, list[Drawing]] = {}
    title = ""
    for section in report.sections:
        title = section.title or title
        if section.title in FIGURES and section.title not in parts:
            parts.setdefault(title, []).extend(FIGURES[section.title](explanation))
        for block in section.blocks:
            parts.setdefault(title, []).extend(_drawn(block, explanation))
    parts[TIMELINE].append(list_tasks(explanation, tracks_of(explanation)))
    parts["Bytes and error by layer"] = layers(explanation)
    parts["Prediction against measurement"] = prediction(explanation)
    titles = dict.fromkeys([*_FIRST, *parts])
    sections = {title: parts[title] for title in titles if parts.get(title)}
    tone, headline, reason = report.tone.value, report.headline, report.reason
    return write_page(report.verdict, report.verdict, sections, tone=tone, above=headline, below=reason)


def _drawn(block: Block, explanation: Explanation) -> Sequence[Drawing]:
    if isinstance(block, str):
        return [drawn("paragraph", block)]
    if isinstance(block, Table):
        return [drawn("table", block)]
    return draw(explanation, tracks_of(explanation))


_MOST_LAYERS, _SMALL = 16, 0.005
"""Maximum number of layers drawn, and minimum fraction of all bytes in a drawn layer."""
_PREDICTED, _MEASURED = ("six", "predicted"), ("two", "measured")


class Bar(NamedTuple):
    """A bar: its label, length, text and CSS class (`best`, `other` or `measured`)."""

    name: str
    value: float
    words: str
    kind: str = ""


def steps(explanation: Explanation) -> Sequence[Drawing]:
    choice, digits = explanation.choice, decimals(explanation.step_us)
    named = [("chosen" if explanation.is_chosen else "this plan", explanation.step_us, "best")]
    if choice is not None:
        named += [("dense", choice.dense_us, "other"), ("bf16 everywhere", choice.bf16_us, "other")]
    named.append(("no communication", explanation.workload.free_us, "other"))
    if not math.isnan(explanation.measured_ms):
        named.append(("measured", 1e3 * explanation.measured_ms, "measured"))
    return [drawn("bars", [_time(name, us, digits, kind) for name, us, kind in named])]


def race(explanation: Explanation) -> Sequence[Drawing]:
    digits, raced, choice = decimals(explanation.step_us), explanation.raced, explanation.choice
    runners = raced.runners if raced is not None else choice.runners if choice is not None else ()
    rows: list[Bar] = []
    for number, runner in enumerate(runners):
        stays = raced is not None and number == raced.winner
        rows.append(_time(runner.name, runner.step_us, digits, "other"))
        if runner.measured_ms is not None:
            bar = _time("", 1e3 * runner.measured_ms, digits, "best" if stays else "measured")
            rows.append(bar._replace(words=bar.words + ", stays" * stays))
    marks = [_PREDICTED, _MEASURED, ("good", "measured, and stays")] if raced is not None else [_PREDICTED]
    return [drawn("bars", rows, marks)]


def layers(explanation: Explanation) -> list[Drawing]:
    """Draw each layer's dense and sent bytes, and list its error."""
    found = sorted(layers_of(explanation), key=lambda layer: -layer.dense_bytes)
    least = _SMALL * sum(layer.dense_bytes for layer in found)
    shown = [layer for layer in found[:_MOST_LAYERS] if layer.dense_bytes >= least]
    rest = found[len(shown) :]
    if rest:
        shown.append(summed(count(len(rest), "other layer"), rest))
    bars: list[Bar] = []
    rows: list[Sequence[str]] = []
    for layer in shown:
        dense, sent = mb(layer.dense_bytes), mb(layer.sent_bytes)
        bars += [Bar(layer.title, layer.dense_bytes, dense, "other"), Bar("", layer.sent_bytes, sent)]
        by = explanation.short(layer.strategies[0]) if len(layer.strategies) == 1 else ""
        rows.append((layer.title, dense, sent, by, "" if layer.error is None else f"{layer.error:.3g}"))
    caption = (
        "The bytes of each layer's gradients, and the bytes of them that a rank sends over the slowest links. An"
        " error is the share of the layer's own squares; the whole plan loses"
        f" {explanation.spent:.3g} of the gradient's square."
    )
    table = Table(("layer", "MB", "MB sent", "sent by", "error"), rows, text=("layer", "sent by"))
    drawing = drawn("bars", bars, [("six", "MB of the gradient"), ("one", "MB sent by a rank")]) if bars else ""
    return [drawn("figure", drawing, caption), drawn("table", table)] if found else []


def prediction(explanation: Explanation) -> list[Drawing]:
    """Compare predicted and measured times of the step, of its parts if lines were timed, and of raced plans."""
    digits, rows = decimals(explanation.step_us), list[tuple[str, float, float]]()
    if not math.isnan(explanation.measured_ms):
        rows.append(("step", explanation.step_us, 1e3 * explanation.measured_ms))
    if not math.isnan(explanation.exposed_ms):
        rows.append(("exposed", explanation.timeline.exposed_us, 1e3 * explanation.exposed_ms))
    for track in tracks_of(explanation):
        expected, found = parts_us(explanation.timeline), parts_us(track.timeline) if track.is_measured else {}
        rows += [(f"{name}, {track.name.removeprefix('measured, ')}", expected.get(name, 0.0), us)
                 for name, us in found.items() if name != "contention" and (us or expected.get(name))]  # fmt: skip
    for runner in explanation.raced.runners if explanation.raced is not None else ():
        if runner.measured_ms is not None:
            rows.append((f"{runner.name}, in the race", runner.step_us, 1e3 * runner.measured_ms))
    if not rows:
        return []
    bars = [bar for name, us, took in rows
            for bar in (_time(name, us, digits, "other"), _time("", took, digits, "measured"))]  # fmt: skip
    names = ("", "predicted ms", "measured ms", "off by")
    cells = [(name, ms(us, digits), ms(took, digits), f"{us / took - 1:+.1%}" if took > 0 else "")
             for name, us, took in rows]  # fmt: skip
    return [drawn("bars", bars, [_PREDICTED, _MEASURED]), drawn("table", Table(names, cells))]


def _time(name: str, us: float, digits: int, kind: str) -> Bar:
    return Bar(name, us, f"{ms(us, digits)} ms", kind)


FIGURES: Mapping[str, Callable[[Explanation], Sequence[Drawing]]] = {"": steps, "Race": race, "Worth trying": race}
"""Functions that draw above a section, by section title."""
