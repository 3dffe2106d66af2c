"""Number buckets and plans for a search."""

from __future__ import annotations

from typing import NamedTuple

SAME = 1e-9
"""Times that are relatively closer than this are equal."""


class Part(NamedTuple):
    """A bucket in the search: cells start to stop of a lane, and the number of one of its options."""

    lane: int
    start: int
    stop: int
    option: int


Parts = tuple[Part, ...]
"""A plan in the search: buckets in the order in which their last gradients are ready."""


class Value(NamedTuple):
    """A plan's step, infinite for one that loses too much, and what it loses, in elements."""

    us: float
    lost: float

    def beats(self, other: Value) -> bool:
        """Return whether a plan is faster, or as fast and loses less."""
        if self.us > other.us * (1 + SAME):
            return False
        return self.us < other.us * (1 - SAME) or self.lost < other.lost


class Limits(NamedTuple):
    """The effort of a descent. All are counts: every rank must stop at the same plan."""

    evaluations: int = 4000
    """Simulated plans."""
    options: int = 6
    """The best options of a bucket, which are tried together with another change, and its own."""
    apart: int = 3
    """Two buckets that are changed together are no further apart."""
    dense_only: bool = False
    pairs: bool = True
    """Change two buckets together, where no single change helps."""
    borders: bool = True
    """Change the buckets themselves, and not their options alone."""
    price: float = 0.0
    """The time that an element's loss counts for, in us: what is least is the step and that."""
