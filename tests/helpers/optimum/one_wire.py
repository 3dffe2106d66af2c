"""Find the fastest plan under an error limit exactly where only one wire is busy, for a dozen gradients and more.

    end(j) = max(end(i), ready(j)) + time(i, j, o)          bucket (i, j] leaves when its last gradient is ready
                                                            and the wire is free
    lost(j) = lost(i) + lost(i, j, o)

So a partial plan is two numbers, and of two for the same gradients only one that is later and loses more is needless.
L-GreCo (Markov et al. 2022) finds the parameters with the fewest bytes by a dynamic programme over errors that are
rounded to a grid. Here the time is least, ready times count, and borders of buckets are found too. The grid only bounds
what is left to send, with errors rounded down:

    work(i, e) = min over j, o of   time(i, j, o) + work(j, e - lost(i, j, o))
    last(i, e) = min over j, o of   max(ready(j) + time(i, j, o) + work(j, e - ...), last(j, e - ...))

A partial plan ends at max(end(i) + work(i, e), last(i, e)) at the earliest, with what it may still lose as e. It is
dropped where that is too late, and errors of what remains are exact. "Too late" is near the bound at first, and further
from it until a plan is found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import step_time_us
from fxcomp.search.least_work import COMPUTE
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from helpers.optimum.labels import Option, plan_of
from helpers.optimum.oracle import Optimum, TooLarge
from helpers.optimum.space import Rows, rows_of

GRID = 2048
"""Steps from no error to the limit, by which bounds are counted."""

MOST = 4_000_000
"""Partial plans for the same gradients; beyond it the workload is too large."""

_ABOVE = (1e-6, 1e-3, 0.01, 0.1, 1.0, math.inf)  # relative to the bound: plans that are looked for, in turn
_NOTHING = 1e-6  # of a bucket's time on the wire: what else it takes is left out

Numbers = Any
"""A numpy array."""


class NotOneWire(ValueError):
    """A workload's buckets occupy more than a wire, or the wire more than once."""


def fastest_on_one_wire(workload: Workload, costs: CostTable, cluster: Cluster, terms: Terms) -> Optimum:
    """Find the fastest plan. Raises NotOneWire unless a bucket's only time is one collective on one stream."""
    spaces = rows_of(workload, costs, cluster, terms)
    if len(spaces) != 1 or len(spaces[0].rows) != 1:
        raise NotOneWire("there are vectors and matrices, whose buckets overtake each other")
    if math.isfinite(spaces[0].bursty):
        raise NotOneWire("the elements that come in bursts are limited, too")
    wire = _Wire(spaces[0])
    plan = plan_of(wire.fastest(workload.backward_us))
    return Optimum(plan, step_time_us(plan_tasks(workload, plan, costs, cluster), costs.processors), wire.looked_at)


class _Partial(NamedTuple):
    """Partial plans for the same gradients, as columns."""

    ends: Numbers
    lost: Numbers
    starts: Numbers
    """The gradients before the last bucket, the place of the plan for these, and the last bucket's option."""
    parents: Numbers
    options: Numbers


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bucket that travels by an option."""

    option: Option
    us: float
    steps: int
    """Of error, rounded down to the grid."""


class _Wire:
    """One row of gradients, with the time that each bucket's options occupy the wire."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.row, self.limit = rows, rows.rows[0], rows.lossable
        self.count = len(self.row.members)
        self.looked_at = 0
        self.streams = set[int]()
        self.sent = {
            (start, stop): [
                _Sent(option, self._time_us(option), int(self._steps(option.lost)))
                for option in self.row.options(start, stop)
                if option.lost <= self.limit
            ]
            for stop in range(1, self.count + 1)
            for start in range(stop)
        }
        if len(self.streams) > 1:
            raise NotOneWire("buckets travel on several streams")
        self.work, self.last = self._left()

    def fastest(self, backward_us: float) -> list[Option]:
        """Return the buckets of the fastest plan."""
        least_us = max(backward_us, float(self.last[0, GRID]))
        for above in _ABOVE:
            partial = self._dealt(least_us * (1 + above))
            if partial[-1].ends.size:
                return self._buckets(partial)
        raise AssertionError("a dense plan loses nothing")

    def _left(self) -> tuple[Numbers, Numbers]:
        """Bound the rest after each gradient, by the steps of error that it may still have."""
        work: Numbers = np.full((self.count + 1, GRID + 1), np.inf)
        last: Numbers = np.full((self.count + 1, GRID + 1), np.inf)
        work[self.count] = last[self.count] = 0.0
        for start in range(self.count - 1, -1, -1):
            for stop in range(start + 1, self.count + 1):
                for each in self.sent[start, stop]:
                    may = slice(0, GRID + 1 - each.steps)
                    after = work[stop, may] + each.us
                    np.minimum(work[start, each.steps :], after, out=work[start, each.steps :])
                    end = np.maximum(after + self._ready_us(stop), last[stop, may])
                    np.minimum(last[start, each.steps :], end, out=last[start, each.steps :])
        return work, last

    def _dealt(self, until_us: float) -> list[_Partial]:
        """Grow partial plans gradient by gradient, all that may end by then and that none beats."""
        none: Numbers = np.zeros(0, dtype=np.int64)
        found = [_Partial(np.zeros(1), np.zeros(1), none, none, none)]
        for stop in range(1, self.count + 1):
            grown: list[_Partial] = []
            for start in range(stop):
                begun = found[start]
                free: Numbers = np.maximum(begun.ends, self._ready_us(stop))
                for number, each in enumerate(self.sent[start, stop]):
                    ends, lost = free + each.us, begun.lost + each.option.lost
                    left = self._steps(np.maximum(0.0, self.limit - lost))
                    least = np.maximum(ends + self.work[stop, left], self.last[stop, left])
                    kept = np.flatnonzero((lost <= self.limit) & (least <= until_us))
                    same = np.ones_like(kept)
                    grown.append(_Partial(ends[kept], lost[kept], start * same, kept, number * same))
            found.append(self._undominated(grown))
        return found

    def _undominated(self, grown: list[_Partial]) -> _Partial:
        together: list[Numbers] = [np.concatenate(columns) for columns in zip(*grown, strict=True)]
        ends, lost = together[:2]
        self.looked_at += ends.size
        if ends.size > MOST:
            raise TooLarge(f"more than {MOST:,} partial plans for {self.count} atoms")
        order = np.lexsort((ends, lost))
        earliest: Numbers = np.minimum.accumulate(np.concatenate(([np.inf], ends[order])))[:-1]
        kept = order[ends[order] < earliest]
        return _Partial(*(column[kept] for column in together))

    def _buckets(self, partial: list[_Partial]) -> list[Option]:
        """Follow the plan that ends first back to its beginning."""
        found: list[Option] = []
        stop, place = self.count, int(np.argmin(partial[-1].ends))
        while stop > 0:
            here = partial[stop]
            start = int(here.starts[place])
            found.append(self.sent[start, stop][int(here.options[place])].option)
            stop, place = start, int(here.parents[place])
        return found[::-1]

    def _steps(self, lost: Numbers) -> Numbers:
        """Count errors in steps of the grid, rounded down."""
        share: Numbers = np.asarray(lost) / self.limit if self.limit > 0 else np.zeros_like(lost)
        return np.minimum(GRID, share * GRID).astype(np.int64)

    def _ready_us(self, stop: int) -> float:
        return self.rows.ready_us(self.row.members[stop - 1])

    def _time_us(self, option: Option) -> float:
        """Return how long a bucket occupies the wire. Raises NotOneWire if it does anything else."""
        blocks = [block for stage in option.blocks.stages for block in stage]
        sent = [(stream, us) for stream, us in blocks if stream != COMPUTE]
        if len(option.blocks.stages) > 1 or len(sent) != 1:
            raise NotOneWire(f"{option.strategy} is more than one collective")
        stream, us = sent[0]
        beside_us = option.blocks.path_us - us
        if beside_us > _NOTHING * us:
            raise NotOneWire(f"{option.strategy} takes {us:.4g} us on the wire and {beside_us:.4g} us beside it")
        self.streams.add(stream)
        return us
