"""Merge of two cost tables, with their conflicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fxcomp.cost.measured import CompressorCost, MeasuredCollective, format_bytes
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption

Key = TypeVar("Key")
Entry = TypeVar("Entry")

SIZES = tuple(1 << k for k in range(10, 27, 2))
"""Sizes at which collectives are compared: 1 KiB to 64 MiB."""

CONFLICT = 0.25
"""Two measurements conflict if their relative difference exceeds this value and the expected difference (assumed)."""


# Conflicts


@dataclass(frozen=True, slots=True)
class Difference:
    what: str
    first: float
    second: float
    unit: str = "us"
    expected: float = 0.0
    """Expected relative difference."""

    @property
    def apart(self) -> float:
        low, high = sorted((abs(self.first), abs(self.second)))
        return high / low - 1 if low else float(high > 0) * float("inf")

    def __str__(self) -> str:
        change = f"{100 * (self.second / self.first - 1):+.0f} %" if self.first else "new"
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.what}: {self.first:.4g}{unit} and {self.second:.4g}{unit} ({change})"


def _conflicts(first: CostTable, second: CostTable) -> list[Difference]:
    found = [one for one in _differences(first, second) if one.apart > max(CONFLICT, one.expected)]
    return sorted(found, key=lambda one: (-one.apart, one.what))


def _differences(first: CostTable, second: CostTable) -> Iterator[Difference]:
    for field in fields(CostTable):
        mine, theirs = getattr(first, field.name), getattr(second, field.name)
        if field.name in _SHARING:
            continue
        if isinstance(mine, float | int) and isinstance(theirs, float | int) and not isinstance(mine, bool):
            unit = "GB/s" if field.name.endswith("gb_per_s") else ""
            yield Difference(field.name, float(mine), float(theirs), unit)
    for name, unit in (("gflops", "GFLOP/s"), ("gb_per_s", "GB/s"), ("launch_us", "us")):
        yield Difference(f"roofline {name}", getattr(first.roofline, name), getattr(second.roofline, name), unit)
    for name, gflops in first.roofline.others.items():
        if name in second.roofline.others:
            yield Difference(f"roofline {name}", gflops, second.roofline.others[name], "GFLOP/s")
    for key, mine in first.collectives.items():
        if key in second.collectives:
            yield _of_collectives(f"{key[0].value}@{key[1]}", mine, second.collectives[key])
    for key, mine in first.compressors.items():
        if key in second.compressors:
            yield from _of_compressors(first.shown(key), mine, second.compressors[key])
    for key, mine in first.compute.items():
        if key in second.compute:
            theirs = second.compute[key]
            yield Difference(key, mine.us, theirs.us, expected=mine.spread + theirs.spread)


def _of_collectives(what: str, mine: MeasuredCollective, theirs: MeasuredCollective) -> Difference:
    """Return the largest difference at `SIZES` within both measured ranges."""
    largest = min(mine.fit.largest, theirs.fit.largest) or SIZES[-1]
    expected = 2 * (mine.spread + theirs.spread)
    return max(
        (
            Difference(f"{what}, {format_bytes(size)}", mine.fit.at(size), theirs.fit.at(size), expected=expected)
            for size in SIZES
            if size <= max(largest, SIZES[0])
        ),
        key=lambda one: one.apart,
    )


def _of_compressors(key: str, mine: CompressorCost, theirs: CompressorCost) -> Iterator[Difference]:
    sizes = sorted({point.elements for cost in (mine, theirs) for point in cost.points})
    works: dict[str, Callable[[CompressorCost, int], float]] = {
        "encode": lambda cost, n: cost.encode_us(n),
        "decode": lambda cost, n: cost.decode_us(n),
        f"decode {_PAYLOADS} payloads of": lambda cost, n: cost.decode_us(n, _PAYLOADS),
        "propose": lambda cost, n: cost.propose_us(n),
    }
    for work, us in works.items():
        found = (Difference(f"{key}, {work} {n:,}", us(mine, n), us(theirs, n)) for n in sizes)
        yield max(found, key=lambda one: one.apart)


_PAYLOADS = 8


# Merging


@dataclass(frozen=True, slots=True)
class Merged:
    table: CostTable
    conflicts: tuple[str, ...]


def merge(first: CostTable, second: CostTable) -> Merged:
    """Merge two tables of one machine.

    A measured entry wins over an assumed one, then the newer table wins, then `second`. A number that differs from the
    default wins over the default. Roofline entries are not mixed. Entries of `_SHARING` come from one table: the
    winner, or the other table if they are all defaults in the winner. Raises BadOption for different machines.
    """
    default = CostTable()
    known = list(dict.fromkeys(t.hardware for t in (first, second) if t.hardware != default.hardware))
    if len(known) > 1:
        raise BadOption(
            f"these tables are of different machines and cannot be one: {known[0]!r} and {known[1]!r}.\n"
            "  Calibrate each kind of machine for itself."
        )
    older, newer = (first, second) if first.date <= second.date else (second, first)
    main, other = (newer, older) if _is_measured(newer.source) >= _is_measured(older.source) else (older, newer)
    chosen: dict[str, Any] = {
        "hardware": known[0] if known else default.hardware,
        "versions": main.versions or other.versions,
        "date": newer.date,
        "source": main.source,
        "compute": _union(older.compute, newer.compute, lambda entry: entry.source),
        "roofline": max((newer.roofline, older.roofline), key=lambda roofline: _is_measured(roofline.source)),
        "collectives": _union(older.collectives, newer.collectives, lambda entry: entry.source),
        "compressors": {**other.compressors, **main.compressors},
    }
    shares = main if any(getattr(main, name) != getattr(default, name) for name in _SHARING) else other
    chosen |= {name: getattr(shares, name) for name in _SHARING}
    for field in fields(CostTable):
        if field.name not in chosen:
            mine = getattr(main, field.name)
            is_usual = mine == getattr(default, field.name)
            chosen[field.name] = getattr(other, field.name) if is_usual else mine
    conflicts = _conflicts(_filled(first, second), _filled(second, first))
    return Merged(CostTable(**chosen), tuple(map(str, conflicts)))


_SHARING = ("transport", "processors", "contention", "overlap_speed")
"""Entries that are measured together."""


def _filled(one: CostTable, other: CostTable) -> CostTable:
    """Replace defaults by the other table's values, so that defaults cause no conflicts."""
    default = CostTable()
    assumed = {f.name: getattr(other, f.name) for f in fields(one) if getattr(one, f.name) == getattr(default, f.name)}
    return replace(one, **assumed)


def _union(older: Mapping[Key, Entry], newer: Mapping[Key, Entry], source: Callable[[Entry], str]) -> dict[Key, Entry]:
    both = {**older, **newer}
    for key in older:
        if key in newer and _is_measured(source(older[key])) > _is_measured(source(newer[key])):
            both[key] = older[key]
    return both


def _is_measured(source: str) -> bool:
    return source.startswith("measured")
