"""The number of tries before a search is content."""

from __future__ import annotations

from typing import NamedTuple

from fxcomp.search.descent.parts import Limits


class Effort(NamedTuple):
    """The effort of a search; all are counts."""

    starts: int
    """Starts that are improved."""
    first: Limits
    improved: int
    """Ends that are improved further, two changes at a time."""
    then: Limits
    in_full: Limits
    """With a cell for each atom, of the best end and of as many starts as ends are improved."""
    kicked: Limits
    rounds: int
    """Times that kicks are tried."""
    tails: int
    """Options that a kick gives to the end of the last bucket."""
    prices: int
    """Prices of what is lost that are tried."""


ALONE = Effort(
    8,
    Limits(evaluations=2500, options=5, pairs=False),
    2,
    Limits(evaluations=4000),
    Limits(evaluations=6000, options=5),
    Limits(evaluations=500, options=3, pairs=False),
    2,
    2,
    6,
)
SHARED = Effort(
    4,
    Limits(evaluations=1000, options=4, pairs=False),
    1,
    Limits(evaluations=2000),
    Limits(evaluations=1200, options=4, pairs=False),
    Limits(evaluations=250, options=2, pairs=False),
    1,
    1,
    4,
)
"""Where processors are shared a simulation takes ten times as long."""

QUICK = Limits(evaluations=300, pairs=False)
