"""Piecewise linear times by size.

Below the smallest measured size the first line continues to 0. Beyond the largest, time grows by the steeper of the
last line and the chord over all measurements. `trace` approximates any price by straight lines.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter
from typing import Any

from fxcomp.cost.reading import FLAG, MOST, listed, null_or, number, record, whole, wrong

SMALLEST = 64.0
"""Prices up to this size (bytes or elements) are assumed linear."""

TOLERANCE = 1e-4
"""Maximum relative error in the middle of a line."""

_NARROW = 1.001  # ratio of sizes below which a jump is not refined


@dataclass(frozen=True, slots=True)
class Curve:
    sizes: tuple[float, ...]
    values: tuple[float, ...]
    slopes: tuple[float, ...]
    """Slope from each size to the next."""

    def at(self, size: float) -> float:
        number = bisect_right(self.sizes, size) - 1
        return self.values[number] + (size - self.sizes[number]) * self.slopes[number]


def trace(price: Callable[[float], float], largest: float) -> Curve:
    """Approximate a price from 0 to `largest` (above 0) by lines.

    Sizes grow by a factor of 4, with further sizes where lines do not match the price.
    """
    sizes = [0.0]
    size = SMALLEST
    while size < largest:
        sizes.append(size)
        size *= 4
    sizes.append(largest)
    points = [(size, price(size)) for size in sizes]
    found = [points[0]]
    for before, after in pairwise(points):
        _refine(price, before, after, found)
        found.append(after)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(found)]
    return Curve(tuple(size for size, _ in found), tuple(us for _, us in found), (*slopes, slopes[-1]))


Point = tuple[float, float]


def _refine(price: Callable[[float], float], before: Point, after: Point, found: list[Point]) -> None:
    if after[0] <= max(SMALLEST, before[0] * _NARROW):
        return
    size = (before[0] + after[0]) / 2
    us = price(size)
    if abs(us - (before[1] + after[1]) / 2) <= TOLERANCE * abs(us):
        return
    middle = (size, us)
    _refine(price, before, middle, found)
    found.append(middle)
    _refine(price, middle, after, found)


Sample = tuple[float, float]
"""Size and time in µs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Line `at_zero_us + us_per_unit * size` from `start` on. Errors are half-widths of 95 % intervals."""

    start: float
    at_zero_us: float
    us_per_unit: float
    at_zero_error: float = math.inf
    us_per_unit_error: float = math.inf
    is_switch: bool = False
    """True if the line starts above the previous one's end."""

    def at(self, size: float) -> float:
        return self.at_zero_us + self.us_per_unit * size

    def times(self, factor: float) -> Piece:
        names = ("at_zero_us", "us_per_unit", "at_zero_error", "us_per_unit_error")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def to_json(self) -> dict[str, Any]:
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Fit:
    pieces: tuple[Piece, ...]
    smallest: float
    largest: float
    samples: int
    residual: float = 0.0
    """Median relative error over sizes."""
    worst: float = 0.0
    """Largest relative error over sizes."""
    noise: float = 0.0
    """Median relative distance of samples from their size's median."""

    def at(self, size: float) -> float:
        """Return the non-decreasing time for a size, in µs."""
        pieces = self.pieces
        piece = pieces[max(0, bisect_right(pieces, size, key=attrgetter("start")) - 1)]
        if size <= self.largest:
            return piece.at(size)
        end = piece.at(self.largest)
        first = pieces[0].at(self.smallest)
        chord = (end - first) / (self.largest - self.smallest) if self.largest > self.smallest else 0.0
        return end + (size - self.largest) * max(piece.us_per_unit, chord)

    @property
    def breaks(self) -> list[float]:
        """Sizes between which times are linear."""
        return [*(piece.start for piece in self.pieces), self.largest]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "pieces": [piece.to_json() for piece in self.pieces]}

    @classmethod
    def from_json(cls, data: Any, place: str = "the fit") -> Fit:
        """Return the fit in `data`. Raise BadOption for wrong data, and for times that fall with size."""
        fit = _FIT(data, place)
        _check_rises(fit, place)
        return fit

    @classmethod
    def line(cls, at_zero_us: float, us_per_unit: float, residual: float = 0.0) -> Fit:
        return cls((Piece(0.0, at_zero_us, us_per_unit),), 0.0, 0.0, 0, residual, residual)


_INTERVAL = null_or(number(), null=math.inf)
_PIECE = record(
    Piece,
    start=number(),
    at_zero_us=number(-MOST),
    us_per_unit=number(),
    at_zero_error=_INTERVAL,
    us_per_unit_error=_INTERVAL,
    is_switch=FLAG,
)
_FIT = record(
    Fit,
    pieces=listed(_PIECE),
    smallest=number(),
    largest=number(),
    samples=whole(0),
    residual=number(),
    worst=number(),
    noise=number(),
)

_ROUNDING = 1e-6
"""Relative rounding error by which a piece may start below the previous piece's end."""


def _check_rises(fit: Fit, place: str) -> None:
    first, last = fit.pieces[0], fit.pieces[-1]
    if first.at_zero_us < 0:
        raise wrong(f"{place}.pieces[0].at_zero_us", "0 or more", first.at_zero_us)
    for k, (one, after) in enumerate(pairwise(fit.pieces), start=1):
        if after.start <= one.start:
            raise wrong(f"{place}.pieces[{k}].start", f"above the piece before it, {one.start:g}", after.start)
        rounding = _ROUNDING * max(one.at(after.start), _ROUNDING * abs(after.at_zero_us))
        if after.at(after.start) < one.at(after.start) - rounding:
            expected = f"{one.at(after.start):g} us or more at its start, where the one before it ends"
            raise wrong(f"{place}.pieces[{k}]", expected, after.at(after.start))
    if not last.start <= fit.largest or not fit.smallest <= fit.largest:
        raise wrong(
            f"{place}.largest", f"{max(last.start, fit.smallest):g} or more, as smallest and pieces", fit.largest
        )
    if not math.isfinite(fit.at(MOST)):
        raise wrong(place, "times that are finite", fit.at(MOST))


def interpolate(points: Sequence[Sample], size: float) -> float:
    """Interpolate linearly between points sorted by size, without a fit.

    Below the first point, the result is constant. Beyond the last point, the chord from first to last point continues;
    a single point's time grows in proportion to size. A time below an earlier time is replaced by the earlier time.
    """
    rising = list(accumulate((us for _, us in points), max))
    first, last = points[0][0], points[-1][0]
    right = bisect_right(points, size, key=itemgetter(0))
    if right == 0:
        return rising[0]
    if len(points) == 1:
        return rising[0] * size / first
    if right == len(points):
        return rising[-1] + (size - last) * (rising[-1] - rising[0]) / (last - first)
    low, high = points[right - 1][0], points[right][0]
    return rising[right - 1] + (size - low) * (rising[right] - rising[right - 1]) / (high - low)
