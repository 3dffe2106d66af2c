"""Lend process groups to what is compiled, one set to one borrower, and take them back for the next.

Making a group costs connections and threads on every rank, and none of it returns by itself. So groups are kept for as
long as the default process group lives, and lent out:

    borrow   the ranks tell each other which sets lie idle, and take the first that does so on all of them; or make one
    release  this rank needs the set no more; nobody else is asked, so it may happen whenever Python collects garbage
    abandon  something went wrong in it: its connections are closed, and no rank will find it idle again

Two steps that live at once never share a set: what one of them leaves under way cannot meet what the other one sends.
`docs/decisions/0011-process-groups-are-lent.md` says why.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fxcomp import compat
from fxcomp.runtime.agree import Conversation
from fxcomp.runtime.members import Levels, Members
from fxcomp.runtime.transport import Groups

SPARE = 1
"""The number of idle sets of a kind that are kept beside the one that is lent: two steps in turns need no more."""


@dataclass(slots=True)
class Lease:
    """A set of groups that one borrower has."""

    groups: Groups
    number: int
    kind: str
    lender: Lender

    def end(self) -> None:
        """Give the set back, or give it up if it is not known to be quiet on all ranks."""
        if self.groups.is_idle:
            self.lender.idle.setdefault(self.kind, {})[self.number] = self.groups
        else:
            self.abandon()

    def abandon(self) -> None:
        """Close the set's connections; the other ranks that wait in it get an error."""
        self.lender.known.discard(self.number)
        self.groups.give_up()


class Lender:
    """All sets of one default process group on this rank."""

    def __init__(self) -> None:
        self.idle: dict[str, dict[int, Groups]] = {}
        """By kind and number."""
        self.known: set[int] = set()
        """The numbers of all sets that live, idle or lent."""
        self._next = 0

    def borrow(
        self, agreement: Conversation, lane: str, members: Members, levels: Levels, direct: Collection[str]
    ) -> Lease:
        """Lend a set of groups for a lane; every member calls this with the same arguments.

        `levels` has the groups of ranks at each level, as the members count them.
        """
        levels = members.levels(levels)
        kind = f"{members.key}{lane} {sorted(levels.items())} {sorted(direct)}"
        if not self.idle.get(kind) and self.known:
            gc.collect()  # a step that nobody has may still have its groups, if it is part of a cycle
        mine: dict[str, Any] = {
            "idle": sorted(self.idle.get(kind, {})),
            "known": sorted(self.known),
            "next": self._next,
            "made": compat.groups_made(),
        }
        everyone: list[dict[str, Any]] = agreement.attempt(f"process groups, {lane}", lambda: mine)
        self._next = max(theirs["next"] for theirs in everyone) + 1
        on_all = set[int].intersection(*(set(theirs["idle"]) for theirs in everyone))
        living = set[int].intersection(*(set(theirs["known"]) for theirs in everyone))
        number = min(on_all, default=None)
        self._clear(kind, spare=set(sorted(on_all)[1 : 1 + SPARE]), taken=number, on_all=on_all, living=living)
        if number is not None:
            return Lease(self.idle[kind].pop(number), number, kind, self)
        number, made = self._next - 1, list[Groups]()
        if members.is_whole_job:
            compat.count_groups_from(max(theirs["made"] for theirs in everyone))
        name = members.first_name(number)

        def create() -> None:
            made.append(Groups.create(levels, [lane], direct, members, name))

        agreement.attempt(f"making process groups, {lane}", create)
        self.known.add(number)
        return Lease(made[0], number, kind, self)

    def _clear(
        self, kind: str, *, spare: set[int], taken: int | None, on_all: Collection[int], living: Collection[int]
    ) -> None:
        """Close idle sets that some rank has closed, and surplus ones; all ranks close the same."""
        idle = self.idle.get(kind, {})
        for number in list(idle):
            is_surplus = number in on_all and number != taken and number not in spare
            if is_surplus or number not in living:
                self.known.discard(number)
                idle.pop(number).give_up()

    def close(self) -> None:
        """Drop all idle sets: the default process group has been destroyed, and theirs with it."""
        for sets in self.idle.values():
            for groups in sets.values():
                groups.give_up()
        self.idle.clear()
        self.known.clear()


_current: tuple[weakref.ref[Any], Lender] | None = None


def lender() -> Lender:
    """Return the lender of the present default process group."""
    global _current
    world = compat.default_group()
    if _current is None or _current[0]() is not world:
        if _current is not None:
            _current[1].close()
        fresh = Lender()
        _current = weakref.ref(world), fresh
        # Not at the end of a job: its connections end with it, and what would close them may be gone before them.
        weakref.finalize(world, fresh.close).atexit = False
    return _current[1]
