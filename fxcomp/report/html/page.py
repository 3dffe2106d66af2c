"""Lay a report out as one HTML file: its sections as everybody's, with drawings of the same facts above them.

Nothing is loaded from anywhere, which the page itself forbids to the browser; without its script it can be read whole.
"""

from __future__ import annotations

import re

from fxcomp.report.document import Block, Pairs, Section, Table, Timelines
from fxcomp.report.explanation import Explanation
from fxcomp.report.html.blocks import pairs, paragraph, table, text
from fxcomp.report.html.figures import FIGURES, layers, prediction
from fxcomp.report.html.style import SCRIPT, STYLE
from fxcomp.report.html.timelines import draw, list_tasks
from fxcomp.report.sections import report_of
from fxcomp.report.tracks import tracks_of

TIMELINE = "Timeline"
_FIRST = (TIMELINE, "Critical path", "Bytes and error by layer", "Race", "Worth trying", "Not taken")
_FIRST_OF_ALL = (*_FIRST, "Break-even bandwidth", "Prediction against measurement")
"""The sections that follow the summary, in this order; the others come after them in the report's."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


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
    body = "\n".join(_section(name, parts[name]) for name in titles)
    links = "".join(f'<a href="#{_anchor(name)}">{text(name)}</a>' for name in titles if name)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>fxcomp: {text(report.verdict)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'{paragraph(report.headline, "dim")}\n<h1 class="{report.tone.value}">{text(report.verdict)}</h1>\n'
        f"{paragraph(report.reason) if report.reason else ''}\n<nav>{links}</nav>\n{body}\n"
        f'<div id="tip" role="tooltip"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _section(title: str, body: str) -> str:
    head = f"<h2>{text(title)}</h2>\n" if title else ""
    return f'<section id="{_anchor(title)}">\n{head}{body}\n</section>'


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()) or "step"


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
