"""Measure error tables from gradients and what compression has left out of them.

    measure(gradients, residuals)  -->  ErrorTable

Of each gradient in turn, on the device where it lies: |g|², |v|², what is lost by density, by rank and by codec. Ranks
then add up what they have found, in one all_reduce of (3 + columns) fp64 numbers a gradient; the table follows from the
sums alone, so it is the same on every rank.

    error = sum over ranks of |v - decoded|² / sum over ranks of |v|²

A gradient that is not finite on a rank, or zero, brings nothing from there. Memory: a copy of the largest gradient with
its residual, twice that for selection, and 128 kB of drawn runs a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import PowerSGD, randomness
from fxcomp.compressors.topk import MOST_VALUES, counts
from fxcomp.error_tables.codecs import Drawn, draw_runs, lost_by_codec, runs_of
from fxcomp.error_tables.columns import STANDARD, Columns, sends_whole
from fxcomp.error_tables.largest import lost_by_largest
from fxcomp.error_tables.low_rank import lost_by_rank
from fxcomp.error_tables.norms import squares
from fxcomp.error_tables.table import ErrorTable, Row, legal
from fxcomp.errors import BadErrorTable

AllReduce = Callable[[Tensor], object]
"""Add up a tensor over all ranks, in place."""

_MEASURED, _GRADIENT, _VALUE, _LOST = range(4)
"""Of each gradient: ranks that measured it, |g|², |v|², and what is lost by column."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Which random choices a measurement makes: others on each rank and at each look, so that means settle."""

    rank: int = 0
    look: int = 0

    def key(self, gradient: str) -> int:
        return randomness.key_of("errors", gradient, self.rank, self.look)


@torch.no_grad()
def measure(
    gradients: Mapping[str, Tensor],
    residuals: Mapping[str, Tensor] | None = None,
    columns: Columns = STANDARD,
    draw: Draw | None = None,
    all_reduce: AllReduce | None = None,
) -> ErrorTable:
    """Measure one look at gradients, with what compression has left out of them where there is such.

    Every rank brings the same names and shapes. Raises BadErrorTable for a residual of another size.
    """
    _check(gradients, residuals or {})
    sums = sums_here(gradients, residuals or {}, columns, draw or Draw())
    if all_reduce is not None:
        all_reduce(sums)
    return table_of(sums, {name: tuple(each.shape) for name, each in gradients.items()}, columns)


def sums_here(gradients: Mapping[str, Tensor], residuals: Mapping[str, Tensor], columns: Columns, draw: Draw) -> Tensor:
    """Return this rank's part of what ranks add up: a row a gradient."""
    sums = torch.zeros(len(gradients), _LOST + columns.count, dtype=torch.float64)
    by_run = runs_of(columns.codecs)
    drawn: dict[int, list[tuple[int, Drawn]]] = {run: [] for run in by_run}
    for number, (name, gradient) in enumerate(gradients.items()):
        flat = gradient.detach().float().flatten()
        residual = residuals.get(name)
        value = flat if residual is None else flat + residual.flatten()
        alone = squares(flat)
        whole = alone if residual is None else squares(value)
        if not (alone < inf and whole < inf and len(flat) <= MOST_VALUES):
            continue
        sums[number, :_LOST] = torch.tensor([1.0, alone, whole], dtype=torch.float64)
        if whole == 0:
            continue
        key = draw.key(name)
        selected = lost_by_largest(value, [counts((len(value),), density)[0] for density in columns.densities])
        ranked = _lost_by_rank(value, tuple(gradient.shape), columns.ranks, whole, key)
        sums[number, _LOST : _LOST + columns.contractions()] = torch.tensor([*selected, *ranked], dtype=torch.float64)
        for run, found in drawn.items():
            found.append((number, draw_runs(value, run, whole, key % 2**24 / 2**24)))
    for run, codecs in by_run.items():
        numbers = [number for number, _ in drawn[run]]
        for codec in codecs:
            column = _LOST + columns.contractions() + columns.codecs.index(codec)
            lost = lost_by_codec(codec, [each for _, each in drawn[run]], draw.key(str(codec)))
            sums[numbers, column] = torch.tensor(lost, dtype=torch.float64)
    return sums


def table_of(sums: Tensor, shapes: Mapping[str, tuple[int, ...]], columns: Columns) -> ErrorTable:
    """Make a table of what ranks have found together."""
    rows: dict[str, Row] = {}
    notes: list[str] = []
    found: Any = sums
    of_all: list[list[float]] = found.tolist()
    for (name, shape), (measured, gradient, value, *lost) in zip(shapes.items(), of_all, strict=True):
        if not measured:
            notes.append(f"{name}: it was finite on no rank, so errors of Gaussian values are assumed")
            rows[name] = Row(shape, inf, (), 0)
        elif not value:
            if prod(shape):
                notes.append(f"{name}: it was zero, so it weighs nothing, and errors of Gaussian values are assumed")
            rows[name] = Row(shape, 0.0, (), 0)
        else:
            rows[name] = Row(shape, gradient / measured, tuple(each / value for each in lost), 1)
    return legal(columns, rows, notes)


def _lost_by_rank(value: Tensor, shape: tuple[int, ...], ranks: Sequence[int], whole: float, key: int) -> list[float]:
    """As powersgd loses it: nothing where the gradient travels as it is."""
    used = [rank for rank in ranks if not sends_whole(PowerSGD(rank), shape)]
    if not used:
        return [0.0] * len(ranks)
    lost = lost_by_rank(value.view(shape[0], -1), used, whole, key)
    return lost + [0.0] * (len(ranks) - len(used))


def _check(gradients: Mapping[str, Tensor], residuals: Mapping[str, Tensor]) -> None:
    for name, residual in residuals.items():
        if name not in gradients:
            raise BadErrorTable(
                f"there is a residual of {name!r}, but no gradient of that name.\n  Give both, or none."
            )
        if residual.numel() != gradients[name].numel():
            raise BadErrorTable(
                f"the residual of {name!r} has {residual.numel():,} elements, its gradient"
                f" {gradients[name].numel():,}.\n  Give the residual of the whole parameter, or leave it out."
            )
