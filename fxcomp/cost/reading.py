"""Parse JSON data into frozen dataclasses. An error has the path of the wrong value.

    POINT = record(Point, x=number(), name=TEXT)
    POINT({"x": -1.0, "name": "a"}, "points[3]")
 -->
    BadOption: points[3].x must be a number from 0 to 1e+18, not -1.0

A reader takes a value and its path (`place`), and returns the parsed value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from fxcomp.errors import BadOption

T = TypeVar("T")
Reader = Callable[[Any, str], T]

MOST = 1e18
"""Upper bound of times, sizes, rates and their inverses, so that a product of two is finite (assumed)."""


# Values


def number(least: float = 0.0, most: float = MOST) -> Reader[float]:
    """Return a reader of numbers in this closed range."""

    def read(value: Any, place: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # NaN is in no range
            raise wrong(place, f"a number from {least:g} to {most:g}", value)
        return float(value)

    return read


def positive(most: float = MOST) -> Reader[float]:
    """Return a reader of numbers above 0 that are safe to divide by."""
    return number(1 / MOST, most)


def whole(least: int, most: int = int(MOST)) -> Reader[int]:
    """Return a reader of integers in this closed range."""

    def read(value: Any, place: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(place, f"a whole number from {least} to {most:g}", value)
        return value

    return read


def TEXT(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise wrong(place, "a text", value)
    return value


def FLAG(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(place, "true or false", value)
    return value


def null_or(reader: Reader[T], null: Any = None) -> Reader[Any]:
    """Return a reader that also accepts JSON's null, and then returns `null`."""
    return lambda value, place: null if value is None else reader(value, place)


# Collections


def listed(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    """Return a reader of non-empty lists."""

    def read(value: Any, place: str) -> tuple[T, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise wrong(place, "a list of one entry or more", cast("object", value))
        return tuple(reader(one, f"{place}[{k}]") for k, one in enumerate(cast("list[Any]", value)))

    return read


def keyed(reader: Reader[T], key: Reader[Any] = TEXT) -> Reader[dict[Any, T]]:
    """Return a reader of objects with arbitrary keys, parsed by `key`."""

    def read(value: Any, place: str) -> dict[Any, T]:
        entries = _object(value, place)
        return {key(name, f"the key {_inside(place, name)}"): reader(v, _inside(place, name)) for name, v in entries}

    return read


def record(make: Callable[..., T], **readers: Reader[Any]) -> Reader[T]:
    """Return a reader of objects with exactly these entries, the arguments of `make`."""

    def read(value: Any, place: str) -> T:
        entries = dict(_object(value, place))
        for name in entries:
            if name not in readers:
                close = difflib.get_close_matches(str(name), readers, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise BadOption(f"{_inside(place, name)} is not known; {hint}There may be {', '.join(readers)}.")
        for name in readers:
            if name not in entries:
                raise BadOption(f"{_inside(place, name)} is missing")
        return make(**{name: readers[name](one, _inside(place, name)) for name, one in entries.items()})

    return read


def _object(value: Any, place: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise wrong(place, "an object", value)
    return list(cast("Mapping[Any, Any]", value).items())


# Errors


def wrong(place: str, expected: str, value: object) -> BadOption:
    text = "null" if value is None else repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return BadOption(f"{place or 'it'} must be {expected}, not {shown}")


_SHOWN = 60  # characters


def _inside(place: str, name: object) -> str:
    """Format an entry's path: `collectives.all_reduce@4x1`, or `compute['aten.mm f32[2,2]']` for other characters."""
    if not re.fullmatch(r"[\w@*()=,+~-]+", str(name)):
        return f"{place}[{name!r}]"
    return f"{place}.{name}" if place else str(name)
