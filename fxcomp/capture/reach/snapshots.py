"""Number the states of everything that Python can read: the same state again has the same number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from torch import nn

from fxcomp.capture.change import Change
from fxcomp.capture.reach.walk import At, Facts, NeedsWalk, Plain, Reach, Same, walk
from fxcomp.capture.reach.watch import ObjectWatch, Seen
from fxcomp.capture.shared_memory import sharing

KNOWN = 32
"""Snapshots that are recognised when they come again; more than captures are kept."""

AT_HAND = 4
"""Latest snapshots that are recognised by identity alone, as train() and eval() in turns."""

STATES = 100_000
"""Different contents of places that are remembered before all snapshots are forgotten."""


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
        self._walk(())

    def number(self, before_walk: Callable[[], None]) -> int:
        """Number the present state. `before_walk` is called where more than plain values changed."""
        if self._watch.is_still(self._seen):
            return self._now
        for number, (seen, facts, states) in reversed(self._at_hand.items()):
            if number != self._now and self._watch.is_still(seen):
                self._reach.facts, self._states = list(facts), list(states)
                return self._enter(number, seen)
        if not self._read_again():
            before_walk()
            self._walk(self._reach.names.found)
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

    def _walk(self, names: Any) -> None:
        self._reach: Reach = walk(self._model, self._roots, names)
        self._watch = ObjectWatch(self._reach)
        self._at_hand.clear()
        self._states = list(map(self._state, self._reach.facts))
        self._find()

    def _read_again(self) -> bool:
        """Read the places that hold another plain value; False if more than that changed."""
        places = self._watch.changed_places(self._seen)
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
        return self._state_of.setdefault(facts, len(self._state_of))

    def _find(self) -> None:
        """Give the present state its number: the old one if it was so before."""
        if len(self._state_of) > STATES + len(self._states):
            self._state_of.clear()
            self._number_of.clear()
            self._of_number.clear()
            self._at_hand.clear()
            self._states = list(map(self._state, self._reach.facts))
        shared = sharing(self._model)
        key = (*self._states, self._state(shared))
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = next(self._numbers)
            names = (*(place.name for place in self._reach.places), "")
            self._of_number[number] = Snapshot(names, (*self._reach.facts, shared))
            if len(self._of_number) > KNOWN:
                oldest, _ = self._of_number.popitem(last=False)
                self._number_of = {states: n for states, n in self._number_of.items() if n != oldest}
        self._enter(number, self._watch.look())

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
