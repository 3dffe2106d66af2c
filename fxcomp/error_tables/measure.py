"""Measure the errors of one family of compressors on gradients plus residuals.

    measure(gradients, residuals, family)  -->  one row per gradient, one error per compressor of the family

With g a gradient and v the gradient plus its residual, each rank computes |g|², |v|², and the errors of top-k or of
codecs. The errors of low-rank compressors are measured on the sum over ranks, by sketches. One all_reduce in fp64 sums
these numbers, so every rank has the same rows.

    error = sum over ranks of |v - decoded|² / sum over ranks of |v|²       top-k and codecs
    error = |V - best matrix of rank r|² / |V|²,  V = sum over ranks of v   low rank

A rank with a gradient or residual that is not finite adds zeros for this gradient. Memory: a copy of the largest
gradient with its residual (two copies for top-k), 128 kB of sampled values per gradient, and sketches of 32 rows and
columns per matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, randomness
from fxcomp.compressors.topk import MOST_VALUES, counts
from fxcomp.error_tables.codecs import Drawn, draw_runs, lost_by_codec, lost_by_largest, squares
from fxcomp.error_tables.table import CODECS, LARGEST, LOW_RANK, ErrorRow, sends_whole

AllReduce = Callable[[Tensor], object]
"""Function that sums a tensor over all ranks, in place."""

_linalg: Any = torch.linalg

_SKETCH = max(each.rank for each in LOW_RANK) + 8
"""Number of columns of a sketch: the largest matrix rank + 8."""

_PROBES = 8
"""Number of random vectors that estimate the sketch's error.

The estimate's relative standard error is 1/2 for an error matrix of rank 1, 1/8 for rank 16.
"""


def losses_by_rank(
    shapes: Sequence[tuple[int, int]], matrices: Callable[[], Iterator[Tensor]], key: int, all_reduce: AllReduce
) -> list[list[float]]:
    """Return |A - its best matrix of rank r|² / |A|² for each matrix A and each rank r of LOW_RANK, by a sketch.

        Y = A Ω,  Q = orthonormal(A orthonormal(Aᵀ orthonormal(Y))),  B = Qᵀ A    Ω random, of 24 columns
        lost(r) = |A|² - sum of the r largest eigenvalues of B Bᵀ

    (Halko, Martinsson and Tropp 2011, with one power iteration.) A is a sum over processes. Four all_reduces sum
    the products of all matrices. |A|² is |B|² plus the part outside Q, which 8 more random vectors estimate:

        |A - Q B|² = mean of |(1 - Q Qᵀ) A ω|²

    A sketch underestimates the kept part: by little for falling singular values, by a quarter for white noise. A
    matrix with at most 24 rows or columns is used whole.

    Each call of `matrices` yields this process's terms of the sums, in order; zeros for a missing term.
    """
    is_small = [min(shape) <= _SKETCH for shape in shapes]

    def products(factors: Sequence[Tensor | None], *, transposed: bool) -> list[Tensor]:
        """Multiply each matrix by its factor, and sum over the ranks."""
        found: list[Tensor] = []
        for matrix, factor in zip(matrices(), factors, strict=True):
            matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            if factor is None:
                found.append(matrix if transposed else matrix.new_empty(0))
            else:
                found.append(factor.T @ matrix if transposed else matrix @ factor)
        return _summed(found, all_reduce)

    device = next(iter(matrices())).device
    draws = torch.Generator(device).manual_seed(key)
    starts = [
        None if small else torch.randn(max(shape), _SKETCH + _PROBES, generator=draws, device=device)
        for small, shape in zip(is_small, shapes, strict=True)
    ]

    def bases(factors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return orthonormal bases, computed in fp64: squares of small gradients would be zero in fp32."""
        pairs = zip(is_small, factors, strict=True)
        return [None if small else _linalg.qr(each.double()).Q.float() for small, each in pairs]

    first = products(starts, transposed=False)
    left = bases([each[..., :_SKETCH] for each in first])
    right = bases([each.T for each in products(left, transposed=True)])
    left = bases(products(right, transposed=False))
    cores = products(left, transposed=True)
    return [
        _losses(core, 0.0 if basis is None else _missed(probe[:, _SKETCH:], basis))
        for core, probe, basis in zip(cores, first, left, strict=True)
    ]


def _summed(parts: list[Tensor], all_reduce: AllReduce) -> list[Tensor]:
    flat = torch.cat([part.flatten() for part in parts])
    all_reduce(flat)
    pieces = torch.split_with_sizes(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _missed(probe: Tensor, basis: Tensor) -> float:
    probe, basis = probe.double(), basis.double()
    return ((probe - basis @ (basis.T @ probe)).square().sum() / probe.shape[1]).item()


def _losses(core: Tensor, missed: float) -> list[float]:
    inner = core.double()
    if not inner.isfinite().all():  # products of huge values
        return [nan] * len(LOW_RANK)
    found: list[float] = _linalg.eigvalsh(inner @ inner.T).flip(0).clamp_min(0).tolist()
    total = sum(found) + missed
    return [(sum(found[each.rank :]) + missed) / total if total else 0.0 for each in LOW_RANK]


@torch.no_grad()
def measure(
    gradients: Mapping[str, Tensor],
    residuals: Mapping[str, Tensor],
    family: Sequence[Compressor],
    all_reduce: AllReduce,
    *,
    rank: int,
    look: int,
) -> dict[str, ErrorRow]:
    """Measure the errors of `family`, one of FAMILIES, on gradients plus residuals where given.

    Every rank calls it with the same names and shapes. Random choices depend on `rank` and on the measurement's number
    `look`, so that averages over measurements converge. A gradient that is finite on no rank has no row. If one error
    of a row is not finite, the row's `errors` are empty.
    """
    # One row per gradient: number of ranks that measured it, |g|², |v|², and lost squares per compressor. The entries
    # of low rank are relative errors already.
    found = torch.zeros(len(gradients), 3 + len(family), dtype=torch.float64)
    drawn: list[Drawn] = []
    numbers: list[int] = []
    for number, (name, gradient) in enumerate(gradients.items()):
        value = _value(gradient, residuals.get(name))
        whole = squares(value)
        alone = squares(_value(gradient)) if name in residuals else whole
        if not (alone < inf and whole < inf and len(value) <= MOST_VALUES):
            continue
        found[number, :3] = torch.tensor([1.0, alone, whole], dtype=torch.float64)
        if whole == 0:
            continue
        numbers.append(number)
        if family is LARGEST:
            kept = [counts((len(value),), each.ratio)[0] for each in LARGEST]
            found[number, 3:] = torch.tensor(lost_by_largest(value, kept), dtype=torch.float64)
        elif family is CODECS:
            start = randomness.key_of("errors", name, rank, look) % 2**24 / 2**24
            drawn.append(draw_runs(value, whole, start))
    if family is CODECS:
        for column, codec in enumerate(CODECS, 3):
            found[numbers, column] = torch.tensor(lost_by_codec(codec, drawn), dtype=torch.float64)
    elif family is LOW_RANK:
        _sketch(found, gradients, residuals, look, all_reduce)
    sums: Any = found.to(next((each.device for each in gradients.values()), found.device))
    all_reduce(sums)
    rows: dict[str, ErrorRow] = {}
    for (name, gradient), (measured, alone, whole, *lost) in zip(gradients.items(), sums.tolist(), strict=True):
        of_all = measured if family is LOW_RANK else whole
        errors = tuple(each / of_all for each in lost) if whole else ()
        is_known = bool(whole) and all(map(isfinite, errors))
        if measured:
            rows[name] = ErrorRow(
                tuple(gradient.shape), alone / measured, errors if is_known else (), samples=int(is_known)
            )
    return rows


def _value(gradient: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the gradient plus its residual, flat, in fp32."""
    flat = gradient.detach().float().flatten()
    return flat if residual is None else flat + residual.float().flatten()


def _sketch(
    found: Tensor, gradients: Mapping[str, Tensor], residuals: Mapping[str, Tensor], look: int, all_reduce: AllReduce
) -> None:
    """Fill in the low-rank columns of `found`, equal on every process."""
    places = [k for k, each in enumerate(gradients.values()) if not sends_whole(LOW_RANK[0], tuple(each.shape))]
    names, is_measured = list(gradients), [bool(row[0]) for row in found]
    shapes = [(gradients[names[k]].shape[0], gradients[names[k]][0].numel()) for k in places]

    def matrices() -> Iterator[Tensor]:
        for place, shape in zip(places, shapes, strict=True):
            value = _value(gradients[names[place]], residuals.get(names[place])).view(shape)
            yield value if is_measured[place] else torch.zeros_like(value)

    if places:
        for place, lost in zip(places, losses_by_rank(shapes, matrices, look, all_reduce), strict=True):
            if is_measured[place]:
                found[place, 3:] = torch.tensor(lost, dtype=torch.float64)
