"""Plot one metric of several runs. Long lines are thinned, and not joined across gaps.

Each column of a plot keeps its lowest and highest point, so no peak is lost.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

from fxcomp.report.html.render import Drawing, drawn

HEIGHT = 260
COLORS = ("one", "two", "three", "four", "five", "six")
_COLUMNS, _POINTS_OF_ALL = 300, 1800  # columns per plot; points of all its lines, to keep pages small
_SPOTS = 80  # ranges of the axis with a tooltip
_GAP = 5.0  # largest distance of joined points, in median distances of successive steps
_LOG = 100.0  # ratio of values from which an axis is logarithmic
_TICKS, _MOST_TICKS = 6, 10
LARGEST = 1e100
"""Only values of smaller magnitude are drawn."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PlotLine:
    name: str
    number: int
    parts: Sequence[Sequence[Point]]
    """Groups of joined points, in logged order."""
    crosses: Sequence[Point] = ()
    """Points whose value is not finite or too large."""
    is_mean: bool = False
    """True for a moving average, drawn over its pale original."""

    @property
    def color(self) -> str:
        return COLORS[self.number % len(COLORS)]

    @property
    def is_dashed(self) -> bool:
        return self.number >= len(COLORS)

    def smoothed(self, over: int) -> PlotLine:
        """Return moving averages over `over` points, within parts."""
        return PlotLine(self.name, self.number, [list(_means(part, over)) for part in self.parts], is_mean=True)


def line_of(name: str, number: int, steps: Sequence[float], xs: Sequence[float], ys: Sequence[float]) -> PlotLine:
    """Make a line, with gaps at values that cannot be drawn and where steps are missing or decrease."""
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
class Axis:
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value, in percent."""
        if self.is_log:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Labelled values: round numbers. A logarithmic axis has powers of ten and, if short, 2 and 5 times these."""
        if not self.is_log:
            step = round_step(self.high - self.low, _TICKS)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [k * step for k in range(first, last + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if math.log10(self.high / self.low) < 2.5 else (1,)
        found = [digit * 10.0**power for power in decades for digit in digits]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def round_step(whole: float, count: int) -> float:
    """Return 1, 2 or 5 times a power of ten that divides `whole` into about `count` steps."""
    if whole <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(whole / count))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= whole / count)


def line_plot(lines: Sequence[PlotLine], says_x: Callable[[float], str], unit: str = "") -> Drawing:
    """Draw lines, with crosses at the top for values that cannot be drawn. Empty if no line has points."""
    points = [point for line in lines for part in line.parts for point in part]
    if not points:
        return Drawing()
    xs = [*(x for x, _ in points), *(x for line in lines for x, _ in line.crosses)]
    across, up = _padded(min(xs), max(xs), 0.0), axis_of([y for _, y in points], from_zero=bool(unit))
    columns = max(40, min(_COLUMNS, _POINTS_OF_ALL // len(lines)))
    smoothed = {line.number for line in lines if line.is_mean}
    paths = [path for line in lines for path in _paths(line, across, up, columns, line.number in smoothed)]
    numbers = up.ticks[:: math.ceil(len(up.ticks) / _MOST_TICKS) or 1]
    rising = [(round(HEIGHT * (1 - up.share(tick) / 100), 1), f"{tick:.6g}{unit}") for tick in numbers]
    along = [(round(across.share(tick), 2), says_x(tick)) for tick in across.ticks]
    crosses = [(x, 8 + 9 * (line.number % 3), line.color)
               for line in lines for x in sorted({round(across.share(x)) for x, _ in line.crosses})]  # fmt: skip
    return drawn("plot", paths, along, rising, crosses, list(_spots(lines, across, says_x)), HEIGHT)


def names_of(lines: Sequence[PlotLine]) -> Drawing:
    """Draw the legend."""
    marks = {line.number: (line.color, line.name + ", dashed" * line.is_dashed) for line in lines}
    return drawn("legend", list(marks.values()))


def axis_of(ys: Sequence[float], *, from_zero: bool) -> Axis:
    """Choose an axis: logarithmic for positive values that are far apart."""
    low, high = min(ys), max(ys)
    if low > 0 and high / low >= _LOG:
        return Axis(low / 1.1, high * 1.1, is_log=True)
    if from_zero and low >= 0:
        return _padded(0.0, high, 0.08) if high else Axis(0.0, 1.0)
    return _padded(low, high, 0.08)


def thinned(parts: Sequence[Sequence[Point]], across: Axis, columns: int) -> Sequence[Sequence[Point]]:
    """Keep the ends of each part, and each column's lowest and highest point.

    With more parts than columns, points are not joined.
    """
    if len(parts) > columns:
        points = sorted(point for part in parts for point in part)
        return [[point] for point in _extremes(points, across, columns)]
    if sum(map(len, parts)) <= 2 * columns:
        return parts
    return [[*part[:1], *_extremes(part[1:-1], across, columns), *part[1:][-1:]] for part in parts]


def _extremes(points: Sequence[Point], across: Axis, columns: int) -> Iterator[Point]:
    for _, group in groupby(points, key=lambda point: int(across.share(point[0]) / 100 * columns)):
        column = list(group)
        kept = {column.index(f(column, key=lambda point: point[1])) for f in (min, max)}
        yield from (column[k] for k in sorted(kept))


def _paths(
    line: PlotLine, across: Axis, up: Axis, columns: int, has_mean: bool
) -> Iterator[tuple[str, str, float, bool, bool]]:
    kept = thinned(line.parts, across, columns)
    joined, alone = [part for part in kept if len(part) > 1], [part for part in kept if len(part) == 1]
    is_pale = has_mean and not line.is_mean
    for parts, width in ((joined, 1 if is_pale else 1.8), (alone, 4)):
        if parts:
            path = "".join(_along(part, across, up) for part in parts)
            yield path, line.color, width, is_pale, line.is_dashed and parts is joined


def _along(part: Sequence[Point], across: Axis, up: Axis) -> str:
    placed = [f"{across.share(x):.2f},{100 - up.share(y):.2f}" for x, y in part]
    return f"M{placed[0]}" + ("".join(f"L{place}" for place in placed[1:]) or "h0")


def _spots(
    lines: Sequence[PlotLine], across: Axis, says_x: Callable[[float], str]
) -> Iterator[tuple[float, float, str]]:
    """Yield (left, width, tooltip) of ranges of the axis. A tooltip lists each line's first point in the range."""
    words: list[list[str]] = [[] for _ in range(_SPOTS)]
    for line in lines:
        at: dict[int, Point] = {}
        for x, y in () if line.is_mean else (*chain.from_iterable(line.parts), *line.crosses):
            at.setdefault(min(_SPOTS - 1, int(across.share(x) / 100 * _SPOTS)), (x, y))
        for spot, (x, y) in at.items():
            words[spot].append(f"{line.name}: {y:.5g} at {says_x(x)}")
    width = 100 / _SPOTS
    yield from ((width * spot, width, "\n".join(each)) for spot, each in enumerate(words) if each)


def _padded(low: float, high: float, share: float) -> Axis:
    if low == high:
        return Axis(low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0))
    return Axis(low - share * (high - low) * (low != 0.0), high + share * (high - low))
