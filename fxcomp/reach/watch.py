"""Tell cheaply whether anything that was reached is another object than before.

Every step asks, so all of it runs inside the interpreter: live views of dicts and lists are chained and compared by
identity with what they held. Only where that fails are values read and compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter, is_
from typing import Any, cast

from torch import Tensor

from fxcomp.reach.places import LARGE, MISSING, View
from fxcomp.reach.walk import Reach, is_plain

_GRADIENT_FLAG = attrgetter("requires_grad")
_GET: Callable[[dict[str, Any], str, Any], Any] = cast("Any", dict).get


class Watch:
    """What places held when they were looked at last."""

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
        self._tables, self._keys, self._place_of_key = _columns(tables)
        self._owners, self._names, self._place_of_name = _columns(others)
        self._tensors = tuple(reach.tensors)
        self._arrays = tuple(array for array in reach.arrays if array.size <= LARGE)
        self.look()

    def look(self) -> None:
        """Take everything as it is now."""
        self._sizes = list(map(len, self._views))
        self._items: list[Any] = list(chain.from_iterable(self._views))
        self._values = list(self._read_tables())
        self._attributes = self._read_attributes()
        self._data = self._read_data()

    def has_changed(self) -> bool:
        """Whether anything is another object, or a tensor's memory or an array's content another."""
        return not (
            list(map(len, self._views)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._items))
            and all(map(is_, self._read_tables(), self._values))
            and all(map(is_, self._read_attributes(), self._attributes))
            and self._read_data() == self._data
        )

    def changed_places(self) -> list[int] | None:
        """Which places hold another plain value than before; None if anything else changed: then a walk is needed."""
        if list(map(len, self._views)) != self._sizes or self._read_data() != self._data:
            return None
        starts = list(accumulate(self._sizes))
        changed: dict[int, None] = {}
        for i, is_simple in _differing(self._items, chain.from_iterable(self._views)):
            if not is_simple:
                return None
            changed[self._place_of_view[bisect_right(starts, i)]] = None
        for places, before, now in (
            (self._place_of_key, self._values, self._read_tables()),
            (self._place_of_name, self._attributes, self._read_attributes()),
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
            return list(map(_read, self._owners, self._names))

    def _read_data(self) -> tuple[list[int], list[bool], list[bytes]]:
        flags: list[bool] = list(map(_GRADIENT_FLAG, self._tensors))
        return list(map(Tensor.data_ptr, self._tensors)), flags, [array.tobytes() for array in self._arrays]


def _columns(slots: Sequence[tuple[Any, str, int]]) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[int, ...]]:
    return tuple(s[0] for s in slots), tuple(s[1] for s in slots), tuple(s[2] for s in slots)


def _differing(before: Sequence[Any], now: Iterable[Any]) -> Iterator[tuple[int, bool]]:
    """Where other objects are than before, and whether both are plain."""
    for i, (old, new) in enumerate(zip(before, now, strict=True)):
        if old is not new:
            yield i, is_plain(old) and is_plain(new)


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, MISSING)
    except ValueError:
        return MISSING
