"""Fit times by size with one straight line, or several if caches, bursts or another algorithm require it.

    time
      |                      . '      A piece is a straight line from its first size on. It may
      |                  . '          start above the previous piece's end, never below: a jump
      |              | '              is a switch to another algorithm or protocol.
      |     . - ' - '
      | . '
      +----------------------- size

The fit uses the median of each size's samples, which is robust against other jobs' traffic. Errors are relative. Sizes
with unusual errors get Huber's weights.

Fitted times never fall with size. The number of pieces follows from Schwarz's criterion for errors with Laplace's
distribution. All functions are pure: equal samples give equal fits on all ranks.
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
"""Minimum number of sizes of a piece; two would fit any noise."""

FINEST = 0.01
"""Smaller relative errors count as equal (assumed repeatability of a call)."""

DISTURBED = 0.15
"""Relative distance to the fit above which a time counts as disturbed by another job (assumed)."""

_ROUNDS = 5  # maximum of reweighting rounds (assumed)
_SETTLED = 0.01
_NOTHING = 1e-9  # relative rounding error
_HUBER = 1.5  # errors above this many median errors are unusual; Huber's 1.345 σ is 2 for a Gaussian


@dataclass(frozen=True, slots=True)
class _Break:
    at: float
    jumps: bool


Breaks = tuple[_Break, ...]


def fit(samples: Sequence[Sample], most_pieces: int = MOST_PIECES) -> Fit:
    """Fit pieces to (size, µs). Needs at least one sample; with a single size, time is proportional to size."""
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
    """Make a fit end at the shortest time of the largest size, so that larger sizes get the rate of long transfers.

    A fit weighs all sizes equally. Over 100 Mbit/s, fits were 5 to 7 % too low at 24 MB (measured, 2026-11). The time
    is ignored if it differs from the fit by `DISTURBED`, or by 2 * `DISTURBED` for a repeated size.
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
    """Return (size, median time), sorted by size; times are at least 1 ns."""
    by_size: dict[float, list[float]] = {}
    for size, us in samples:
        by_size.setdefault(float(size), []).append(max(us, 1e-3))
    return [(size, statistics.median(by_size[size])) for size in sorted(by_size)]


def _noise(samples: Sequence[Sample], centre: Mapping[float, float]) -> float:
    off = [abs(max(us, 1e-3) - centre[float(size)]) / centre[float(size)] for size, us in samples]
    return statistics.median(off)


def _chosen_breaks(x: Vector, y: Vector, most_pieces: int) -> Breaks:
    """Repeatedly add the best break and move each break to its best size. Return the breaks of best score."""

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
    """Yield changes of slope at measured sizes, and changes of slope and jumps at geometric means of neighbors."""
    for k in range(len(x) - 1):
        if k:
            yield _Break(float(x[k]), jumps=False)
        between = float(math.sqrt(float(x[k]) * float(x[k + 1]))) if x[k] > 0 else float(x[k + 1]) / 2
        yield _Break(between, jumps=False)
        yield _Break(between, jumps=True)


def _is_possible(x: Vector, breaks: Sequence[_Break]) -> bool:
    """Return True if each piece has enough sizes, and there are more sizes than parameters."""
    if len(x) <= _parameters(breaks):
        return False
    first = [0, *(int(np.searchsorted(x, new.at, "left")) for new in breaks)]
    after = [*(int(np.searchsorted(x, new.at, "right")) for new in breaks), len(x)]
    return all(end - begin >= FEWEST_POINTS for begin, end in zip(first, after, strict=True))


def _parameters(breaks: Sequence[_Break]) -> int:
    """Count the fit's parameters: height, slope, and each break's size, slope and jump."""
    return 2 + sum(3 if new.jumps else 2 for new in breaks)


def _score(x: Vector, y: Vector, breaks: Sequence[_Break]) -> float:
    """Score by Schwarz's criterion for errors with Laplace's distribution: 2 n ln(mean error) + parameters · ln n.

    A break's size counts twice, because the best of many sizes fits noise better than one parameter would.
    """
    _, errors = _solve(x, y, breaks)
    n = len(x)
    return 2 * n * math.log(float(np.mean(errors)) + FINEST) + (_parameters(breaks) + len(breaks)) * math.log(n)


def _columns(x: Vector, breaks: Sequence[_Break]) -> Vector:
    """Return the regressors of height, slopes and jumps; non-negative coefficients make times non-decreasing."""
    edges = [0.0, *(new.at for new in breaks), math.inf]
    columns = [np.ones_like(x)]
    columns += [np.minimum(np.maximum(x, low), high) - low for low, high in pairwise(edges)]
    columns += [(x >= new.at).astype(np.float64) for new in breaks if new.jumps]
    return np.array(columns).T


def _solve(x: Vector, y: Vector, breaks: Sequence[_Break]) -> tuple[Vector, Vector]:
    """Return height, slopes and jumps of least error, and the relative error at each size."""
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
    """Return each size's weight: usual / error for an error above the usual error, otherwise 1."""
    usual = max(_HUBER * float(np.median(errors)), FINEST)
    return np.minimum(1.0, usual / np.maximum(errors, 1e-12))


def _non_negative(rows: Vector, targets: Vector) -> Vector:
    """Solve non-negative least squares by Lawson and Hanson's active sets."""
    scale = np.sqrt(np.sum(rows * rows, axis=0))
    scale[scale == 0] = 1.0
    rows = rows / scale
    gram, moment = rows.T @ rows, rows.T @ targets
    count = len(scale)
    try:
        solution: Vector = np.linalg.solve(gram, moment).astype(np.float64)
        if solution.min() >= 0:
            return _without_dust(solution) / scale
    except np.linalg.LinAlgError:  # collinear columns: only one enters below
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
    return np.where(coefficients > _NOTHING, coefficients, 0.0)


# Pieces, with intervals


def _pieces(x: Vector, y: Vector, breaks: Sequence[_Break], coefficients: Vector, errors: Vector) -> tuple[Piece, ...]:
    """Convert heights, slopes and jumps to lines, merging equal neighbors."""
    covariance = _covariance(x, y, breaks, errors)
    quantile = student(len(x) - len(coefficients))
    starts = [0.0, *(new.at for new in breaks)]
    jump_column = len(starts) + 1
    height = np.zeros(len(coefficients))  # coefficients of the line's height at 0
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
    """Estimate the coefficients' covariance from the errors; None without a degree of freedom."""
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
"""Student's t at 97.5 % for 1 to 10 degrees of freedom (statistical tables)."""


def student(degrees: int) -> float:
    """Return half the width of a 95 % interval, in standard errors."""
    if degrees < 1:
        return math.inf
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    return 1.96 + 2.4 / degrees + 2.8 / degrees**2  # Cornish and Fisher's expansion, within 0.001 from 11 on
