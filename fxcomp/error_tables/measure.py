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

from collections.abc import Iterator, Mapping
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
from fxcomp.error_tables.low_rank import AllReduce, losses_by_rank
from fxcomp.error_tables.norms import squares
from fxcomp.error_tables.table import ErrorRow, ErrorTable, legal
from fxcomp.errors import BadErrorTable

_MEASURED, _GRADIENT, _VALUE, _LOST = range(4)
"""Of each gradient: ranks that measured it, |g|², |v|², and what is lost by column; by rank, relative to |v|²."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Seed a measurement's random choices by rank and look: they differ, so that means settle."""

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
    look = _FamilyLook(gradients, residuals or {}, columns, draw or Draw())
    sums = look.sums(all_reduce)
    if all_reduce is not None:
        all_reduce(sums)
    return table_of(sums, {name: tuple(each.shape) for name, each in gradients.items()}, columns)


@dataclass(frozen=True, slots=True)
class _FamilyLook:
    gradients: Mapping[str, Tensor]
    residuals: Mapping[str, Tensor]
    columns: Columns
    draw: Draw

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
            start = self.draw.key(name) % 2**24 / 2**24
            for run, of_run in drawn.items():
                of_run.append(draw_runs(value, run, whole, start))
        for run, codecs in runs.items():
            for codec in codecs:
                lost = lost_by_codec(codec, drawn[run], self.draw.key(str(codec)))
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
        losses = losses_by_rank(shapes, matrices, whole, columns.ranks, self.draw.look, all_reduce)
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
            raise BadErrorTable(
                f"there is a residual of {name!r}, but no gradient of that name.\n  Give both, or none."
            )
        if residual.numel() != gradients[name].numel():
            raise BadErrorTable(
                f"the residual of {name!r} has {residual.numel():,} elements, its gradient"
                f" {gradients[name].numel():,}.\n  Give the residual of the whole parameter, or leave it out."
            )
