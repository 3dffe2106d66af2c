"""Table of measured errors of compressors: plain numbers, the same on every rank.

    error   = |v - decoded|² / |v|²         v is a rank's gradient plus its residual
    squares = |g|²                          of the gradient alone, so independent of the plan

    a plan's error = sum of squares * error / sum of squares

    family      a column for                   used for
    LARGEST     shares of values kept          topk; sidco, which sends about as many values
    LOW_RANK    matrix ranks                   powersgd
    CODECS      compressors that round         the same compressor

Each measurement covers one family (`measure.py`); `joined` makes a table of all families. If a gradient has no row or
no samples, the error on Gaussian values is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fxcomp import compat
from fxcomp.compressors import Compressor, PowerSGD, Sidco, TopK, parse_compressor
from fxcomp.compressors.gaussian_error import gaussian_error
from fxcomp.compressors.topk import counts
from fxcomp.errors import BadOption

LARGEST = tuple(map(TopK, (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.25)))
LOW_RANK = tuple(map(PowerSGD, (1, 2, 4, 8, 16)))
CODECS = tuple(map(parse_compressor, ("bf16", "fp16", "int8", "int4", "int2", "sign")))
FAMILIES: tuple[Sequence[Compressor], ...] = (LARGEST, LOW_RANK, CODECS)
COLUMNS: tuple[Compressor, ...] = (*LARGEST, *LOW_RANK, *CODECS)
"""Compressor of each column of the table, in column order."""

_COLUMN_OF = {compressor: number for number, compressor in enumerate(COLUMNS)}
_RANKS_FROM, _CODECS_FROM = len(LARGEST), len(LARGEST) + len(LOW_RANK)

WEIGHT = 0.25
"""Weight of the newest measurement in an exponential average. The average has 0.38 times the standard deviation of one
measurement, and reaches 90 % of a sudden change after 8 measurements (0.75^8 = 0.1).
"""

VERSION = 2

_MOST = 1e150  # sums and ratios of such numbers are finite; squares of fp32 values are smaller


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Measurements of one gradient."""

    shape: tuple[int, ...]
    squares: float
    errors: tuple[float, ...]
    """Error per column; before `joined`, per column of one family. Empty without samples."""
    samples: int
    """Number of measurements averaged."""

    @property
    def size(self) -> int:
        return prod(self.shape)


Rows = Mapping[str, ErrorRow]


@dataclass(frozen=True)
class ErrorTable:
    """Errors by gradient and compressor."""

    rows: Rows = field(default_factory=dict[str, ErrorRow])

    def errors_of(self, gradients: Sequence[str], compressor: Compressor, ranks: int = 1) -> list[float]:
        """Return a compressor's error on each gradient: measured, or assumed for Gaussian values.

        Top-k and low-rank compressors keep the largest (singular) values, so the error is convex in the number of kept
        values, and linear interpolation never understates the error.
        """
        assumed, found = gaussian_error(compressor, ranks), list[float]()
        column, is_low_rank = _column_of(compressor), isinstance(compressor, PowerSGD)
        for row in map(self.rows.get, gradients):
            if row is None or not row.samples:
                found.append(assumed)
            elif is_low_rank and sends_whole(compressor, row.shape):
                found.append(0.0)
            else:
                found.append(_between(row, compressor, assumed) if column is None else row.errors[column])
        return found

    def error_of(self, gradient: str, compressor: Compressor, ranks: int = 1) -> float:
        return self.errors_of([gradient], compressor, ranks)[0]

    def squares_of(self, gradient: str, elements: int) -> float:
        """Return |g|² of a gradient; if the table has no row for it, `elements` times the mean square."""
        row = self.rows.get(gradient)
        return row.squares if row is not None else elements * self.mean_square

    @property
    def mean_square(self) -> float:
        """Mean of g² over all elements in the table; 1 if the table is empty or all gradients are zero."""
        elements = sum(row.size for row in self.rows.values())
        squares = sum(row.squares for row in self.rows.values())
        return squares / elements if squares > 0 else 1.0

    @property
    def is_measured(self) -> bool:
        return self.looks > 0

    @property
    def looks(self) -> int:
        """Maximum number of measurements of any row."""
        return max((row.samples for row in self.rows.values()), default=0)

    def save(self, path: str | Path) -> None:
        """Write the table for the option `--errors` of `fxcomp explain`."""
        data = {"version": VERSION, "rows": {name: asdict(row) for name, row in self.rows.items()}}
        compat.save_json(path, data, makes_folder=False)

    @classmethod
    def load(cls, path: str | Path) -> ErrorTable:
        """Read a saved table, with invalid numbers repaired. Raises BadOption naming the file."""
        try:
            data = compat.read_json(path)
            if data["version"] != VERSION:
                raise ValueError(f"it has version {data['version']!r}, and this fxcomp reads version {VERSION}")
            return cls(_legal({str(name): _row_of(name, row) for name, row in data["rows"].items()}))
        except OSError as error:
            why = error.strerror
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            why = f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise BadOption(
            f"cannot read the error table {path}: {why}.\n"
            "  Write it again with step.error_table.save(...), in this version of fxcomp."
        )


ASSUMED = ErrorTable()


@lru_cache(maxsize=4096)
def sends_whole(compressor: PowerSGD, shape: tuple[int, ...]) -> bool:
    """Return True if PowerSGD sends a parameter dense: a vector, or a matrix too small for two factors."""
    return compressor.bound_to([shape], 1).columns == (0,)


def _column_of(compressor: Compressor) -> int | None:
    if isinstance(compressor, Sidco):
        compressor = TopK(compressor.ratio)
    return _COLUMN_OF.get(PowerSGD(compressor.rank) if isinstance(compressor, PowerSGD) else compressor)


def _between(row: ErrorRow, compressor: Compressor, assumed: float) -> float:
    """Interpolate the error between columns. Return `assumed` for compressors that round."""
    if isinstance(compressor, PowerSGD):
        kept, at = [0, *(each.rank for each in LOW_RANK)], compressor.rank
        errors = [1.0, *row.errors[_RANKS_FROM:_CODECS_FROM]]
    elif isinstance(compressor, TopK | Sidco):
        kept = [0, *(counts((row.size,), each.ratio)[0] for each in LARGEST), row.size]
        at, errors = counts((row.size,), compressor.ratio)[0], [1.0, *row.errors[:_RANKS_FROM], 0.0]
    else:
        return assumed
    return float(np.interp(at, kept, errors))


def averaged(before: Rows, look: Rows) -> Rows:
    """Add a family's measurement `look` to `before`, the average of `looks` earlier measurements.

        new = old + a (look - old)        a = max(1 / (looks + 1), WEIGHT)

    The formula applies to each error, and to each gradient's squares / total squares. With absolute squares, one step
    with large gradients would dominate dozens of measurements.
    """
    looks = max((row.samples for row in before.values()), default=0)
    total = sum(row.squares for row in look.values()) or 1.0
    rows = dict(before)
    for name, row in look.items():
        new = replace(row, squares=row.squares / total)
        old = before.get(name, new)
        errors, samples = (new.errors, new.samples) if new.samples else (old.errors, old.samples)
        if name in before and old.samples and new.samples:
            errors = tuple(_mean(one, other, old.samples) for one, other in zip(old.errors, new.errors, strict=True))
            samples = old.samples + 1
        rows[name] = ErrorRow(row.shape, _mean(old.squares, new.squares, looks), errors, samples)
    return rows


def _mean(old: float, new: float, looks: int) -> float:
    return old + max(1 / (looks + 1), WEIGHT) * (new - old)


def joined(families: Sequence[Rows]) -> ErrorTable:
    """Join the rows of FAMILIES, in their order, into one table.

    A gradient needs samples in every family to count as measured. Its squares are the mean over families.
    """
    rows: dict[str, ErrorRow] = {}
    for name, row in families[0].items():
        parts = [each[name] for each in families if name in each]
        if len(parts) == len(families):
            samples = min(part.samples for part in parts)
            errors = tuple(error for part in parts for error in part.errors) if samples else ()
            rows[name] = ErrorRow(row.shape, sum(part.squares for part in parts) / len(parts), errors, samples)
    return ErrorTable(rows)


def _row_of(name: str, data: Mapping[str, Any]) -> ErrorRow:
    errors, shape, samples = tuple(map(float, data["errors"])), tuple(map(int, data["shape"])), int(data["samples"])
    if min(samples, *shape) < 0 or max(samples, prod(shape)) >= 1 << 63:
        raise ValueError(f"the row of {name!r} has the shape {shape} and {samples} samples, which cannot be")
    if samples and len(errors) != len(COLUMNS):
        raise ValueError(f"the row of {name!r} has {len(errors)} errors, not one for each of {len(COLUMNS)} columns")
    return ErrorRow(shape, float(data["squares"]), errors, samples)


def _legal(rows: Rows) -> Rows:
    """Treat invalid numbers as not measured; make errors fall as more values or matrix ranks are kept."""
    sizes = {name: row for name, row in rows.items() if row.squares == 0 or _is_size(row.squares)}
    return {name: _repaired(row if row.size else replace(row, squares=0.0, samples=0)) for name, row in sizes.items()}


def _repaired(row: ErrorRow) -> ErrorRow:
    if not row.samples or not all(error == 0 or _is_size(error) for error in row.errors):
        return replace(row, errors=(), samples=0)
    parts = row.errors[:_RANKS_FROM], row.errors[_RANKS_FROM:_CODECS_FROM]
    fall = [error for part in parts for error in reversed([*accumulate(reversed(part), max)])]
    return replace(row, errors=(*fall, *row.errors[_CODECS_FROM:]))


def _is_size(value: float) -> bool:
    return 1 / _MOST <= value <= _MOST
