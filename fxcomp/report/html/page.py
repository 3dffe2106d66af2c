"""Lay a report out as one HTML file: the sections of its text, with drawings of the same facts above them."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.report.document import Block, Pairs, Table, Timelines
from fxcomp.report.explanation import Explanation
from fxcomp.report.html.figures import FIGURES, layers, prediction
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
"""Titles of the first sections, in order; the others follow in the order of the report."""


def to_html(explanation: Explanation) -> str:
    """Write the whole page."""
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
    if isinstance(block, Timelines):
        return draw(explanation, tracks_of(explanation))
    macro = {str: "paragraph", Table: "table", Pairs: "pairs"}[type(block)]
    return [drawn(macro, block)]
