"""Average error tables over looks in time, by families of columns, and join the families.

    densities │ ranks │ codecs        each measured in looks of its own, and smoothed by itself

    new = old + a (look - old)        a = max(1 / looks, WEIGHT)

of each error, and of each gradient's share of the squares of all. Shares, not squares: one step with a gradient a
thousand times as long would otherwise be the only one that counts, for dozens of looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxcomp.error_tables.columns import Columns
from fxcomp.error_tables.table import ErrorRow, ErrorTable, legal
from fxcomp.errors import BadOption

WEIGHT = 0.25
"""Of the newest look. The mean is that of about 7 looks (2 / WEIGHT - 1): the deviation of one falls to 0.38 of it, and
a spectrum that changes at once is followed to 90 % after 8 (0.75^8 = 0.1). The first looks weigh alike."""


def smoothed(before: ErrorTable, look: ErrorTable) -> ErrorTable:
    """Let a look join the mean of those before it. Raises BadOption if it is of something else."""
    if not before.rows:
        return look
    if before.columns != look.columns or _shapes(before) != _shapes(look):
        raise BadOption(
            "the tables are of other gradients or columns, so there is no mean of them.\n"
            "  Begin with a new table after the model or the columns have changed."
        )
    looks = max(row.samples for row in before.rows.values())
    old_total, new_total = total_squares(before), total_squares(look)
    rows: dict[str, ErrorRow] = {}
    for name, new in look.rows.items():
        old = before.rows[name]
        old_share, new_share = share_of(old, old_total), share_of(new, new_total)
        was_finite = new.samples or not new.squares
        share = _mean(old_share, new_share, looks) if was_finite else old_share
        if old.samples and new.samples:
            errors = tuple(_mean(one, other, old.samples) for one, other in zip(old.errors, new.errors, strict=True))
            samples = old.samples + 1
        else:
            errors, samples = (new.errors, new.samples) if new.samples else (old.errors, old.samples)
        rows[name] = ErrorRow(new.shape, share * (new_total or old_total), errors, samples)
    return legal(look.columns, rows, look.notes)


def _mean(old: float, new: float, looks: int) -> float:
    return old + max(1 / (looks + 1), WEIGHT) * (new - old)


def _shapes(table: ErrorTable) -> Mapping[str, tuple[int, ...]]:
    return {name: row.shape for name, row in table.rows.items()}


def total_squares(table: ErrorTable) -> float:
    """Sum the squares of all gradients of a table."""
    return sum(row.squares for row in table.rows.values())


def share_of(row: ErrorRow, total: float) -> float:
    """Return the share of a gradient's squares in those of all."""
    return row.squares / total if total else 0.0


def families(columns: Columns) -> tuple[Columns, ...]:
    """List the families that have columns, each alone."""
    alone = Columns(columns.densities, (), ()), Columns((), columns.ranks, ()), Columns((), (), columns.codecs)
    return tuple(each for each in alone if each.count)


def scaled(table: ErrorTable, factor: float) -> ErrorTable:
    """Multiply all squares."""
    rows = {
        name: ErrorRow(row.shape, row.squares * factor, row.errors, row.samples) for name, row in table.rows.items()
    }
    return legal(table.columns, rows, table.notes)


def joined(tables: Sequence[ErrorTable]) -> ErrorTable:
    """Join families' tables of the same gradients into one.

    A gradient counts as measured if every family was: a row is measured as a whole. Its share of all squares is the
    mean of its shares in the tables.
    """
    columns = Columns(
        tuple(density for each in tables for density in each.columns.densities),
        tuple(rank for each in tables for rank in each.columns.ranks),
        tuple(codec for each in tables for codec in each.columns.codecs),
    )
    totals = [sum(row.squares for row in each.rows.values()) for each in tables]
    mean_total = sum(totals) / len(totals)
    rows: dict[str, ErrorRow] = {}
    for name, row in tables[0].rows.items():
        of_all = [each.rows[name] for each in tables]
        shares = [one.squares / total for one, total in zip(of_all, totals, strict=True) if total]
        squares = sum(shares) / len(shares) * mean_total if shares else 0.0
        by_column = {
            column: error
            for each, one in zip(tables, of_all, strict=True)
            for column, error in zip(each.columns.names, one.errors, strict=True)
        }
        errors = tuple(by_column[column] for column in columns.names)
        rows[name] = ErrorRow(row.shape, squares, errors, min(one.samples for one in of_all))
    return legal(columns, rows, [note for each in tables for note in each.notes])
