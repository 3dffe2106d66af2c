"""Lay a report out as one HTML file: its sections as everybody's, with drawings of the same facts above them."""

from __future__ import annotations

from fxcomp.report.document import Block, Pairs, Section, Table, Timelines
from fxcomp.report.explanation import Explanation
from fxcomp.report.html.blocks import pairs, paragraph, table, text
from fxcomp.report.html.figures import FIGURES, layers, prediction
from fxcomp.report.html.frame import framed
from fxcomp.report.html.timelines import draw, list_tasks
from fxcomp.report.sections import report_of
from fxcomp.report.tracks import tracks_of

TIMELINE = "Timeline"
_FIRST = (TIMELINE, "Critical path", "Bytes and error by layer", "Race", "Worth trying", "Not taken")
_FIRST_OF_ALL = (*_FIRST, "Break-even bandwidth", "Prediction against measurement")
"""The sections that follow the summary, in this order; the others come after them in the report's."""


def to_html(explanation: Explanation) -> str:
    """Write the whole page."""
    report, tracks = report_of(explanation), tracks_of(explanation)
    parts: dict[str, str] = {}
    title = ""
    for section in report.sections:
        figure = FIGURES.get(section.title)
        drawn = figure(explanation) if figure is not None and section.title not in parts else ""
        title = section.title or title
        parts[title] = parts.get(title, "") + drawn + _body(section, explanation)
    parts[TIMELINE] += list_tasks(explanation, tracks)
    more = {"Bytes and error by layer": layers, "Prediction against measurement": prediction}
    parts |= {name: drawn for name, made in more.items() if (drawn := made(explanation))}
    titles = ["", *(name for name in _FIRST_OF_ALL if name in parts)]
    titles += [name for name in parts if name not in titles]
    top = (
        f'{paragraph(report.headline, "dim")}\n<h1 class="{report.tone.value}">{text(report.verdict)}</h1>\n'
        f"{paragraph(report.reason) if report.reason else ''}"
    )
    return framed(report.verdict, top, {name: parts[name] for name in titles})


def _body(section: Section, explanation: Explanation) -> str:
    return "\n".join(_block(block, explanation) for block in section.blocks)


def _block(block: Block, explanation: Explanation) -> str:
    if isinstance(block, str):
        return paragraph(block)
    if isinstance(block, Table):
        return table(block)
    if isinstance(block, Pairs):
        return pairs(block)
    assert isinstance(block, Timelines), "every kind of block has its own way to be written"
    return draw(explanation, tracks_of(explanation))
