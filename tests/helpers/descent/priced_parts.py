"""Price buckets from a problem's numbers, each once; csrc/priced_parts.h does the same."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from fxcomp.cost.contention import NO_TIME_US
from fxcomp.plan.kinds import Stream
from fxcomp.search.descent.cells import Part
from fxcomp.search.descent.problem import BURSTY, PLACE, Problem


class Record(NamedTuple):
    """A bucket's tasks with prices, in its template's order."""

    pattern: int
    """The template's number."""
    last: int
    ready_us: float
    us: list[float]
    demand: list[float]
    beside: list[float]
    update_us: float
    compute_us: float
    """The time that it occupies compute, with its update."""
    inter_us: float
    intra_us: float
    lost: float
    bursting: float


class PricedParts:
    """The buckets that were priced."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.known: dict[Part, Record] = {}

    def of(self, part: Part) -> Record:
        record = self.known.get(part)
        if record is None:
            record = self.known[part] = self._price(part)
        return record

    def _at(self, curve: int, size: float) -> float:
        p = self.p
        number = bisect_right(p.sizes, size, p.curve_points[curve], p.curve_points[curve + 1]) - 1
        return p.values[number] + (size - p.sizes[number]) * p.slopes[number]

    def _price(self, part: Part) -> Record:
        p = self.p
        option = p.strand_options[part.strand] + part.option
        pattern = p.option_template[option]
        first_cell, row = p.strand_cells[part.strand], p.strand_cells[part.strand] + part.strand
        before, after = (row + part.start) * p.features, (row + part.stop) * p.features
        us: list[float] = []
        demands: list[float] = []
        besides: list[float] = []
        busy = [0.0] * len(PLACE)
        for task in range(p.template_tasks[pattern], p.template_tasks[pattern + 1]):
            took = size = 0.0
            for term in range(p.task_terms[task], p.task_terms[task + 1]):
                feature = p.term_feature[term]
                size = p.term_factor[term] * (p.sums[after + feature] - p.sums[before + feature]) + p.term_more[term]
                took += self._at(p.term_curve[term], size)
            load, beside, curve = p.task_load[task], 1.0, p.task_collective[task]
            if p.shares and curve >= 0 and took >= NO_TIME_US:
                load = self._at(curve + 1, size) / took
                if not p.has_spare:
                    beside = min(1.0, took / self._at(curve + 2, size))
            stream = p.task_stream[task]
            us.append(took)
            demands.append(p.compute if stream == PLACE[Stream.COMPUTE] else min(load, p.processors))
            besides.append(beside)
            busy[stream] += took
        update_us = p.updates_us[row + part.stop] - p.updates_us[row + part.start]
        if part.start <= p.join_last[first_cell + part.start] < part.stop:
            update_us += p.join_us[first_cell + part.start]
        elements = p.sums[after] - p.sums[before]
        first, width = (
            p.strand_losses[part.strand] + part.option,
            p.strand_options[part.strand + 1] - p.strand_options[part.strand],
        )
        lost = p.losses[first + part.stop * width] - p.losses[first + part.start * width]
        reach = p.option_reach[option]
        is_carried = reach < 0 or part.stop <= p.reach[reach + part.start]
        return Record(
            pattern=pattern,
            last=p.last[first_cell + part.stop - 1],
            ready_us=p.ready_us[first_cell + part.stop - 1],
            us=us,
            demand=demands,
            beside=besides,
            update_us=update_us,
            compute_us=busy[PLACE[Stream.COMPUTE]] + update_us,
            inter_us=busy[PLACE[Stream.INTER]],
            intra_us=busy[PLACE[Stream.INTRA]],
            lost=lost if is_carried else math.inf,
            bursting=elements if p.option_traits[option] & BURSTY else 0.0,
        )
