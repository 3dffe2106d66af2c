"""Name the collectives, in torch's spelling, and the facts about each that more than one file needs."""

from __future__ import annotations

from enum import Enum


class CollectiveKind(Enum):
    """A collective. All but the last have a place in strategies."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    GATHER = "gather"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point_to_point"

    __hash__ = object.__hash__  # Enum's own runs in Python, for every price that the search asks for

    @property
    def gathers(self) -> bool:
        """One rank receives what every other one contributes: as many times its own bytes."""
        return self in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)

    @property
    def deals(self) -> bool:
        """Every rank's tensor is dealt out in equal parts to all."""
        return self in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)

    @property
    def splits(self) -> bool:
        """It ends with a shard on each rank, or with everything on the first one."""
        return self in _JOINED_BY

    @property
    def is_rooted(self) -> bool:
        """The first rank of the group has everything, before it or after it."""
        return self in (CollectiveKind.REDUCE, CollectiveKind.GATHER, CollectiveKind.BROADCAST)

    @property
    def sums(self) -> bool:
        """The network adds what ranks send, which needs dense values or payloads that may be added."""
        return self in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)

    @property
    def is_in_place(self) -> bool:
        """It overwrites what it is given, as all others do not."""
        return self is CollectiveKind.ALL_REDUCE

    @property
    def has_parts(self) -> bool:
        """Each rank owns a part, of its own size: `runtime/moves.py` says which it brings and gets."""
        return self not in (CollectiveKind.ALL_REDUCE, CollectiveKind.POINT_TO_POINT)

    @property
    def joined_by(self) -> CollectiveKind:
        """The collective that puts together what this one splits."""
        return _JOINED_BY[self]


_JOINED_BY = {
    CollectiveKind.REDUCE_SCATTER: CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL: CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE: CollectiveKind.BROADCAST,
    CollectiveKind.GATHER: CollectiveKind.BROADCAST,
}

IN_STEPS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""The collectives that most plans are made of: every backend must have them. They are measured while compiling, an
all_to_all only where no gather tells its time."""
