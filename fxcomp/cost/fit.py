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

Everything here is a pure function of samples. The same samples give the same fit on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fxcomp.cost.piecewise import Fit, Piece, Sample

Vector = NDArray[np.float64]

MOST_PIECES = 4
FEWEST_POINTS = 3
"""A piece needs so many sizes: two make a line out of any noise."""

FINEST = 0.01
"""Relative errors below this are not told apart (assumed: the same call twice differs by as much)."""

DISTURBED = 0.15
"""One time that is further off the line, or several that are twice as far off, are another job's doing (assumed)."""

_ROUNDS = 5  # of reweighting at most, until no weight changes by more than `_SETTLED` (both assumed)
_SETTLED = 0.01
_NOTHING = 1e-9  # of what a time is made of: rounding
_HUBER = 1.5  # times the median error: where a size's error counts as unusual; 1.345 σ is 2 median errors of a Gaussian


@dataclass(frozen=True, slots=True)
class _Break:
    """The place where one piece ends and the next begins."""

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


def anchored(found: Fit, samples: Sequence[Sample]) -> Fit:
    """Let a fit's end pass through the largest size's shortest time: the rate of long transfers continues beyond it.

    A line that errs least over all sizes gives small ones as much weight. Over 100 Mbit/s it told 2 % less than 4 MiB
    took, and 5 to 7 % less than 24 MB (measured, 2026-11). A largest size far off the line is taken as disturbed.
    """
    points, last = medians(samples), found.pieces[-1]
    largest = points[-1][0]
    times = [us for size, us in samples if size == largest]
    us, disturbed = min(times), DISTURBED * min(len(times), 2)
    start = max([last.start, *(size for size, _ in points if size <= largest / 2)])
    if start >= largest or not FINEST < abs(us / found.at(largest) - 1) < disturbed:
        return found
    slope = (us - found.at(start)) / (largest - start)
    if slope <= 0:
        return found
    end = Piece(start, found.at(start) - slope * start, slope)
    if start > last.start:
        return replace(found, pieces=(*found.pieces, end))
    return replace(found, pieces=(*found.pieces[:-1], replace(end, is_switch=last.is_switch)))


def medians(samples: Sequence[Sample]) -> list[Sample]:
    """Return the median time of each size, by size. A time of nothing counts as a nanosecond."""
    by_size: dict[float, list[float]] = {}
    for size, us in samples:
        by_size.setdefault(float(size), []).append(max(us, 1e-3))
    return [(size, statistics.median(by_size[size])) for size in sorted(by_size)]


def _noise(samples: Sequence[Sample], centre: Mapping[float, float]) -> float:
    off = [abs(max(us, 1e-3) - centre[float(size)]) / centre[float(size)] for size, us in samples]
    return statistics.median(off)


def _chosen_breaks(x: Vector, y: Vector, most_pieces: int) -> Breaks:
    """Add the break that helps most, one after the other, move each to where it helps most, and keep what pays."""

    @cache
    def score(breaks: Breaks) -> float:
        return _score(x, y, breaks) if _is_possible(x, breaks) else math.inf

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
    """Propose bends at measured sizes and between two, and jumps between two: at their geometric mean."""
    for k in range(len(x) - 1):
        if k:
            yield _Break(float(x[k]), jumps=False)
        between = float(math.sqrt(float(x[k]) * float(x[k + 1]))) if x[k] > 0 else float(x[k + 1]) / 2
        yield _Break(between, jumps=False)
        yield _Break(between, jumps=True)


def _is_possible(x: Vector, breaks: Sequence[_Break]) -> bool:
    """Return whether every piece has sizes enough, and that more sizes are known than numbers are sought."""
    if len(x) <= _parameters(breaks):
        return False
    first = [0, *(int(np.searchsorted(x, new.at, "left")) for new in breaks)]
    after = [*(int(np.searchsorted(x, new.at, "right")) for new in breaks), len(x)]
    return all(end - begin >= FEWEST_POINTS for begin, end in zip(first, after, strict=True))


def _parameters(breaks: Sequence[_Break]) -> int:
    """Count height and slope; each break has a place and a slope, and a jump a height as well."""
    return 2 + sum(3 if new.jumps else 2 for new in breaks)


def _score(x: Vector, y: Vector, breaks: Sequence[_Break]) -> float:
    """Score by Schwarz's criterion for errors with Laplace's distribution: 2 n ln(mean error) + parameters · ln n.

    A break's place counts twice: the best of many places fits noise better than one parameter would.
    """
    _, errors = _solve(x, y, breaks)
    n = len(x)
    return 2 * n * math.log(float(np.mean(errors)) + FINEST) + (_parameters(breaks) + len(breaks)) * math.log(n)


def _columns(x: Vector, breaks: Sequence[_Break]) -> Vector:
    """Return the regressors of height, slopes and jumps: with no coefficient below 0, time never falls."""
    edges = [0.0, *(new.at for new in breaks), math.inf]
    columns = [np.ones_like(x)]
    columns += [np.minimum(np.maximum(x, low), high) - low for low, high in pairwise(edges)]
    columns += [(x >= new.at).astype(np.float64) for new in breaks if new.jumps]
    return np.array(columns).T


def _solve(x: Vector, y: Vector, breaks: Sequence[_Break]) -> tuple[Vector, Vector]:
    """Return the height, slopes and jumps that err least, and the relative error at each size."""
    if len(x) == 1:
        return np.array([0.0, y[0] / x[0]]) if x[0] > 0 else np.array([y[0], 0.0]), np.zeros(1)
    rows = _columns(x, breaks) / y[:, None]
    weights = np.ones_like(y)
    coefficients, errors = np.zeros(rows.shape[1]), np.zeros_like(y)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients = _non_negative(rows * root[:, None], root)
        errors = np.abs(rows @ coefficients - 1.0)
        before, weights = weights, _huber_weights(errors)
        if np.max(np.abs(weights - before)) < _SETTLED:
            break
    return coefficients, errors


def _huber_weights(errors: Vector) -> Vector:
    """Weigh sizes whose error is above the usual by usual / error, the others by 1."""
    usual = max(_HUBER * float(np.median(errors)), FINEST)
    return np.minimum(1.0, usual / np.maximum(errors, 1e-12))


def _non_negative(rows: Vector, targets: Vector) -> Vector:
    """Solve least squares without a coefficient below 0, by Lawson and Hanson's active sets."""
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
    """Set coefficients to 0 that are rounding alone."""
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
    """Estimate the coefficients' covariance from the residuals; None if no degree of freedom is left."""
    rows = _columns(x, breaks) / y[:, None]
    left_over = len(x) - rows.shape[1]
    if left_over < 1:
        return None
    weights = _huber_weights(errors)
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
    """Return the standard errors in half a 95 % interval."""
    if degrees < 1:
        return math.inf
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    return 1.96 + 2.4 / degrees + 2.8 / degrees**2  # Cornish and Fisher's expansion, within 0.001 from 11 on
