"""Compare everything that was reached by identity, fast enough for every step.

The loops run inside the interpreter: live views of dicts and lists are chained and compared with what they held. Only
where that fails are values read and compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from operator import attrgetter, is_
from typing import Any, cast

from torch import Tensor

from fxcomp.capture.reach.places import LARGE, MISSING, ModulePlace, View, read
from fxcomp.capture.reach.walk import Reach, has_no_parts

_GRADIENT_FLAG = attrgetter("requires_grad")
_GET: Callable[[dict[str, Any], str, Any], Any] = cast("Any", dict).get


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that places held at some time."""

    sizes: list[int]
    items: list[Any]
    values: list[Any]
    attributes: list[Any]
    data: tuple[list[int], list[bool], list[bytes]]


class ObjectWatch:
    """Reads everything that places hold."""

    def __init__(self, reach: Reach):
        views: list[View] = []
        slots: dict[tuple[int, str], tuple[Any, str, int]] = {}
        self._place_of_view: list[int] = []
        for number, place in enumerate(reach.places):
            seen = list(place.views())
            views += seen
            self._place_of_view += [number] * len(seen)
            for owner, key in place.slots():
                slots.setdefault((id(owner), key), (owner, key, number))
        tables = [slot for slot in slots.values() if isinstance(slot[0], dict)]
        others = [slot for slot in slots.values() if not isinstance(slot[0], dict)]
        self._views = tuple(views)
        self._empty = tuple(view for p in reach.places if isinstance(p, ModulePlace) for view in p.empty())
        self._tables, self._keys, self._place_of_key = _columns(tables)
        self._owners, self._names, self._place_of_name = _columns(others)
        self._tensors = tuple(tensor for tensor in reach.tensors if has_memory(tensor))
        self._arrays = (*(array for array in reach.arrays if array.size <= LARGE), *reach.numbers.values())

    def look(self) -> Seen:
        """Read everything as it is now."""
        return Seen(
            list(map(len, self._views)),
            list(chain.from_iterable(self._views)),
            list(self._read_tables()),
            self._read_attributes(),
            self._read_data(),
        )

    def is_still(self, seen: Seen) -> bool:
        """Ask if everything is the same object as then, with the same memory of tensors and content of arrays."""
        return (
            list(map(len, self._views)) == seen.sizes
            and not any(self._empty)
            and all(map(is_, chain.from_iterable(self._views), seen.items))
            and all(map(is_, self._read_tables(), seen.values))
            and all(map(is_, self._read_attributes(), seen.attributes))
            and self._read_data() == seen.data
        )

    def changed_places(self, seen: Seen) -> list[int] | None:
        """Find the places that hold another plain value than then; None if a walk is needed."""
        if list(map(len, self._views)) != seen.sizes or any(self._empty) or self._read_data() != seen.data:
            return None
        ends = list(accumulate(seen.sizes))
        changed: dict[int, None] = {}
        for i, is_simple in _differing(seen.items, chain.from_iterable(self._views)):
            if not is_simple:
                return None
            changed[self._place_of_view[bisect_right(ends, i)]] = None
        for places, before, now in (
            (self._place_of_key, seen.values, self._read_tables()),
            (self._place_of_name, seen.attributes, self._read_attributes()),
        ):
            for i, is_simple in _differing(before, now):
                if not is_simple:
                    return None
                changed[places[i]] = None
        return list(changed)

    def _read_tables(self) -> Iterator[Any]:
        return map(_GET, self._tables, self._keys, repeat(MISSING))

    def _read_attributes(self) -> list[Any]:
        try:
            return list(map(getattr, self._owners, self._names, repeat(MISSING)))
        except ValueError:  # a closure's cell that is empty
            return list(map(read, self._owners, self._names))

    def _read_data(self) -> tuple[list[int], list[bool], list[bytes]]:
        flags: list[bool] = list(map(_GRADIENT_FLAG, self._tensors))
        return list(map(Tensor.data_ptr, self._tensors)), flags, [array.tobytes() for array in self._arrays]


def has_memory(tensor: Tensor) -> bool:
    """Ask if a tensor lies in one place. Sparse and wrapped ones do not: only identity tells them."""
    try:
        tensor.data_ptr()
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def _columns(slots: Sequence[tuple[Any, str, int]]) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[int, ...]]:
    return tuple(s[0] for s in slots), tuple(s[1] for s in slots), tuple(s[2] for s in slots)


def _differing(before: Sequence[Any], now: Iterable[Any]) -> Iterator[tuple[int, bool]]:
    """Number the objects that are others than before, each with whether both are plain."""
    for i, (old, new) in enumerate(zip(before, now, strict=True)):
        if old is not new:
            yield i, has_no_parts(old) and has_no_parts(new)
