"""Draw charts of any numbers: bars with their values, and curves over a logarithmic axis.

Everything is placed in shares of the width; lines keep their width and text its size, however wide the page is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxcomp.report.html.blocks import legend, text

_ROW, _BAR, _JOINED = 22, 14, 6  # pixels; a bar without a name is so much closer to the one above
_LONGEST = 74.0  # percent of the width, which leaves room for a bar's value
COLORS = ("one", "two", "three", "four", "five", "six")
"""The variables of colors of curves, in their order."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its name, and its value in words."""

    name: str
    value: float
    said: str
    kind: str = ""
    """A class of the style sheet: `best`, `other`, `measured`."""


def bars(rows: Sequence[Bar], largest: float = 0.0) -> str:
    """Draw a bar for each row; a row without a name belongs to the one above."""
    scale = max([largest, *(row.value for row in rows)]) or 1.0
    labels = "".join(f'<div style="height:{_ROW}px">{text(row.name)}</div>' for row in rows)
    shapes: list[str] = []
    for number, row in enumerate(rows):
        top, width = number * _ROW - (0 if row.name else _JOINED), _LONGEST * max(0.0, row.value) / scale
        kind = f"bar {row.kind}".strip()
        shapes.append(f'<rect class="{kind}" x="0" y="{top + 3}" width="{width:.3f}%" height="{_BAR}"/>')
        shapes.append(f'<text x="{width:.3f}%" dx="6" y="{top + 15}">{text(row.said)}</text>')
    svg = f'<svg width="100%" height="{len(rows) * _ROW}" role="img" aria-label="bars">{"".join(shapes)}</svg>'
    return f'<div class="lanes"><div class="labels">{labels}</div>{svg}</div>'


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Percent of its length."""
        span = math.log(self.high / self.low) or 1.0
        return 100 * math.log(value / self.low) / span

    @property
    def ticks(self) -> list[float]:
        """List powers of ten, with their 2s and 5s where powers alone are few."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if math.log10(self.high / self.low) < 2.5 else (1,)
        found = [digit * 10.0**power for power in decades for digit in digits]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a word."""

    at: float
    word: str


def curves(
    xs: Sequence[float],
    ys: Mapping[str, Sequence[float]],
    limits: Mapping[str, float],
    marks: Sequence[Mark],
    *,
    says_y: str,
    height: int = 320,
) -> str:
    """Draw a curve for each name over logarithmic axes, the first one thick, and a dashed line for each limit."""
    known = [y for values in (*ys.values(), limits.values()) for y in values if y > 0]
    across, up = LogAxis(min(xs), max(xs)), LogAxis(min(known) / 1.15, max(known) * 1.15)
    shapes = [*_grid(across, up, height, says_y)]
    lines: list[str] = []
    for number, (name, values) in enumerate(ys.items()):
        points = " ".join(f"{across.share(x):.2f},{100 - up.share(y):.2f}" for x, y in zip(xs, values, strict=True))
        color, width = COLORS[number % len(COLORS)], 3 if number == 0 else 1.6
        dash = "" if number < len(COLORS) else ' stroke-dasharray="6 4"'
        style = f'stroke="var(--{color})" stroke-width="{width}" fill="none" vector-effect="non-scaling-stroke"'
        lines.append(f'<polyline points="{points}" {style}{dash}><title>{text(name)}</title></polyline>')
    for name, value in limits.items():
        y = 100 - up.share(value)
        style = 'stroke="var(--dim)" stroke-dasharray="6 4" vector-effect="non-scaling-stroke"'
        lines.append(f'<line x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}" {style}><title>{text(name)}</title></line>')
    lines.reverse()  # the first one lies on top
    plot = (
        f'<svg width="100%" height="{height}" viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(lines)}</svg>'
    )
    for number, mark in enumerate(marks):
        x, y = across.share(mark.at), 14 + 16 * number
        shapes.append(f'<line class="edge" stroke-dasharray="4 3" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{height}"/>')
        side, dx = ("end", -5) if x > 60 else ("start", 5)
        shapes.append(f'<text text-anchor="{side}" x="{x:.2f}%" dx="{dx}" y="{y}">{text(mark.word)}</text>')
    names = [(COLORS[number % len(COLORS)], name) for number, name in enumerate(ys)]
    names += [("dim", f"{name}, dashed") for name in limits]
    drawing = f'<svg width="100%" height="{height + 22}" role="img" aria-label="curves">{plot}{"".join(shapes)}</svg>'
    return f"{drawing}\n{legend(names)}"


def _grid(across: LogAxis, up: LogAxis, height: int, says_y: str) -> list[str]:
    lines = [f'<line class="edge" x1="0" x2="100%" y1="{height}" y2="{height}"/>']
    for tick in across.ticks:
        x = across.share(tick)
        anchor = "start" if x < 3 else "end" if x > 94 else "middle"
        lines.append(f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{height}"/>')
        lines.append(f'<text class="tick" text-anchor="{anchor}" x="{x:.2f}%" y="{height + 16}">{tick:g}</text>')
    for tick in up.ticks:
        y = height * (1 - up.share(tick) / 100)
        lines.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick" x="2" y="{y - 3:.1f}">{tick:g}{says_y}</text>')
    return lines


def round_step(whole: float, count: int) -> float:
    """Find the round number that divides a whole into about so many: 1, 2 or 5 times a power of ten."""
    if whole <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(whole / count))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= whole / count)
