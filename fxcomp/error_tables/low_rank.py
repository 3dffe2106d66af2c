"""Measure what the best matrices of all ranks lose of the mean gradient, from a sketch of its singular values.

    Y = A Ω,  Q = orthonormal(A orthonormal(Aᵀ orthonormal(Y))),  B = Qᵀ A     Ω random, of 24 columns for ranks to 16
    lost(r) = |A|² - sum of the r largest eigenvalues of B Bᵀ

(Halko, Martinsson and Tropp 2011, with one power iteration.) A is the sum over the ranks, as powersgd's factors are of
the sum: a small batch's gradient has few large singular values, and the mean of several has more. Each product is a
sum of the ranks' products, so four all_reduces of sketches do it for all matrices at once, and none of whole matrices.
Alone, a rank knows |A|². Among others it is the squares of B and of what Q misses, which 8 more random vectors tell:

    |A - Q B|² = mean of |(1 - Q Qᵀ) A ω|²

A sketch finds no more than there is: of falling spectra it misses little, of white noise a quarter of what the best
basis would keep. A matrix with a side of no more than the sketch's columns is not sketched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], object]
"""Add up a tensor over all ranks, in place."""

_linalg: Any = torch.linalg

_MORE = 8
"""Columns of the sketch beyond the largest rank."""

_PROBES = 8
"""Vectors that estimate what the sketch misses: to a half if that has rank 1, to an eighth if it has rank 16."""


def losses_by_rank(
    shapes: Sequence[tuple[int, int]],
    matrices: Callable[[], Iterator[Tensor]],
    squares: Sequence[float],
    ranks: Sequence[int],
    key: int,
    all_reduce: AllReduce | None,
) -> list[list[float]]:
    """Return |A - its best matrix of rank r|² / |A|² of each matrix, for each rank.

    `matrices` gives this rank's parts, in order, as often as it is called; one that brings nothing gives zeros. Of
    each part, `squares` has |part|².
    """
    wide = [(min(shape), max(shape)) for shape in shapes]
    columns = max(ranks) + _MORE
    is_small = [rows <= columns for rows, _ in wide]

    def products(factors: Sequence[Tensor | None], *, transposed: bool) -> list[Tensor]:
        """Multiply each matrix by its factor, and add up over the ranks."""
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
    drawn = columns if all_reduce is None else columns + _PROBES
    starts = [
        None if small else torch.randn(size, drawn, generator=draws, device=device)
        for small, (_, size) in zip(is_small, wide, strict=True)
    ]
    first = products(starts, transposed=False)
    left = _bases([None if small else each[:, :columns] for small, each in zip(is_small, first, strict=True)])
    pairs = zip(is_small, products(left, transposed=True), strict=True)
    right = _bases([None if small else each.T for small, each in pairs])
    pairs = zip(is_small, products(right, transposed=False), strict=True)
    left = _bases([None if small else each for small, each in pairs])
    cores = products(left, transposed=True)
    losses: list[list[float]] = []
    for core, probe, basis, alone in zip(cores, first, left, squares, strict=True):
        missed = 0.0
        if basis is not None and all_reduce is None:
            missed = max(0.0, alone - core.double().square().sum().item())
        elif basis is not None:
            missed = _missed(probe[:, columns:], basis)
        losses.append(_losses(core, ranks, missed))
    return losses


def _summed(parts: list[Tensor], all_reduce: AllReduce | None) -> list[Tensor]:
    if all_reduce is None or not parts:
        return parts
    flat = torch.cat([part.flatten() for part in parts])
    all_reduce(flat)
    pieces = torch.split_with_sizes(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _bases(factors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Orthonormal bases, in fp64 inside: squares of small gradients would be zero in fp32."""
    return [None if each is None else _linalg.qr(each.double()).Q.float() for each in factors]


def _missed(probe: Tensor, basis: Tensor) -> float:
    probe, basis = probe.double(), basis.double()
    return ((probe - basis @ (basis.T @ probe)).square().sum() / probe.shape[1]).item()


def _losses(core: Tensor, ranks: Sequence[int], missed: float) -> list[float]:
    inner = core.double()
    if not inner.isfinite().all():  # products of huge values
        return [nan] * len(ranks)
    found: list[float] = _linalg.eigvalsh(inner @ inner.T).flip(0).clamp_min(0).tolist()
    total = sum(found) + missed
    return [(sum(found[rank:]) + missed) / total if total else 0.0 for rank in ranks]
