"""Bound a partial plan's step from below by what its streams must still do.

A stream runs one block at a time, so a step takes at least what any stream has done and must still do. Of each stream
the least that the rest of the atoms can add is a shortest path: over the places where a row may be cut, each bucket as
cheap as its cheapest strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fxcomp.search.least_work import COMPUTE, STREAMS
from fxcomp.search.workload import Workload
from helpers.optimum.labels import Label, Option
from helpers.optimum.space import Row, Rows


class Rest:
    """Bound the work that atoms add which are in no bucket yet, by place."""

    def __init__(self, workload: Workload, rows: Rows) -> None:
        self.workload, self.rows = workload, rows
        self.tails = [_shortest(row, _tail_us) for row in rows.rows]
        self.work = [
            [_shortest(row, lambda option, stream=stream: option.blocks.work[stream]) for row in rows.rows]
            for stream in range(len(STREAMS))
        ]

    def bound_us(self, label: Label, place: tuple[int, ...]) -> float:
        """Bound the step of every plan that begins like this."""
        last, finish_us = self.rows.last_of(place), self.workload.finish_us
        sums = list(label.clocks)
        for bucket in label.flying:
            for stage in bucket.left:
                for stream, us in stage:
                    sums[stream] += us
            sums[COMPUTE] += bucket.tail_us
        sums[COMPUTE] += self.workload.backward_us - self.rows.ready_us(last) + label.tails_us + label.waiting_us
        sums[COMPUTE] += finish_us
        next_us = label.clocks[COMPUTE] + self.rows.ready_us(last + 1) - self.rows.ready_us(last)
        found = label.ends_us + _at(self.tails, place) + label.waiting_us + finish_us
        for stream, work in enumerate(self.work):
            begun_us = sums[stream] if stream == COMPUTE else max(sums[stream], next_us)
            rest_us = _at(work, place)
            if rest_us or stream == COMPUTE:
                found = max(found, begun_us + rest_us)
        return found


def _at(work: Sequence[Sequence[float]], place: tuple[int, ...]) -> float:
    return sum(row[stop] for row, stop in zip(work, place, strict=True))


def _tail_us(option: Option) -> float:
    return option.tail_us


def _shortest(row: Row, cost: Callable[[Option], float]) -> list[float]:
    """Find for each place the least cost of the buckets after it."""
    count = len(row.members)
    found = [math.inf] * count + [0.0]
    for start in range(count - 1, -1, -1):
        for stop in range(start + 1, count + 1):
            least = min(map(cost, row.options(start, stop)))
            found[start] = min(found[start], least + found[stop])
    return found
