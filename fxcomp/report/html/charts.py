"""Draw bars with their values, and place numbers on a logarithmic axis.

Everything is placed in shares of the width; lines keep their width and text its size, however wide the page is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.report.html.blocks import text

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


def round_step(whole: float, count: int) -> float:
    """Find the round number that divides a whole into about so many: 1, 2 or 5 times a power of ten."""
    if whole <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(whole / count))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= whole / count)
