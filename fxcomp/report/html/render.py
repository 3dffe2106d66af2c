"""Render a page: `page.html.j2` frames its sections, `shapes.html.j2` has a macro for each kind of block.

All text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

Drawing = Markup

_TEMPLATES = Environment(
    loader=PackageLoader("fxcomp.report.html"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def drawn(macro: str, *facts: object) -> Drawing:
    """Call a macro of `shapes.html.j2`."""
    return getattr(_TEMPLATES.get_template("shapes.html.j2").module, macro)(*facts)


def write_page(
    title: str,
    heading: str,
    sections: Mapping[str, Sequence[Drawing]],
    *,
    tone: str = "",
    above: str = "",
    below: str = "",
) -> str:
    """Return a page with the blocks of each section, by title. One title may be empty."""
    return _TEMPLATES.get_template("page.html.j2").render(
        title=title, heading=heading, sections=sections, tone=tone, above=above, below=below, anchor=anchor
    )


def anchor(title: str) -> str:
    """Return a section's id, for links."""
    return re.sub(r"\W+", "-", title.lower()) or "step"
