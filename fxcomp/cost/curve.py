"""Follow a price by lines over sizes, so that code that knows no cost table can ask for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

SMALLEST = 64.0
"""Up to this size a price is taken for a line."""

TOLERANCE = 1e-4
"""Relative: the middle of a line lies no further from the price."""

_NARROW = 1.001  # a jump lies between two sizes of this ratio, and is cut no further


@dataclass(frozen=True, slots=True)
class Curve:
    """Lines from size to size; the last one goes on."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]
    slopes: tuple[float, ...]
    """Of the line that starts at each size."""

    def at(self, size: float) -> float:
        number = bisect_right(self.sizes, size) - 1
        return self.values[number] + (size - self.sizes[number]) * self.slopes[number]


def trace(price: Callable[[float], float], largest: float) -> Curve:
    """Follow a price from size 0 to the largest, which must be above 0.

    Sizes four times as large as the one before, and more of them where a line between two does not meet the price.
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
    """Append the points that are needed between two."""
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
