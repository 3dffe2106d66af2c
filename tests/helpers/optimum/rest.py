"""Bound a partial plan's step from below by what its streams must still do.

A stream runs one block at a time, so a step takes at least what any stream has done and must still do, and at
least every weighted mean of such sums. Of each mean the least that the rest of the atoms can add is a shortest path:
over the places where a row may be cut, each bucket as cheap as its cheapest strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fxcomp.search.least_work import COMPUTE, STREAMS
from fxcomp.search.workload import Workload
from helpers.optimum.labels import Label, Option
from helpers.optimum.space import Row, Rows

Weights = tuple[tuple[int, float], ...]
"""Streams and their weights, which add up to 1."""

_MEANS = 6  # of those that bound the whole step best
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class _Left(NamedTuple):
    """The remainder after one place."""

    last: int
    """The last atom that is dealt."""
    tails_us: float
    late_head_us: float
    """The bound by heads, if compute's clock is 0."""
    means: list[tuple[Weights, float]]


class Rest:
    """Bound the work that atoms add which are in no bucket yet, by place."""

    def __init__(self, workload: Workload, rows: Rows) -> None:
        self.workload, self.rows = workload, rows
        self.least_tail_us = self._least_tail_us()
        self.tails = [_shortest(row, _tail_us) for row in rows.rows]
        self.used = [s for s in range(len(STREAMS)) if s != COMPUTE and self._is_used(s)]
        self.singles = {stream: self._work(((stream, 1.0),)) for stream in (COMPUTE, *self.used)}
        self.heads = {stream: self._heads(stream) for stream in self.used}
        self.means = [(((stream, 1.0),), work) for stream, work in self.singles.items()]
        self.known: dict[tuple[int, ...], _Left] = {}
        start, sums = (0,) * len(rows.rows), self._sums(Label(), -1)
        means = [(weights, self._work(weights)) for weights in self._weights()]
        means.sort(key=lambda mean: -_mean_us(sums, mean[0], _at(mean[1], start)))
        self.means += means[:_MEANS]

    def bound_us(self, label: Label, place: tuple[int, ...]) -> float:
        """Bound the step of every plan that begins like this."""
        left = self.known.get(place)
        if left is None:
            left = self.known[place] = self._left(place)
        sums = self._sums(label, left.last)
        found = label.ends_us + left.tails_us + label.waiting_us
        late_us = label.clocks[COMPUTE] + left.late_head_us
        found = late_us if late_us > found else found
        for weights, rest_us in left.means:
            for stream, weight in weights:
                rest_us += weight * sums[stream]
            found = rest_us if rest_us > found else found
        return found

    def _left(self, place: tuple[int, ...]) -> _Left:
        last = self.rows.last_of(place)
        heads = max((heads[last + 1] for heads in self.heads.values()), default=0.0)
        return _Left(
            last,
            _at(self.tails, place) + self.workload.finish_us,
            heads - self.rows.ready_us(last),
            [(weights, _at(work, place)) for weights, work in self.means],
        )

    def _sums(self, label: Label, last: int) -> list[float]:
        """Sum for each stream its work so far and the work known to come; but for compute, with a tail."""
        sums = list(label.clocks)
        for bucket in label.flying:
            for stage in bucket.left:
                for stream, us in stage:
                    sums[stream] += us
            sums[COMPUTE] += bucket.tail_us
        clock = label.clocks[COMPUTE] - self.rows.ready_us(last)
        sums[COMPUTE] += self.workload.backward_us - self.rows.ready_us(last) + label.tails_us
        sums[COMPUTE] += label.waiting_us + self.workload.finish_us
        next_us = clock + self.rows.ready_us(last + 1)
        for stream in self.used:
            sums[stream] = max(sums[stream], next_us) + self.least_tail_us
        return sums

    def _work(self, weights: Weights) -> list[list[float]]:
        """Find for each row and place the least weighted work of the rest."""

        def cost(option: Option) -> float:
            work = option.blocks.work
            return sum(weight * work[stream] for stream, weight in weights)

        return [_shortest(row, cost) for row in self.rows.rows]

    def _is_used(self, stream: int) -> bool:
        return any(
            option.blocks.work[stream]
            for row in self.rows.rows
            for k in range(len(row.members))
            for option in row.options(k, k + 1)
        )

    def _weights(self) -> list[Weights]:
        found: list[Weights] = []
        for share in _SHARES:
            for stream in self.used:
                found.append(((COMPUTE, 1 - share), (stream, share)))
                found += [
                    ((COMPUTE, 1 - share), (stream, share / 2), (other, share / 2))
                    for other in self.used
                    if other > stream
                ]
        return found

    def _least_tail_us(self) -> float:
        """Find the least compute after the last block of any other stream: the last bucket's tail, and what waits.

        Tails run in the buckets' order, so that of the last bucket, which holds the last atom, is the last.
        """
        tails = [
            option.tail_us
            for row in self.rows.rows
            if row.members[-1] == len(self.rows.atoms) - 1
            for k in range(len(row.members))
            for option in row.options(k, len(row.members))
        ]
        waits = self.workload.updates_wait
        updates_us = sum(gradient.update_us for gradient in self.workload.gradients) if waits else 0.0
        return min(tails) + self.workload.finish_us + updates_us

    def _heads(self, stream: int) -> list[float]:
        """Bound the step for each first atom that is not dealt.

        A bucket that holds atom k or a later one starts when k is ready or later, if compute was not late.
        """
        work = self.singles[stream]
        ends = [_from(row, least, stream) for row, least in zip(self.rows.rows, work, strict=True)]
        count = len(self.rows.atoms)
        heads = [0.0] * (count + 1)
        for k in range(count - 1, -1, -1):
            need_us = 0.0
            for row, least in zip(self.rows.rows, ends, strict=True):
                place = sum(member < k for member in row.members)
                need_us += least[place]
            heads[k] = max(heads[k + 1], self.rows.ready_us(k) + need_us + self.least_tail_us)
        return heads


def _from(row: Row, least: list[float], stream: int) -> list[float]:
    """Find the least work on a stream of all buckets that hold one of the members from each place on."""
    count = len(row.members)
    found = [0.0] * (count + 1)
    for place in range(count):
        found[place] = min(
            least[stop] + min(option.blocks.work[stream] for option in row.options(start, stop))
            for start in range(place + 1)
            for stop in range(place + 1, count + 1)
        )
    return found


def _at(work: Sequence[Sequence[float]], place: tuple[int, ...]) -> float:
    return sum(row[stop] for row, stop in zip(work, place, strict=True))


def _tail_us(option: Option) -> float:
    return option.tail_us


def _mean_us(sums: Sequence[float], weights: Weights, rest_us: float) -> float:
    return rest_us + sum(weight * sums[stream] for stream, weight in weights)


def _shortest(row: Row, cost: Callable[[Option], float]) -> list[float]:
    """Find for each place the least cost of the buckets after it."""
    count = len(row.members)
    found = [math.inf] * count + [0.0]
    for start in range(count - 1, -1, -1):
        for stop in range(start + 1, count + 1):
            least = min(map(cost, row.options(start, stop)))
            found[start] = min(found[start], least + found[stop])
    return found
