"""Name the collectives, in torch's spelling, and the facts about each that more than one file needs."""

from __future__ import annotations

from enum import Enum


class CollectiveKind(Enum):
    """A collective. Strategies use the first three, buffers the fourth; others have a price."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    GATHER = "gather"
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


IN_STEPS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""The collectives that most plans are made of: every backend must have them. They are measured while compiling, an
all_to_all only where no gather tells its time."""
