"""Cache of cost tables, one per hardware and software."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path

from fxcomp import compat
from fxcomp.cost.table import VERSION, CostTable


def load_table(path: str | Path) -> CostTable | None:
    """Return a saved table; None if missing or, with a warning, unreadable. Saving another moves it to `path~`."""
    try:
        return CostTable.from_json(compat.read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"cannot read the cost table {path}, measuring again: {error}", stacklevel=2)
        return None


def cached_table(hardware: str, versions: str, complete: Callable[[CostTable | None], CostTable]) -> CostTable:
    """Return this machine's cached table after `complete`. If `complete` returns a new table, save that table."""
    path = cache_path(hardware, versions)
    known = load_table(path)
    table = complete(known)
    if table is not known:
        try:
            table.save(path)
        except OSError as error:
            warnings.warn(f"cannot keep the cost table in {path}: {error}", stacklevel=2)
    return table


def cache_path(hardware: str, versions: str) -> Path:
    key = hashlib.sha256(f"{hardware}\n{versions}\ntable {VERSION}".encode()).hexdigest()[:16]
    return compat.cache_directory() / f"costs-{key}.json"
