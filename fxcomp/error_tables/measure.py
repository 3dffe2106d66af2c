"""Measure error tables from gradients and what compression has left out of them.

    measure(gradients, residuals)  -->  ErrorTable

Of each gradient in turn, on the device where it lies: |g|², |v|², what is lost by density and by codec. What is lost by
rank is that of the ranks' sum, from sketches. Ranks then add up what they have found, in one all_reduce of 3 + columns
fp64 numbers a gradient; the table follows from the sums alone, so it is the same on every rank.

    error = sum over ranks of |v - decoded|² / sum over ranks of |v|²       by density and codec
    error = |V - its best matrix|² / |V|²,  V = sum over ranks of v         by rank

A gradient that is not finite on a rank, or zero, brings nothing from there. Memory: a copy of the largest gradient with
its residual, twice that for selection, 128 kB of drawn runs a gradient, and sketches of 32 rows and columns a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan, prod
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import PowerSGD, randomness
from fxcomp.compressors.topk import MOST_VALUES, counts
from fxcomp.error_tables.codecs import Drawn, draw_runs, lost_by_codec, lost_by_largest, runs_of, squares
from fxcomp.error_tables.columns import STANDARD, Columns, sends_whole
from fxcomp.error_tables.table import ErrorRow, ErrorTable, legal
from fxcomp.errors import BadOption

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
    """Return |A - its best matrix of rank r|² / |A|² of each matrix, for each rank, by a sketch of singular values.

        Y = A Ω,  Q = orthonormal(A orthonormal(Aᵀ orthonormal(Y))),  B = Qᵀ A    Ω random, 24 columns for ranks to 16
        lost(r) = |A|² - sum of the r largest eigenvalues of B Bᵀ

    (Halko, Martinsson and Tropp 2011, with one power iteration.) A is the sum over the ranks, as powersgd's factors are
    of the sum: a small batch's gradient has few large singular values, and the mean of several has more. Each product
    is a sum of the ranks' products, so four all_reduces of sketches do it for all matrices at once, and none of whole
    matrices. Alone, a rank knows |A|². Among others it is the squares of B and of what Q misses, which 8 more random
    vectors tell:

        |A - Q B|² = mean of |(1 - Q Qᵀ) A ω|²

    A sketch finds no more than there is: of falling spectra it misses little, of white noise a quarter of what the best
    basis would keep. A matrix with a side of no more than the sketch's columns is not sketched.

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


_MEASURED, _GRADIENT, _VALUE, _LOST = range(4)
"""Of each gradient: ranks that measured it, |g|², |v|², and what is lost by column; by rank, relative to |v|²."""


@torch.no_grad()
def measure(
    gradients: Mapping[str, Tensor],
    residuals: Mapping[str, Tensor] | None = None,
    columns: Columns = STANDARD,
    all_reduce: AllReduce | None = None,
    *,
    rank: int = 0,
    look: int = 0,
) -> ErrorTable:
    """Measure one look at gradients, with what compression has left out of them where there is such.

    Every rank brings the same names and shapes. Random choices differ by `rank` and number of the look, so that means
    settle. Raises BadOption for a residual of another size.
    """
    _check(gradients, residuals or {})
    sums = _FamilyLook(gradients, residuals or {}, columns, rank, look).sums(all_reduce)
    if all_reduce is not None:
        all_reduce(sums)
    return table_of(sums, {name: tuple(each.shape) for name, each in gradients.items()}, columns)


@dataclass(frozen=True, slots=True)
class _FamilyLook:
    gradients: Mapping[str, Tensor]
    residuals: Mapping[str, Tensor]
    columns: Columns
    rank: int
    look: int

    def key(self, what: str) -> int:
        return randomness.key_of("errors", what, self.rank, self.look)

    def value(self, name: str) -> Tensor:
        """Make what is compressed, flat."""
        flat, residual = self.gradients[name].detach().float().flatten(), self.residuals.get(name)
        return flat if residual is None else flat + residual.float().flatten()

    def sums(self, all_reduce: AllReduce | None) -> Tensor:
        """Return this rank's part of what ranks add up: a row a gradient."""
        columns = self.columns
        found = torch.zeros(len(self.gradients), _LOST + columns.count, dtype=torch.float64)
        runs = runs_of(columns.codecs)
        drawn: dict[int, list[Drawn]] = {run: [] for run in runs}
        numbers: list[int] = []
        for number, (name, gradient) in enumerate(self.gradients.items()):
            value = self.value(name)
            whole = squares(value)
            alone = squares(gradient.detach().float().flatten()) if name in self.residuals else whole
            if not (alone < inf and whole < inf and len(value) <= MOST_VALUES):
                continue
            found[number, :_LOST] = torch.tensor([1.0, alone, whole], dtype=torch.float64)
            if whole == 0:
                continue
            numbers.append(number)
            kept = [counts((len(value),), density)[0] for density in columns.densities]
            found[number, _LOST : _LOST + len(kept)] = torch.tensor(lost_by_largest(value, kept), dtype=torch.float64)
            start = self.key(name) % 2**24 / 2**24
            for run, of_run in drawn.items():
                of_run.append(draw_runs(value, run, whole, start))
        for run, codecs in runs.items():
            for codec in codecs:
                lost = lost_by_codec(codec, drawn[run], self.key(str(codec)))
                column = _LOST + columns.contractions() + columns.codecs.index(codec)
                found[numbers, column] = torch.tensor(lost, dtype=torch.float64)
        self._sketch(found, all_reduce)
        return found.to(next((each.device for each in self.gradients.values()), found.device))

    def _sketch(self, found: Tensor, all_reduce: AllReduce | None) -> None:
        """Fill in the columns of ranks: those of the ranks' sum, which each rank works out for itself."""
        columns = self.columns
        names = [
            name for name, each in self.gradients.items() if columns.ranks and not sends_whole(PowerSGD(1), each.shape)
        ]
        is_measured = {name: bool(row[_MEASURED]) for name, row in zip(self.gradients, found, strict=True)}
        shapes = [(self.gradients[name].shape[0], self.gradients[name][0].numel()) for name in names]

        def matrices() -> Iterator[Tensor]:
            for name, shape in zip(names, shapes, strict=True):
                value = self.value(name).view(shape)
                yield value if is_measured[name] else torch.zeros_like(value)

        if not names:
            return
        places = {name: number for number, name in enumerate(self.gradients)}
        whole = [found[places[name], _VALUE].item() for name in names]
        losses = losses_by_rank(shapes, matrices, whole, columns.ranks, self.look, all_reduce)
        first, end = _LOST + len(columns.densities), _LOST + columns.contractions()
        for name, lost in zip(names, losses, strict=True):
            if is_measured[name]:
                found[places[name], first:end] = torch.tensor(lost, dtype=torch.float64)


def table_of(sums: Tensor, shapes: Mapping[str, tuple[int, ...]], columns: Columns) -> ErrorTable:
    """Make a table of what ranks have found together."""
    rows: dict[str, ErrorRow] = {}
    notes: list[str] = []
    found: Any = sums
    of_all: list[list[float]] = found.tolist()
    for (name, shape), (measured, gradient, value, *lost) in zip(shapes.items(), of_all, strict=True):
        if not measured:
            notes.append(f"{name}: it was finite on no rank, so errors of Gaussian values are assumed")
            rows[name] = ErrorRow(shape, inf, (), 0)
        elif not value:
            if prod(shape):
                notes.append(f"{name}: what is compressed was zero, so errors of Gaussian values are assumed")
            rows[name] = ErrorRow(shape, gradient / measured, (), 0)
        else:
            by_rank = range(len(columns.densities), columns.contractions())
            errors = (each / (measured if place in by_rank else value) for place, each in enumerate(lost))
            rows[name] = ErrorRow(shape, gradient / measured, tuple(errors), 1)
    return legal(columns, rows, notes)


def _check(gradients: Mapping[str, Tensor], residuals: Mapping[str, Tensor]) -> None:
    for name, residual in residuals.items():
        if name not in gradients:
            raise BadOption(f"there is a residual of {name!r}, but no gradient of that name.\n  Give both, or none.")
        if residual.numel() != gradients[name].numel():
            raise BadOption(
                f"the residual of {name!r} has {residual.numel():,} elements, its gradient"
                f" {gradients[name].numel():,}.\n  Give the residual of the whole parameter, or leave it out."
            )
