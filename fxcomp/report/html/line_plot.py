"""Draw numbers over linear axes, several runs over each other: long ones thinned, gaps left open.

Lines are placed in shares of the width, as in `charts.py`. A column of the plot keeps the lowest and the highest of its
points, so no peak is lost, however many points there are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

from fxcomp.report.html.blocks import legend, text
from fxcomp.report.html.charts import COLORS, LogAxis, round_step

HEIGHT = 260
_COLUMNS, _POINTS_OF_ALL = 300, 1800  # of one line; of all lines of a plot, so that a page stays small
_SPOTS = 80  # places across a plot that tell their values under the pointer
_DASHED = ", dashed"
_GAP = 5.0  # times the usual distance: two points further apart are not joined
_LOG = 100.0  # a number that spans such a factor is drawn on a logarithmic axis
_TICKS, _MOST_TICKS = 6, 10
LARGEST = 1e100
"""Beside what is larger nothing else could be seen."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One run's number."""

    name: str
    number: int
    """By which it is colored."""
    parts: Sequence[Sequence[Point]]
    """Points that are joined, in the order in which they were logged; parts are not."""
    crosses: Sequence[Point] = ()
    """Values that cannot be drawn: not finite, or too large."""
    is_mean: bool = False
    """Drawn over the line that it smooths, which is pale then."""

    def smoothed(self, over: int) -> PlotLine:
        """Let each point be the mean of so many up to it, within its part."""
        return PlotLine(self.name, self.number, [list(_means(part, over)) for part in self.parts], is_mean=True)


def line_of(name: str, number: int, steps: Sequence[float], xs: Sequence[float], ys: Sequence[float]) -> PlotLine:
    """Make a line over `xs`. It breaks where a value cannot be drawn, and where steps are missing or fall back."""
    usual = statistics.median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 0.0
    parts: list[list[Point]] = []
    crosses: list[Point] = []
    before = math.inf
    for step, x, y in zip(steps, xs, ys, strict=True):
        if not abs(y) < LARGEST:
            crosses.append((x, y))
            before = math.inf
            continue
        if not 0 <= step - before <= max(_GAP * usual, 1.0):
            parts.append([])
        parts[-1].append((x, y))
        before = step
    return PlotLine(name, number, parts, crosses)


def _means(part: Sequence[Point], over: int) -> Iterator[Point]:
    recent: deque[float] = deque(maxlen=over)
    for x, y in part:
        recent.append(y)
        yield x, math.fsum(recent) / len(recent)


@dataclass(frozen=True, slots=True)
class LinearAxis:
    """A linear axis."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Percent of its length."""
        return 100 * (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """List round numbers along it."""
        step = round_step(self.high - self.low, _TICKS)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def line_plot(lines: Sequence[PlotLine], says_x: Callable[[float], str], unit: str = "") -> str:
    """Draw lines; empty where there is no point. Values that cannot be drawn are crosses at the top edge."""
    points = [point for line in lines for part in line.parts for point in part]
    if not points:
        return ""
    xs = [*(x for x, _ in points), *(x for line in lines for x, _ in line.crosses)]
    across, up = _padded(min(xs), max(xs), 0.0), axis_of([y for _, y in points], from_zero=bool(unit))
    columns = max(40, min(_COLUMNS, _POINTS_OF_ALL // len(lines)))
    smoothed = {line.number for line in lines if line.is_mean}
    drawn = [shape for line in lines for shape in _drawn(line, across, up, columns, line.number in smoothed)]
    plot = (
        f'<svg width="100%" height="{HEIGHT}" viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(drawn)}</svg>'
    )
    over = (*_labels(across, up, says_x, unit), *_crosses(lines, across), *_spots(lines, across, says_x))
    inside = "".join([*_grid(across, up), plot, *over])
    return f'<svg width="100%" height="{HEIGHT + 22}" role="img" aria-label="lines over an axis">{inside}</svg>'


def names_of(lines: Sequence[PlotLine]) -> str:
    """Explain the colors."""
    named = {line.number: (_color(line), f"{line.name}{_DASHED * _is_dashed(line)}") for line in lines}
    return legend(list(named.values()))


def axis_of(ys: Sequence[float], *, from_zero: bool) -> LinearAxis | LogAxis:
    """Choose the axis of finite values: logarithmic where they are positive and far apart."""
    low, high = min(ys), max(ys)
    if low > 0 and high / low >= _LOG:
        return LogAxis(low / 1.1, high * 1.1)
    if from_zero and low >= 0:
        return _padded(0.0, high, 0.08) if high else LinearAxis(0.0, 1.0)
    return _padded(low, high, 0.08)


def thinned(parts: Sequence[Sequence[Point]], across: LinearAxis, columns: int) -> Sequence[Sequence[Point]]:
    """Keep the ends of each part, and of each column the lowest and the highest point, in their order.

    Where there are more parts than columns, points stand by themselves.
    """
    if len(parts) > columns:
        points = sorted(point for part in parts for point in part)
        return [[point] for point in _extremes_of_columns(points, across, columns)]
    if sum(map(len, parts)) <= 2 * columns:
        return parts
    return [[*part[:1], *_extremes_of_columns(part[1:-1], across, columns), *part[1:][-1:]] for part in parts]


def _extremes_of_columns(points: Sequence[Point], across: LinearAxis, columns: int) -> Iterator[Point]:
    for _, column in groupby(points, key=lambda point: int(across.share(point[0]) / 100 * columns)):
        yield from _extremes(list(column))


def _extremes(column: Sequence[Point]) -> list[Point]:
    kept = {column.index(f(column, key=lambda point: point[1])) for f in (min, max)}
    return [column[k] for k in sorted(kept)]


def _drawn(line: PlotLine, across: LinearAxis, up: LinearAxis | LogAxis, columns: int, has_mean: bool) -> Iterator[str]:
    """Draw a line: what is joined, and points that stand by themselves as dots."""
    kept = thinned(line.parts, across, columns)
    joined, alone = [part for part in kept if len(part) > 1], [part for part in kept if len(part) == 1]
    pale = ' stroke-opacity="0.35"' if has_mean and not line.is_mean else ""
    dash = ' stroke-dasharray="6 4"' if _is_dashed(line) else ""
    for parts, width, more in ((joined, 1 if pale else 1.8, pale + dash), (alone, 4, pale)):
        if parts:
            along = "".join(_along(part, across, up) for part in parts)
            style = f'stroke="var(--{_color(line)})" stroke-width="{width}" stroke-linecap="round" fill="none"'
            yield f'<path d="{along}" {style} vector-effect="non-scaling-stroke"{more}/>'


def _along(part: Sequence[Point], across: LinearAxis, up: LinearAxis | LogAxis) -> str:
    placed = [f"{across.share(x):.2f},{100 - up.share(y):.2f}" for x, y in part]
    return f"M{placed[0]}" + ("".join(f"L{place}" for place in placed[1:]) or "h0")


def _color(line: PlotLine) -> str:
    return COLORS[line.number % len(COLORS)]


def _is_dashed(line: PlotLine) -> bool:
    return line.number >= len(COLORS)


def _crosses(lines: Sequence[PlotLine], across: LinearAxis) -> Iterator[str]:
    """Mark values that cannot be drawn, one a column."""
    for line in lines:
        for x in sorted({round(across.share(x)) for x, _ in line.crosses}):
            place = f'text-anchor="middle" x="{x:g}%" y="{8 + 9 * (line.number % 3)}"'
            yield f'<text class="cross" style="fill:var(--{_color(line)})" {place}>×</text>'


def _spots(lines: Sequence[PlotLine], across: LinearAxis, says_x: Callable[[float], str]) -> Iterator[str]:
    """Let each place across the plot tell the first point there of each line."""
    told: list[list[str]] = [[] for _ in range(_SPOTS)]
    for line in lines:
        at: dict[int, Point] = {}
        for x, y in () if line.is_mean else (*chain.from_iterable(line.parts), *line.crosses):
            at.setdefault(min(_SPOTS - 1, int(across.share(x) / 100 * _SPOTS)), (x, y))
        for spot, (x, y) in at.items():
            told[spot].append(f"{line.name}: {y:.5g} at {says_x(x)}")
    for spot, words in enumerate(told):
        if words:
            place = f'x="{100 * spot / _SPOTS:.2f}%" y="0" width="{100 / _SPOTS:.2f}%" height="{HEIGHT}"'
            yield f'<rect class="spot" {place}><title>{text(chr(10).join(words))}</title></rect>'


def _grid(across: LinearAxis, up: LinearAxis | LogAxis) -> Iterator[str]:
    yield f'<line class="edge" x1="0" x2="100%" y1="{HEIGHT}" y2="{HEIGHT}"/>'
    for tick in across.ticks:
        x = across.share(tick)
        yield f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{HEIGHT}"/>'
    for tick in _shown(up):
        y = HEIGHT * (1 - up.share(tick) / 100)
        yield f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'


def _labels(across: LinearAxis, up: LinearAxis | LogAxis, says_x: Callable[[float], str], unit: str) -> Iterator[str]:
    """Write the numbers of both axes, above lines, which would hide them."""
    for number, tick in enumerate(across.ticks):
        x = across.share(tick)
        anchor = "start" if x < 3 else "end" if x > 94 else "middle"
        kind = "tick" if number % 2 == 0 else "tick wide-only"
        yield f'<text class="{kind}" text-anchor="{anchor}" x="{x:.2f}%" y="{HEIGHT + 16}">{text(says_x(tick))}</text>'
    for tick in _shown(up):
        y = HEIGHT * (1 - up.share(tick) / 100)
        if y > 12:
            yield f'<text class="tick haloed" x="2" y="{y - 3:.1f}">{tick:.6g}{unit}</text>'


def _shown(up: LinearAxis | LogAxis) -> Sequence[float]:
    """Leave out ticks where they are many."""
    ticks = up.ticks
    return ticks[:: math.ceil(len(ticks) / _MOST_TICKS) or 1]


def _padded(low: float, high: float, share: float) -> LinearAxis:
    """Make an axis with room at its ends; around a single value some."""
    if low == high:
        return LinearAxis(low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0))
    return LinearAxis(low - share * (high - low) * (low != 0.0), high + share * (high - low))
