"""Effort of a search, kicks out of local minima, and starts that use up an error limit (spent starts).

A kick is a change that no descent step makes. A dynamic program finds the spent starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fxcomp.plan.kinds import Stream
from fxcomp.search.descent.cells import Limits, Part, Parts, Strand
from fxcomp.search.descent.problem import BURSTY, PLACE, Problem


class Effort(NamedTuple):
    starts: int
    first: Limits
    improved: int
    """Number of results to improve further, two changes at a time."""
    then: Limits
    in_full: Limits
    """Limits of descents that move single atoms (`search/atoms.py`). They begin at the best result and the first
    `improved` starts.
    """
    kicked: Limits
    rounds: int
    tails: int
    """Number of options that kicks try for a part cut off the last bucket."""
    prices: int


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
"""Smaller effort for ranks that share processors. A simulation then takes ten times as long."""

QUICK = Limits(evaluations=300, pairs=False)

_KICKED_SHARES = (1 / 16, 1 / 5, 1 / 2)


def kicks(parts: Parts, strands: Sequence[Strand], tails: Sequence[int]) -> list[Parts]:
    """Return plans with one kick each: halve all buckets, merge pairs of buckets, cut the first or last bucket."""

    def ordered(found: Iterable[Part]) -> Parts:
        return tuple(sorted(found, key=lambda part: strands[part.strand].last(part.stop - 1)))

    def halves(part: Part) -> tuple[Part, ...]:
        middle = (part.start + part.stop) // 2
        return (part._replace(stop=middle), part._replace(start=middle)) if middle > part.start else (part,)

    by_strand = [[part for part in parts if part.strand == strand] for strand in range(len(strands))]
    found = [
        ordered(half for part in parts for half in halves(part)),
        ordered(
            pair[-1]._replace(start=pair[0].start)
            for each in by_strand
            for pair in (each[k : k + 2] for k in range(0, len(each), 2))
        ),
    ]
    if not by_strand[0]:
        return found
    last, first = by_strand[0][-1], by_strand[0][0]
    rest_of_last, rest_of_first = ([part for part in parts if part != one] for one in (last, first))
    for share in _KICKED_SHARES:
        cut = last.stop - max(1, int((last.stop - last.start) * share))
        if cut > last.start:
            for option in tails:
                found.append(ordered([*rest_of_last, last._replace(stop=cut), last._replace(start=cut, option=option)]))
        cut = first.start + max(1, int((first.stop - first.start) * share))
        if cut < first.stop:
            found.append(ordered([*rest_of_first, first._replace(stop=cut), first._replace(start=cut)]))
    return [each for each in dict.fromkeys(found) if each != parts]


GRID = 128
"""Number of error levels from 0 to the limit."""

MOST_CELLS = 20
"""Maximum number of cells in the dynamic program; more cells are merged."""

Numbers = Any


def spent_starts(p: Problem, others: Parts) -> Iterator[Parts]:
    """Yield starts with new borders and options of the first strand; `others` gives the other strands' buckets.

        end(j, e) = min over i < j, option o of   max(end(i, e - lost(i, j, o)), ready(j)) + time(i, j, o)

    end(j, e) is the time at which one queue finishes the buckets of cells before j, with total error at most e. The
    first start omits the compute stream's time. A descent may miss these starts, because each change must keep the
    limit.
    """
    first, cells = p.strand_options[0], p.strand_cells[1]
    rest = [part for part in others if part.strand > 0]
    limit = p.lossable - sum(map(p.lost, rest))
    if not cells or not 0 < limit < 1e300:
        return
    borders: Numbers = np.unique(np.linspace(0, cells, min(cells, MOST_CELLS) + 1).round().astype(np.int64))
    starts, stops = np.triu_indices(len(borders), 1)
    offered = [
        option
        for option in range(p.strand_options[1] - first)
        if math.isinf(p.bursty) or not p.option_traits[first + option] & BURSTY
    ]
    if not offered:
        return
    wire_us, compute_us, lost = _prices(p, borders[starts], borders[stops], offered)
    ready_us: Numbers = _array(p.ready_us)[borders[1:] - 1]
    for times in (wire_us, wire_us + compute_us):
        table = _SpentTable((starts, stops), times, lost / limit, ready_us)
        found = table.within_limit()
        made = [Part(0, int(borders[i]), int(borders[j]), offered[option]) for i, j, option in found]
        if made:
            yield tuple(sorted([*made, *rest], key=lambda part: p.last[p.strand_cells[part.strand] + part.stop - 1]))


class _SpentTable:
    def __init__(self, pairs: tuple[Numbers, Numbers], times: Numbers, shares: Numbers, ready_us: Numbers) -> None:
        steps = np.rint(np.clip(shares, 0.0, 2.0) * GRID).astype(np.int64)
        order = np.lexsort((times, steps), axis=1)
        times, steps, shares = (np.take_along_axis(each, order, axis=1) for each in (times, steps, shares))
        earliest = np.minimum.accumulate(times, axis=1)
        is_best = np.concatenate([np.ones((len(times), 1), dtype=bool), times[:, 1:] < earliest[:, :-1]], axis=1)
        pair, place = np.nonzero(is_best & (steps <= GRID))
        self.start, self.stop, self.option = pairs[0][pair], pairs[1][pair], order[pair, place]
        self.us, self.steps, self.share = times[pair, place], steps[pair, place], shares[pair, place]
        self.count = len(ready_us)
        self.chosen: list[Numbers] = [np.zeros(0, dtype=np.int64)]
        ends: Numbers = np.full((self.count + 1, GRID + 1), np.inf)
        ends[0] = 0.0
        for stop in range(1, self.count + 1):
            these = np.flatnonzero(self.stop == stop)
            before = np.arange(GRID + 1) - self.steps[these, None]
            end = np.maximum(ends[self.start[these, None], np.maximum(before, 0)], ready_us[stop - 1])
            end = np.where(before >= 0, end + self.us[these, None], np.inf)
            best = end.argmin(axis=0) if len(these) else np.zeros(GRID + 1, dtype=np.int64)
            ends[stop] = end[best, np.arange(GRID + 1)] if len(these) else np.inf
            self.chosen.append(these[best] if len(these) else best)
        self.ends = ends

    def within_limit(self) -> list[tuple[int, int, int]]:
        """List the buckets (start, stop, option) of the fastest plan whose exact error is within the limit."""
        for left in range(GRID, -1, -1):
            found = self._behind(left)
            if found and sum(self.share[each] for each in found) <= 1.0:
                return [(int(self.start[k]), int(self.stop[k]), int(self.option[k])) for k in found]
        return []

    def _behind(self, left: int) -> list[int]:
        stop = self.count
        found: list[int] = []
        while stop > 0 and np.isfinite(self.ends[stop, left]):
            bucket = int(self.chosen[stop][left])
            found.append(bucket)
            stop, left = int(self.start[bucket]), left - int(self.steps[bucket])
        return [] if stop else found


def _prices(p: Problem, starts: Numbers, stops: Numbers, offered: list[int]) -> tuple[Numbers, Numbers, Numbers]:
    """Return time on all other streams and on the compute stream, in µs, and error, of the bucket between each pair of
    borders. Shapes: [pairs, options].
    """
    sums = _array(p.sums).reshape(-1, p.features)
    sizes, values, slopes = map(_array, (p.sizes, p.values, p.slopes))
    features = sums[stops] - sums[starts]
    shape = len(starts), len(offered)
    wire_us, compute_us, lost = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    losses = _array(p.losses)[: (p.strand_cells[1] + 1) * p.strand_options[1]].reshape(-1, p.strand_options[1])
    known: dict[int, tuple[Numbers, Numbers]] = {}
    search: Any = np.searchsorted
    for column, option in enumerate(offered):
        pattern = p.option_template[option]
        if pattern not in known:
            wire: Numbers = np.zeros(len(starts))
            compute: Numbers = np.zeros(len(starts))
            for task in range(p.template_tasks[pattern], p.template_tasks[pattern + 1]):
                into = compute if p.task_stream[task] == PLACE[Stream.COMPUTE] else wire
                for term in range(p.task_terms[task], p.task_terms[task + 1]):
                    size = p.term_factor[term] * features[:, p.term_feature[term]] + p.term_more[term]
                    low, high = p.curve_points[p.term_curve[term]], p.curve_points[p.term_curve[term] + 1]
                    at = low + search(sizes[low:high], size, side="right") - 1
                    into += values[at] + (size - sizes[at]) * slopes[at]
            known[pattern] = wire, compute
        wire_us[:, column], compute_us[:, column] = known[pattern]
        lost[:, column] = losses[stops, option] - losses[starts, option]
        reach = p.option_reach[option]
        if reach >= 0:
            lost[stops > _array(p.reach)[reach + starts], column] = np.inf
    return wire_us, compute_us, lost


def _array(column: Any) -> Numbers:
    return np.frombuffer(column, dtype=np.float64 if column.typecode == "d" else np.int32)
