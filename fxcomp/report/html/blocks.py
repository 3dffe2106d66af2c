"""Write the blocks of a document as HTML: sentences, tables and pairs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fxcomp.report.document import Column, Pairs, Table


def text(value: str) -> str:
    """Write text so that nothing in it is markup, whatever parameters are called."""
    return escape(value, quote=True)


def paragraph(sentence: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{text(sentence)}</p>"


def table(of: Table) -> str:
    """Write a table that scrolls by itself where the page is narrow."""
    head = "".join(f"<th{_class(_kind(column))}>{text(column.name)}</th>" for column in of.columns)
    rows = "\n".join(f"<tr>{_cells(of.columns, row)}</tr>" for row in of.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def pairs(of: Pairs) -> str:
    """Write names, each with its sentence."""
    rows = "\n".join(f'<tr><td class="name">{text(name)}</td><td class="text">{text(said)}</td></tr>'
                     for name, said in of.rows)  # fmt: skip
    return f'<div class="wide"><table><tbody>\n{rows}\n</tbody></table></div>'


def figure(drawing: str, caption: str, kind: str = "") -> str:
    return f"<figure{_class(kind)}>\n{drawing}\n<figcaption>{text(caption)}</figcaption>\n</figure>"


def folded(summary: str, inside: str) -> str:
    """Write what is read seldom: closed on a screen, open in print."""
    return f"<details><summary>{text(summary)}</summary>\n{inside}\n</details>"


def legend(marks: Sequence[tuple[str, str]]) -> str:
    """Explain colors, each by the name of its variable and a word."""
    shown = "".join(f'<span><i style="background:var(--{color})"></i>{text(word)}</span>' for color, word in marks)
    return f'<div class="legend">{shown}</div>'


def _cells(columns: Sequence[Column], row: Sequence[str]) -> str:
    return "".join(f"<td{_class(_kind(column))}>{text(cell)}</td>" for column, cell in zip(columns, row, strict=True))


def _kind(column: Column) -> str:
    return " ".join(kind for kind, holds in (("text", column.is_text), ("optional", column.is_optional)) if holds)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
