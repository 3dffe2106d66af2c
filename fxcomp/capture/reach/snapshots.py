"""Compare everything that Python can read, by identity, fast enough for every step; the same state has the same number.

The loops run inside the interpreter: live views of dicts and lists are chained and compared with what they held. Only
where that fails are values read and compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, repeat
from operator import attrgetter, is_
from typing import Any, cast

from torch import Tensor, nn

from fxcomp.capture.batch_type import Change, sharing
from fxcomp.capture.reach.places import MISSING, ModulePlace, View, content, has_no_parts, read
from fxcomp.capture.reach.walk import At, Facts, NeedsWalk, Plain, Reach, Same, walk

_GRADIENT_FLAG = attrgetter("requires_grad")
_GET: Callable[[dict[str, Any], str, Any], Any] = cast("Any", dict).get


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that places held at some time."""

    sizes: list[int]
    items: list[Any]
    values: list[Any]
    attributes: list[Any]
    data: tuple[list[int], list[bool], list[bytes | None]]


class ObjectGuard:
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
        empty = [view for p in reach.places if isinstance(p, ModulePlace) for view in p.empty()]
        self._empty = (*empty, *(place.table for place in reach.bare))
        self._tables, self._keys, self._place_of_key = _columns(tables)
        self._owners, self._names, self._place_of_name = _columns(others)
        self._tensors = tuple(tensor for tensor in reach.tensors if has_memory(tensor))
        self._buffers = tuple(each for each in reach.buffers if content(each) is not None)

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
        """Ask if everything is the same object as then, with the same memory of tensors and content of buffers."""
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

    def _read_data(self) -> tuple[list[int], list[bool], list[bytes | None]]:
        flags: list[bool] = list(map(_GRADIENT_FLAG, self._tensors))
        return list(map(Tensor.data_ptr, self._tensors)), flags, list(map(content, self._buffers))


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
    """Yield (index, both_plain) for each changed object."""
    for i, (old, new) in enumerate(zip(before, now, strict=True)):
        if old is not new:
            yield i, has_no_parts(old) and has_no_parts(new)


KNOWN = 32
"""Snapshots that are recognised when they come again; more than captures are kept."""

AT_HAND = 4
"""Latest snapshots that are recognised by identity alone, as train() and eval() in turns."""

STATES = 100_000
"""Different contents of places that are remembered before all snapshots are forgotten."""


_NOTHING = 0
"""The state of a place that holds nothing, as a tensor with attributes that no code names: it is as if not there."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that Python could read at some time."""

    places: tuple[str, ...]
    facts: tuple[Facts, ...]

    def named(self) -> dict[str, Hashable]:
        """Give every fact by its full name."""
        pairs = zip(self.places, self.facts, strict=True)
        return {f"{place}{label}": fact for place, facts in pairs for label, fact in facts}


class Snapshots:
    """The snapshots that were taken, and the number of the present one."""

    def __init__(self, model: nn.Module, roots: Mapping[str, Any]):
        self._model, self._roots = model, roots
        self._numbers = count()
        self._of_number: OrderedDict[int, Snapshot] = OrderedDict()
        self._number_of: dict[tuple[int, ...], int] = {}
        self._state_of: dict[Facts, int] = {}
        self._at_hand: OrderedDict[int, tuple[Seen, list[Facts], list[int]]] = OrderedDict()
        self._walk()

    def number(self, before_walk: Callable[[], None]) -> int:
        """Number the present state. `before_walk` is called where more than plain values changed."""
        if self._guard.is_still(self._seen):
            return self._now
        for number, (seen, facts, states) in reversed(self._at_hand.items()):
            if number != self._now and self._guard.is_still(seen):
                self._reach.facts, self._states = list(facts), list(states)
                return self._enter(number, seen)
        if not self._read_again():
            before_walk()
            self._walk()
        return self._now

    def difference(self, old: int, new: int) -> Change | None:
        """Name the first thing that differs between two snapshots; None if they are one."""
        if old == new:
            return None
        before, after = self._of_number.get(old), self._of_number.get(new)
        if before is not None and after is not None:
            was, now = before.named(), after.named()
            for what in {**was, **now}:
                if was.get(what) != now.get(what):
                    return Change(what, _text(was, what), _text(now, what))
        return Change("what the step reads", "what it was", "something else")

    def _walk(self) -> None:
        self._reach: Reach = walk(self._model, self._roots)
        self._guard = ObjectGuard(self._reach)
        self._at_hand.clear()
        self._states = list(map(self._state, self._reach.facts))
        self._find()

    def _read_again(self) -> bool:
        """Read the places that hold another plain value; False if more than that changed."""
        places = self._guard.changed_places(self._seen)
        if places is None:
            return False
        try:
            for number in places:
                self._reach.facts[number] = facts = self._reach.read(self._reach.places[number])
                self._states[number] = self._state(facts)
        except NeedsWalk:
            return False
        self._find()
        return True

    def _state(self, facts: Facts) -> int:
        return self._state_of.setdefault(facts, len(self._state_of) + 1) if facts else _NOTHING

    def _find(self) -> None:
        """Give the present state its number: the old one if it was so before."""
        if len(self._state_of) > STATES + len(self._states):
            self._state_of.clear()
            self._number_of.clear()
            self._of_number.clear()
            self._at_hand.clear()
            self._states = list(map(self._state, self._reach.facts))
        shared = sharing(self._model)
        key = (*filter(None, self._states), self._state(shared))
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = next(self._numbers)
            names = (*(place.name for place in self._reach.places), "")
            self._of_number[number] = Snapshot(names, (*self._reach.facts, shared))
            if len(self._of_number) > KNOWN:
                oldest, _ = self._of_number.popitem(last=False)
                self._number_of = {states: n for states, n in self._number_of.items() if n != oldest}
        self._enter(number, self._guard.look())

    def _enter(self, number: int, seen: Seen) -> int:
        self._now, self._seen = number, seen
        self._of_number.move_to_end(number)
        self._at_hand[number] = seen, list(self._reach.facts), list(self._states)
        self._at_hand.move_to_end(number)
        if len(self._at_hand) > AT_HAND:
            self._at_hand.popitem(last=False)
        return number


def _text(facts: Mapping[str, Hashable], what: str) -> str:
    fact = facts.get(what, "nothing")
    if isinstance(fact, Plain | At | Same | str):
        return str(fact)
    if isinstance(fact, tuple):  # a tensor or an array: its identity and its signature or content
        what_it_is, *_, like = cast("tuple[object, ...]", fact)
        return str(what_it_is if isinstance(like, bytes) else like)
    return str(fact)
