"""Frame a page: its head, titled sections with links to them, its script.

Nothing is loaded from anywhere, which the page itself forbids to the browser; without its script it can be read whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxcomp.report.html.blocks import text
from fxcomp.report.html.style import SCRIPT, STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def framed(title: str, top: str, sections: Mapping[str, str]) -> str:
    """Write a whole page: HTML to begin with, then that of each section under its title, which may be empty."""
    body = "\n".join(_section(name, inside) for name, inside in sections.items())
    links = "".join(f'<a href="#{anchor(name)}">{text(name)}</a>' for name in sections if name)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>fxcomp: {text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{top}\n<nav>{links}</nav>\n{body}\n"
        f'<div id="tip" role="tooltip"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _section(title: str, body: str) -> str:
    head = f"<h2>{text(title)}</h2>\n" if title else ""
    return f'<section id="{anchor(title)}">\n{head}{body}\n</section>'


def anchor(title: str) -> str:
    """Name the place of a section, to which links lead."""
    return re.sub(r"\W+", "-", title.lower()) or "step"
