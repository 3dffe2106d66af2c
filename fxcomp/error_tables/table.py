"""Hold what compressors lose of each gradient, as measured in a running job: plain numbers, the same on every rank.

    error   = |v - decoded|² / |v|²         v is a rank's gradient plus what compression has left out before
    squares = |g|²                          of the gradient alone, so that a plan's residuals do not weigh in

    a plan's error = sum of squares * error / sum of squares

Both are means over the ranks and over samples in time. Of a gradient with no `samples` nothing has been measured:
errors of Gaussian values stand for its own, as they do for a compressor that no column serves. `error_of` says which it
was. So the empty table, `ASSUMED`, is the one without data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from fxcomp.compressors import Compressor, PowerSGD, parse_compressor
from fxcomp.compressors.gaussian_error import gaussian_error
from fxcomp.error_tables.columns import STANDARD, Columns, sends_whole
from fxcomp.errors import BadOption, FxcompError

VERSION = 1

_MOST = 1e150

LAG = 0.8
"""powersgd takes one step of subspace iteration a step, which follows changing gradients late: it loses the error of
the best matrix of its rank to this power. Fitted to small tasks with four workers, which are within 6 % of that
(docs/benchmarks/error_tables.md)."""


class ErrorSource(Enum):
    """The source of an error: a measurement or an assumption."""

    MEASURED = "measured"
    """In the running job."""
    ASSUMED = "assumed"
    """Of Gaussian values."""


class Error(NamedTuple):
    """A relative squared error."""

    value: float
    source: ErrorSource


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One gradient."""

    shape: tuple[int, ...]
    squares: float
    errors: tuple[float, ...]
    """By column; of no meaning without samples."""
    samples: int
    """The number of looks in time that the smoothed errors are of."""

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ErrorTable:
    """Errors by gradient and compressor. Make one by `legal` or `from_json`, which put right what cannot be."""

    columns: Columns = STANDARD
    rows: Mapping[str, ErrorRow] = field(default_factory=dict[str, ErrorRow])
    notes: tuple[str, ...] = ()
    """Corrections that were made, and cautions."""

    def error_of(self, gradient: str, compressor: Compressor, ranks: int = 1) -> Error:
        """Look up what a compressor loses of a gradient, and whether that is measured."""
        row = self.rows.get(gradient)
        if row is not None and row.samples:
            found = self.columns.find(row.errors, compressor, row.shape)
            if found is not None:
                return Error(found, ErrorSource.MEASURED)
        return Error(gaussian_error(compressor, ranks), ErrorSource.ASSUMED)

    def errors_of(self, gradient: str) -> Callable[[Compressor, int], float]:
        """Return the lookup of one gradient's errors, which takes a compressor and the number of ranks."""
        return lambda compressor, ranks: self.error_of(gradient, compressor, ranks).value

    def errors_by_gradient(self, gradients: Sequence[str], compressor: Compressor, ranks: int = 1) -> list[float]:
        """Look up what a compressor loses of each of many gradients."""
        if not self.rows:
            return [gaussian_error(compressor, ranks)] * len(gradients)
        entry = self.columns.entry_of(compressor)
        if entry is None:
            return [self.error_of(gradient, compressor, ranks).value for gradient in gradients]
        assumed, found = gaussian_error(compressor, ranks), list[float]()
        for row in map(self.rows.get, gradients):
            if row is None or not row.samples:
                found.append(assumed)
            else:
                is_whole = isinstance(compressor, PowerSGD) and sends_whole(compressor, row.shape)
                found.append(0.0 if is_whole else row.errors[entry])
        return found

    def lagging(self) -> ErrorTable:
        """Return the errors of powersgd as it runs, of a table that has those of the best matrices."""
        first, end = len(self.columns.densities), self.columns.contractions()
        rows = {
            name: replace(
                row, errors=(*row.errors[:first], *(each**LAG for each in row.errors[first:end]), *row.errors[end:])
            )
            for name, row in self.rows.items()
        }
        return replace(self, rows=rows)

    def squares_of(self, gradient: str, elements: int) -> float:
        """Return |g|² of a gradient; for one that is not in the table, of so many elements of the mean square."""
        row = self.rows.get(gradient)
        return row.squares if row is not None else elements * self.mean_square

    @property
    def mean_square(self) -> float:
        """The mean of g² over all elements in the table; 1 if there are none, or all are zero."""
        elements = sum(row.size for row in self.rows.values())
        squares = sum(row.squares for row in self.rows.values())
        return squares / elements if squares > 0 else 1.0

    @property
    def is_measured(self) -> bool:
        return any(row.samples for row in self.rows.values())

    @property
    def looks(self) -> int:
        """The largest number of looks that any row averages."""
        return max((row.samples for row in self.rows.values()), default=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "densities": list(self.columns.densities),
            "ranks": list(self.columns.ranks),
            "codecs": list(map(str, self.columns.codecs)),
            "rows": {name: asdict(row) for name, row in self.rows.items()},
            "notes": list(self.notes),
        }

    def save(self, path: str | Path) -> None:
        """Write it for the option `--errors` of `fxcomp explain`."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ErrorTable:
        """Read a saved table. Raises BadOption naming the file."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            raise BadOption(f"cannot read the error table {path}: {error.strerror}") from None
        except (ValueError, RecursionError, FxcompError) as error:  # no text, no JSON, or no table
            raise BadOption(f"cannot read the error table {path}: {error}") from None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ErrorTable:
        """Build a table from `to_json`'s data; numbers that cannot be are put right. Raises BadOption."""
        try:
            if data["version"] != VERSION:
                raise BadOption(
                    f"this error table has version {data['version']!r}; this fxcomp reads version {VERSION}"
                )
            columns = Columns(
                tuple(map(float, data["densities"])),
                tuple(map(int, data["ranks"])),
                tuple(map(parse_compressor, data["codecs"])),
            )
            rows = {str(name): _row_of(row) for name, row in data["rows"].items()}
            return legal(columns, rows, tuple(map(str, data["notes"])))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadOption(f"this is not an error table: {type(error).__name__}: {error}") from None


ASSUMED = ErrorTable()
"""Nothing is measured."""


def legal(columns: Columns, rows: Mapping[str, ErrorRow], notes: Sequence[str] = ()) -> ErrorTable:
    """Make a table of numbers that may be anything: put right what cannot be, and note it.

    A gradient with an error that is no number, or below zero, counts as not measured. Where keeping more would lose
    more, the smaller entry is raised to the larger one: nothing is understated. Squares that are no number become
    those of as many elements of the others.
    """
    made = {name: _repaired(columns, row) for name, row in rows.items()}
    found = [f"{name}: {problem}" for name, (_, problems) in made.items() for problem in problems]
    repaired = {name: replace(row, squares=_without_traces(row.squares)) for name, (row, _) in made.items()}
    known = [row for row in repaired.values() if _is_size(row.squares)]
    elements, largest = sum(row.size for row in known), max((row.squares for row in known), default=0.0)
    # Divided by the largest, so that no sum overflows.
    mean = sum(row.squares / largest for row in known) / elements * largest if elements and largest else 1.0
    for name, row in repaired.items():
        if not _is_size(row.squares):
            found.append(f"{name}: |g|² is {row.squares}, so that of as many elements of the others stands for it")
            repaired[name] = replace(row, squares=min(row.size * mean, _MOST))
    found += [*_rising_with_bits(columns, repaired), *_alone(repaired)]
    return ErrorTable(columns, repaired, tuple(dict.fromkeys((*notes, *found))))


def _alone(rows: Mapping[str, ErrorRow]) -> list[str]:
    """Note a gradient that outweighs all others."""
    name = max(rows, key=lambda each: rows[each].squares, default=None)
    if name is None or len(rows) == 1 or rows[name].squares == 0:
        return []
    others = sum(row.squares / rows[name].squares for each, row in rows.items() if each != name)
    if others > 0.01:
        return []
    return [f"{name}: it has more than 99 % of the squares of all gradients, so the others' errors hardly count"]


def _rising_with_bits(columns: Columns, rows: Mapping[str, ErrorRow]) -> Iterator[str]:
    """Note gradients of which more bits lose more: in larger blocks, small values are lost beside a large one."""
    for finer, coarser in pairwise(columns.by_bits()):
        names = [name for name, row in rows.items() if row.samples and row.errors[finer] > row.errors[coarser]]
        if names:
            which = f"{names[0]} and {len(names) - 1} others" if len(names) > 1 else names[0]
            yield f"{which}: {columns.names[finer]} lost more than {columns.names[coarser]}, as larger blocks may"


def _repaired(columns: Columns, row: ErrorRow) -> tuple[ErrorRow, list[str]]:
    if row.size == 0:
        return ErrorRow(row.shape, 0.0, (0.0,) * columns.count, 0), []
    if not row.samples:
        return ErrorRow(row.shape, row.squares, (0.0,) * columns.count, 0), []
    if len(row.errors) != columns.count or not all(_is_size(error) for error in row.errors):
        problem = "it has errors that are no numbers of 0 or more, so errors of Gaussian values are assumed"
        return ErrorRow(row.shape, row.squares, (0.0,) * columns.count, 0), [problem]
    errors, problems = list(row.errors), list[str]()
    for number in range(columns.contractions()):
        if errors[number] > 1:
            problems.append(f"{columns.names[number]} cannot lose more than all, but lost {errors[number]:.3g} of it")
            errors[number] = 1.0
    for chain in columns.chains():
        for finer, coarser in zip(chain[:0:-1], chain[-2::-1], strict=True):
            if errors[coarser] < errors[finer]:
                names = columns.names
                problems.append(f"{names[coarser]} lost less than {names[finer]}, so it is taken to lose as much")
                errors[coarser] = errors[finer]
    return replace(row, errors=tuple(errors)), problems


def _is_size(value: float) -> bool:
    """Sums of such are finite; fp32 values have no larger squares."""
    return 0 <= value <= _MOST


def _without_traces(squares: float) -> float:
    """Return 0 for squares that are smaller than of any fp32 value, 2e-90: a share of them would overflow."""
    return 0.0 if 0 < squares < 1 / _MOST else squares


def _row_of(data: Mapping[str, Any]) -> ErrorRow:
    shape, samples = tuple(map(int, data["shape"])), int(data["samples"])
    if min(samples, *shape) < 0:
        raise ValueError(f"a shape {shape} and {samples} samples cannot be")
    return ErrorRow(shape, float(data["squares"]), tuple(map(float, data["errors"])), samples)
