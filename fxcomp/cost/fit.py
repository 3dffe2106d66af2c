"""Fit times against sizes: one line, or several where caches, bursts or another algorithm make one line err.

    time
      |                      . '      A piece is a line from some size on. It may be steeper or flatter than the one
      |                  . '          before, and it may start higher, never lower. A piece that starts higher is a
      |              | '              switch: from there on another algorithm runs, or another protocol.
      |     . - ' - '
      | . '
      +----------------------- size

What is fitted are the medians of the samples of each size, so that another job's traffic bends nothing. Errors are
relative: 1 µs too much at 10 µs is as bad as 1 ms too much at 10 ms. Sizes whose error is above the usual weigh less
(Huber's weights), so that one bad size among good ones bends little.

A fitted time never falls with size: every line rises, and every jump goes up. How many pieces there are follows from
Schwarz's criterion for errors with Laplace's distribution: each piece must pay for its slope, its place and its jump.

Between two measured sizes a time lies on a line. Below the smallest the first line goes on down to size 0. Beyond the
largest the last line goes on, or the chord over all that was measured, whichever is steeper: a table never promises
that more is cheaper than what it has seen.

Everything here is a pure function of samples. The same samples give the same fit on every rank.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxcomp.cost.reading import FLAG, MOST, listed, null_or, number, record, whole, wrong

Vector = NDArray[np.float64]
Sample = tuple[float, float]
"""A size and its time, in µs."""

MOST_PIECES = 4
FEWEST_POINTS = 3
"""A piece needs so many sizes: two make a line out of any noise."""

FINEST = 0.01
"""Relative errors below this are not told apart (assumed: the same call twice differs by as much)."""

_ROUNDS = 5  # of reweighting at most, until no weight changes by more than `_SETTLED` (both assumed)
_SETTLED = 0.01
_NOTHING = 1e-9  # of what a time is made of: rounding
_HUBER = 1.5  # times the median error: where a size's error counts as unusual; 1.345 σ is 2 median errors of a Gaussian


# Data


@dataclass(frozen=True, slots=True)
class Piece:
    """A line over sizes: `at_zero_us + us_per_unit * size` from `start` on. Errors are half of the 95 % interval."""

    start: float
    at_zero_us: float
    us_per_unit: float
    at_zero_error: float = math.inf
    us_per_unit_error: float = math.inf
    is_switch: bool = False
    """The line starts higher than the one before it ends."""

    def at(self, size: float) -> float:
        return self.at_zero_us + self.us_per_unit * size

    def to_json(self) -> dict[str, Any]:
        """Plain data; an interval that is not known is None."""
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Fit:
    """Times by size, and how well they fit the samples. `noise` is how far samples of one size lie apart."""

    pieces: tuple[Piece, ...]
    smallest: float
    largest: float
    samples: int
    residual: float = 0.0
    """The median relative error over the sizes it was fitted to."""
    worst: float = 0.0
    """The largest relative error over the sizes it was fitted to."""
    noise: float = 0.0
    """How far one sample of a size lies from the size's median, relative, in the median."""

    def at(self, size: float) -> float:
        """The time for a size, in µs. Never falls."""
        pieces = self.pieces
        piece = pieces[max(0, bisect_right(pieces, size, key=_start) - 1)]
        if size <= self.largest:
            return piece.at(size)
        end = piece.at(self.largest)
        first = pieces[0].at(self.smallest)
        chord = (end - first) / (self.largest - self.smallest) if self.largest > self.smallest else 0.0
        return end + (size - self.largest) * max(piece.us_per_unit, chord)

    @property
    def switches(self) -> tuple[float, ...]:
        """The sizes at which another algorithm seems to take over."""
        return tuple(piece.start for piece in self.pieces if piece.is_switch)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "pieces": [piece.to_json() for piece in self.pieces]}

    @classmethod
    def from_json(cls, data: Any, place: str = "the fit") -> Fit:
        """Build a fit from `to_json`'s data, which stands at `place`. Raises BadOption, also for times that fall."""
        fit = _FIT(data, place)
        _check_rises(fit, place)
        return fit

    @classmethod
    def line(cls, at_zero_us: float, us_per_unit: float, residual: float = 0.0) -> Fit:
        """A line that somebody says holds everywhere."""
        return cls((Piece(0.0, at_zero_us, us_per_unit),), 0.0, 0.0, 0, residual, residual)


def _start(piece: Piece) -> float:
    return piece.start


# Reading

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
"""Relative: by so much a piece may start lower than the one before it ends (a float's rounding is far smaller); where a
time is a small difference of large numbers, by its square of those."""


def _check_rises(fit: Fit, place: str) -> None:
    """Raise BadOption where a time would fall with size, or be below 0."""
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


# Fitting


@dataclass(frozen=True, slots=True)
class _Break:
    """Where one piece ends and the next begins."""

    at: float
    jumps: bool


Breaks = tuple[_Break, ...]


def fit(samples: Sequence[Sample], most_pieces: int = MOST_PIECES) -> Fit:
    """Fit pieces to (size, µs). Needs one sample at least; from one size alone, time grows in proportion to size."""
    points = medians(samples)
    assert points, "a fit needs a sample"
    x, y = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    breaks = _chosen_breaks(x, y, most_pieces)
    coefficients, errors = _solve(x, y, breaks)
    return Fit(
        pieces=_pieces(x, y, breaks, coefficients, errors),
        smallest=float(x[0]),
        largest=float(x[-1]),
        samples=len(samples),
        residual=float(np.median(errors)),
        worst=float(np.max(errors)),
        noise=_noise(samples, dict(points)),
    )


def medians(samples: Sequence[Sample]) -> list[Sample]:
    """The median time of each size, by size. A time of nothing counts as a nanosecond."""
    by_size: dict[float, list[float]] = {}
    for size, us in samples:
        by_size.setdefault(float(size), []).append(max(us, 1e-3))
    return [(size, statistics.median(by_size[size])) for size in sorted(by_size)]


def left_out_errors(
    samples: Sequence[Sample], fitted: Callable[[Sequence[Sample]], Callable[[float], float]]
) -> list[float]:
    """The relative error at each size, judged by a fit that never saw this size; the smallest and largest included."""
    points = medians(samples)
    if len(points) < 2:
        return []
    errors: list[float] = []
    for size, us in points:
        rest = [(other, time) for other, time in samples if float(other) != size]
        errors.append(abs(fitted(rest)(size) - us) / us)
    return errors


def interpolate(points: Sequence[Sample], size: float) -> float:
    """Follow lines from point to point instead of a fit: believe every one. Points lie by size.

    Constant below the first point; beyond the last along the chord over all; in proportion to size if there is but one.
    Never falling: a point below an earlier one counts as high as that.
    """
    rising = list(accumulate((us for _, us in points), max))
    first, last = points[0][0], points[-1][0]
    right = bisect_right(points, size, key=_size)
    if right == 0:
        return rising[0]
    if len(points) == 1:
        return rising[0] * size / first
    if right == len(points):
        return rising[-1] + (size - last) * (rising[-1] - rising[0]) / (last - first)
    low, high = points[right - 1][0], points[right][0]
    return rising[right - 1] + (size - low) * (rising[right] - rising[right - 1]) / (high - low)


def _size(point: Sample) -> float:
    return point[0]


def _noise(samples: Sequence[Sample], centre: Mapping[float, float]) -> float:
    off = [abs(max(us, 1e-3) - centre[float(size)]) / centre[float(size)] for size, us in samples]
    return statistics.median(off)


def _chosen_breaks(x: Vector, y: Vector, most_pieces: int) -> Breaks:
    """Add the break that helps most, one after the other, move each to where it helps most, and keep what pays."""
    known: dict[Breaks, float] = {}

    def score(breaks: Breaks) -> float:
        if breaks not in known:
            known[breaks] = _score(x, y, breaks) if _is_possible(x, breaks) else math.inf
        return known[breaks]

    candidates = list(_candidates(x))
    chosen: Breaks = ()
    best = chosen
    for _ in range(most_pieces - 1):
        chosen = min((_with(chosen, new) for new in candidates), key=score, default=())
        if score(chosen) == math.inf:
            break
        for old in chosen:
            rest = tuple(other for other in chosen if other is not old)
            chosen = min([chosen, *(_with(rest, new) for new in candidates)], key=score)
        if score(chosen) < score(best):
            best = chosen
    return best


def _with(breaks: Breaks, new: _Break) -> Breaks:
    return tuple(sorted((*breaks, new), key=lambda one: one.at))


def _candidates(x: Vector) -> Iterator[_Break]:
    """A bend may be at a measured size or between two; a jump is somewhere between two: at their geometric mean."""
    for k in range(len(x) - 1):
        if k:
            yield _Break(float(x[k]), jumps=False)
        between = float(math.sqrt(float(x[k]) * float(x[k + 1]))) if x[k] > 0 else float(x[k + 1]) / 2
        yield _Break(between, jumps=False)
        yield _Break(between, jumps=True)


def _is_possible(x: Vector, breaks: Sequence[_Break]) -> bool:
    """Every piece has sizes enough, and more sizes are known than numbers are sought."""
    if len(x) <= _parameters(breaks):
        return False
    first = [0, *(int(np.searchsorted(x, new.at, "left")) for new in breaks)]
    behind = [*(int(np.searchsorted(x, new.at, "right")) for new in breaks), len(x)]
    return all(end - begin >= FEWEST_POINTS for begin, end in zip(first, behind, strict=True))


def _parameters(breaks: Sequence[_Break]) -> int:
    """Height and slope; each break has a place and a slope, and a jump a height as well."""
    return 2 + sum(3 if new.jumps else 2 for new in breaks)


def _score(x: Vector, y: Vector, breaks: Sequence[_Break]) -> float:
    """Schwarz's criterion for errors with Laplace's distribution: 2 n ln(mean error) + parameters · ln n.

    A break's place counts twice: the best of many places fits noise better than one parameter would.
    """
    _, errors = _solve(x, y, breaks)
    n = len(x)
    return 2 * n * math.log(float(np.mean(errors)) + FINEST) + (_parameters(breaks) + len(breaks)) * math.log(n)


def _columns(x: Vector, breaks: Sequence[_Break]) -> Vector:
    """What height, slopes and jumps multiply: with none of them below 0, time never falls."""
    edges = [0.0, *(new.at for new in breaks), math.inf]
    columns = [np.ones_like(x)]
    columns += [np.minimum(np.maximum(x, low), high) - low for low, high in pairwise(edges)]
    columns += [(x >= new.at).astype(np.float64) for new in breaks if new.jumps]
    return np.array(columns).T


def _solve(x: Vector, y: Vector, breaks: Sequence[_Break]) -> tuple[Vector, Vector]:
    """Height, slopes and jumps that err least, and the relative error at each size."""
    if len(x) == 1:
        return np.array([0.0, y[0] / x[0]]) if x[0] > 0 else np.array([y[0], 0.0]), np.zeros(1)
    rows = _columns(x, breaks) / y[:, None]
    weights = np.ones_like(y)
    coefficients, errors = np.zeros(rows.shape[1]), np.zeros_like(y)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients = _non_negative(rows * root[:, None], root)
        errors = np.abs(rows @ coefficients - 1.0)
        usual = max(_HUBER * float(np.median(errors)), FINEST)
        before, weights = weights, np.minimum(1.0, usual / np.maximum(errors, 1e-12))
        if np.max(np.abs(weights - before)) < _SETTLED:
            break
    return coefficients, errors


def _non_negative(rows: Vector, targets: Vector) -> Vector:
    """Least squares without a coefficient below 0: Lawson and Hanson's active sets."""
    scale = np.sqrt(np.sum(rows * rows, axis=0))
    scale[scale == 0] = 1.0
    rows = rows / scale
    gram, moment = rows.T @ rows, rows.T @ targets
    count = len(scale)
    try:
        solution: Vector = np.linalg.solve(gram, moment).astype(np.float64)
        if solution.min() >= 0:
            return _without_dust(solution) / scale
    except np.linalg.LinAlgError:  # two columns say the same: one of them enters below, the other stays out
        pass
    free = np.zeros(count, dtype=bool)
    solution = np.zeros(count)
    for _ in range(3 * count):
        slope = moment - gram @ solution
        slope[free] = -math.inf
        enters = int(np.argmax(slope))
        if slope[enters] <= 1e-10:
            break
        free[enters] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=1e-12)[0]
            if np.all(trial[free] > 0):
                break
            falling = free & (trial <= 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(falling, solution / (solution - trial), math.inf)
            solution = solution + float(np.nanmin(steps)) * (trial - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0
            if not free.any():
                trial = np.zeros(count)
                break
        solution = trial
    return _without_dust(solution) / scale


def _without_dust(coefficients: Vector) -> Vector:
    """Nothing where rounding alone is left."""
    return np.where(coefficients > _NOTHING, coefficients, 0.0)


# Pieces, with intervals


def _pieces(x: Vector, y: Vector, breaks: Sequence[_Break], coefficients: Vector, errors: Vector) -> tuple[Piece, ...]:
    """Turn heights, slopes and jumps into lines. Pieces that differ in nothing become one."""
    covariance = _covariance(x, y, breaks, errors)
    quantile = student(len(x) - len(coefficients))
    starts = [0.0, *(new.at for new in breaks)]
    jump_column = len(starts) + 1
    height = np.zeros(len(coefficients))  # the line's height at 0, as a sum of coefficients
    height[0] = 1.0
    pieces: list[Piece] = []
    for k, start in enumerate(starts):
        slope = np.zeros(len(coefficients))
        slope[k + 1] = 1.0
        jump = 0.0
        if k:
            height[k] += start
            height[k + 1] -= start
            if breaks[k - 1].jumps:
                height[jump_column] = 1.0
                jump = float(coefficients[jump_column])
                jump_column += 1
        piece = Piece(
            start=start,
            at_zero_us=float(height @ coefficients),
            us_per_unit=float(slope @ coefficients),
            at_zero_error=_half_width(height, covariance, quantile),
            us_per_unit_error=_half_width(slope, covariance, quantile),
            is_switch=jump > 0,
        )
        if pieces and not jump and piece.us_per_unit == pieces[-1].us_per_unit:
            continue
        pieces.append(piece)
    return tuple(pieces)


def _covariance(x: Vector, y: Vector, breaks: Sequence[_Break], errors: Vector) -> Vector | None:
    """Of the coefficients, from the spread of the sizes about the fit; None if no size is left over to tell."""
    rows = _columns(x, breaks) / y[:, None]
    left_over = len(x) - rows.shape[1]
    if left_over < 1:
        return None
    usual = max(_HUBER * float(np.median(errors)), FINEST)
    weights = np.minimum(1.0, usual / np.maximum(errors, 1e-12))
    scale = np.sqrt(np.sum(rows * rows, axis=0))
    scaled = rows / scale
    gram: Vector = scaled.T @ (scaled * weights[:, None])
    inverse = np.asarray(np.linalg.pinv(gram, rcond=1e-12, hermitian=True), dtype=np.float64)  # pyright: ignore[reportUnknownMemberType]  # untyped
    variance = float(np.sum(weights * errors**2)) / left_over
    return variance * inverse / np.outer(scale, scale)


def _half_width(weights: Vector, covariance: Vector | None, quantile: float) -> float:
    if covariance is None:
        return math.inf
    return quantile * math.sqrt(max(0.0, float(weights @ covariance @ weights)))


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5 % for 1 to 10 degrees of freedom (any statistical table)."""


def student(degrees: int) -> float:
    """How many standard errors half a 95 % interval is wide."""
    if degrees < 1:
        return math.inf
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    return 1.96 + 2.4 / degrees + 2.8 / degrees**2  # Cornish and Fisher's expansion, within 0.001 from 11 on
