"""Input of the search in arrays that csrc/search.cpp reads in place.

The entries of strands, templates, tasks and curves are concatenated, with arrays of start indices. csrc/priced_parts.h
has the same fields in the same order.
"""

from __future__ import annotations

import ctypes
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise

from fxcomp.cost.contention import NO_TIME_US
from fxcomp.cost.piecewise import Curve
from fxcomp.plan.kinds import Stream
from fxcomp.plan.prices import PriceQuestion
from fxcomp.plan.strategy import Strategy
from fxcomp.search.descent.cells import Part, Strand, reaches
from fxcomp.search.descent.templates import ELEMENTS, Setting, TaskTemplate, template_of
from fxcomp.search.losses import Losses
from fxcomp.search.plan_tasks import StepPrices

NOTHING = -3
"""Arrival task of a template whose update waits for no task."""

DENSE, BURSTY = 1, 2
"""Traits of an option. DENSE: a dense or pinned strategy, allowed in dense plans."""

_MOST = sys.float_info.max
"""Largest error limit. It is finite, because a bucket too large for its compressor has an infinite error."""

PLACE = {stream: place for place, stream in enumerate(Stream)}


@dataclass(frozen=True, slots=True)
class Option:
    """A strategy that a strand's buckets may have."""

    strategy: Strategy
    is_bursty: bool
    is_pinned: bool = False
    """True if the user pinned the strand's gradients to this strategy. Dense plans keep it too."""

    @property
    def traits(self) -> int:
        may_be_in_dense_plans = self.strategy.is_dense or self.is_pinned
        return (DENSE if may_be_in_dense_plans else 0) | (BURSTY if self.is_bursty else 0)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a plan's error, and of the elements with bursty strategies (rare large values), both in elements."""

    lost: float = math.inf
    bursting: float = math.inf


NO_BOUNDS = Bounds()


@dataclass(frozen=True)
class Problem:
    strand_cells: array[int]
    last: array[int]
    """Per cell: index of its last gradient."""
    ready_us: array[float]
    sums: array[float]
    """Prefix sums of the features over cells; a strand has one more row than cells. The first feature is `ELEMENTS`."""
    updates_us: array[float]
    join_last: array[int]
    """Per cell: last cell of the gradient that the cell continues; -1 if the cell starts with a new gradient."""
    join_us: array[float]
    strand_options: array[int]
    option_template: array[int]
    strand_losses: array[int]
    losses: array[float]
    """Prefix sums of each option's error over cells, in elements; a strand has one more row than cells."""
    option_traits: array[int]
    option_reach: array[int]
    """Index of an option's entries in `reach`; -1 without a limit."""
    reach: array[int]
    """Per option and cell: largest `stop` of a bucket that starts at the cell."""
    template_tasks: array[int]
    template_stages: array[int]
    stage_tasks: array[int]
    """Number of tasks per stage; a template's final tasks follow its stages."""
    template_arrival: array[int]
    task_stream: array[int]
    task_load: array[float]
    task_collective: array[int]
    """Index of the first of three curves: a collective's time, processor time, and time during compute; -1 for other
    tasks.
    """
    task_follows: array[int]
    follows: array[int]
    task_terms: array[int]
    term_curve: array[int]
    term_factor: array[float]
    term_more: array[float]
    term_feature: array[int]
    curve_points: array[int]
    sizes: array[float]
    values: array[float]
    slopes: array[float]
    backward_us: float
    finish_us: float
    buffers_us: float
    broadcast_us: float
    broadcast_ready_us: float
    broadcast_load: float
    broadcast_beside: float
    lossable: float
    bursty: float
    processors: float
    compute: float
    strands: int
    features: int
    updates_wait: int
    commits: int
    broadcast_stream: int
    """Index of the stream that broadcasts buffers; -1 if none."""
    shares: int
    """True if tasks that overlap may need more processors than the machine has."""
    has_spare: int

    @cached_property
    def unrounded(self) -> Problem:
        """Problem without the extra sizes from rounding shards up."""
        return replace(self, term_more=_floats([0.0] * len(self.term_more)))

    @cached_property
    def rounded_us(self) -> dict[tuple[int, int], float]:
        """Upper bound of the time that rounding shards up adds to a bucket's tasks, in µs, by strand and option."""
        found: dict[tuple[int, int], float] = {}
        for strand, (first, end) in enumerate(pairwise(self.strand_options)):
            for option in range(first, end):
                tasks = self.template_tasks[self.option_template[option] :][:2]
                terms = range(*(self.task_terms[task] for task in tasks))
                found[strand, option - first] = sum(map(self._rounded_us, terms))
        return found

    def _rounded_us(self, term: int) -> float:
        curve, more = self.term_curve[term], self.term_more[term]
        points = slice(*self.curve_points[curve : curve + 2])
        return more * max(self.slopes[points]) if more else 0.0

    def lost(self, part: Part) -> float:
        first = self.strand_losses[part.strand] + part.option
        width = self.strand_options[part.strand + 1] - self.strand_options[part.strand]
        return self.losses[first + part.stop * width] - self.losses[first + part.start * width]

    @cached_property
    def for_kernels(self) -> ctypes.Structure:
        made = _ProblemColumns()
        for each in fields(self):
            value = getattr(self, each.name)
            setattr(made, each.name, value.buffer_info()[0] if isinstance(value, array) else value)
        return made


_C_TYPES = {
    "array[int]": ctypes.c_void_p,
    "array[float]": ctypes.c_void_p,
    "float": ctypes.c_double,
    "int": ctypes.c_int32,
}


class _ProblemColumns(ctypes.Structure):
    _fields_ = tuple((each.name, _C_TYPES[str(each.type)]) for each in fields(Problem))


class Problems:
    def __init__(
        self, losses: Losses, strands: Sequence[Strand], options: Sequence[Sequence[Option]], setting: Setting
    ) -> None:
        self.strands, self.options = strands, options
        self.losses = [
            losses.sums(strand.atoms, strand.borders, [option.strategy for option in offered])
            for strand, offered in zip(strands, options, strict=True)
        ]
        settings = [replace(setting, element_type=strand.element_type) for strand in strands]
        found = [
            [template_of(option.strategy, each) for option in offered]
            for offered, each in zip(options, settings, strict=True)
        ]
        self.templates = list(dict.fromkeys(template for each in found for template in each))
        numbers = {template: number for number, template in enumerate(self.templates)}
        self.numbers = [[numbers[template] for template in each] for each in found]
        terms = [term for template in self.templates for task in template.tasks for term in task.terms]
        self.features = list(dict.fromkeys([ELEMENTS, *(term.feature for term in terms)]))
        ranks = setting.cluster.world_size
        self.sums = [strand.sums(self.features, ranks) for strand in strands]
        self.reaches = [
            reach
            for strand, templates in zip(strands, found, strict=True)
            for reach in reaches(templates, strand, ranks)
        ]

    def at(self, prices: StepPrices, bounds: Bounds) -> Problem:
        curves = _Curves(prices, self._largest())
        tasks = [task for template in self.templates for task in template.tasks]
        terms = [term for task in tasks for term in task.terms]
        term_curves = [curves.numbers[term.question] for term in terms]
        starts_of_terms = _starts(len(task.terms) for task in tasks)
        collectives = [
            term_curves[start] if task.is_collective else -1
            for task, start in zip(tasks, starts_of_terms, strict=False)
        ]
        place = {feature: number for number, feature in enumerate(self.features)}
        flat = [option for each in self.options for option in each]
        workload, processors, broadcast = prices.workload, prices.costs.processors, prices.broadcast
        joins = [strand.continued() for strand in self.strands]
        return Problem(
            strand_cells=_starts(strand.cells for strand in self.strands),
            last=_ints(strand.last(cell) for strand in self.strands for cell in range(strand.cells)),
            ready_us=_floats(strand.ready_us(cell) for strand in self.strands for cell in range(strand.cells)),
            sums=_floats(size for sums in self.sums for row in zip(*sums, strict=True) for size in row),
            updates_us=_floats(us for strand in self.strands for us in strand.updates_us()),
            join_last=_ints(cell for cells, _ in joins for cell in cells),
            join_us=_floats(prices.costs.pack_us(size) for _, sizes in joins for size in sizes),
            strand_options=_starts(map(len, self.options)),
            option_template=_ints(number for each in self.numbers for number in each),
            strand_losses=_starts(sums.size for sums in self.losses),
            losses=array("d", b"".join(sums.tobytes() for sums in self.losses)),
            option_traits=_ints(option.traits for option in flat),
            option_reach=_places(self.reaches),
            reach=_ints(stop for stops in self.reaches if stops for stop in stops),
            template_tasks=_starts(len(template.tasks) for template in self.templates),
            template_stages=_starts(len(template.stages) for template in self.templates),
            stage_tasks=_ints(len(stage) for template in self.templates for stage in template.stages),
            template_arrival=_ints(next(iter(template.arrival), NOTHING) for template in self.templates),
            task_stream=_ints(PLACE[task.stream] for task in tasks),
            task_load=_floats(task.load for task in tasks),
            task_collective=_ints(collectives),
            task_follows=_starts(len(task.after) for task in tasks),
            follows=_ints(number for task in tasks for number in task.after),
            task_terms=starts_of_terms,
            term_curve=_ints(term_curves),
            term_factor=_floats(term.factor for term in terms),
            term_more=_floats(term.more for term in terms),
            term_feature=_ints(place[term.feature] for term in terms),
            curve_points=_starts(len(curve.sizes) for curve in curves.found),
            sizes=_floats(size for curve in curves.found for size in curve.sizes),
            values=_floats(us for curve in curves.found for us in curve.values),
            slopes=_floats(slope for curve in curves.found for slope in curve.slopes),
            backward_us=workload.backward_us,
            finish_us=workload.finish_us,
            buffers_us=workload.buffers_us,
            broadcast_us=broadcast.duration_us if broadcast else 0.0,
            broadcast_ready_us=workload.broadcast_ready_us,
            broadcast_load=broadcast.load if broadcast else 0.0,
            broadcast_beside=broadcast.overlap_speed if broadcast and not processors.has_spare else 1.0,
            lossable=min(float(bounds.lost), _MOST),
            bursty=float(bounds.bursting),
            processors=float(processors.count),
            compute=float(processors.compute),
            strands=len(self.strands),
            features=len(self.features),
            updates_wait=int(workload.updates_wait),
            commits=int(workload.commits),
            broadcast_stream=PLACE[broadcast.stream] if broadcast else -1,
            # Only then do collectives have curves of processor time, which csrc/priced_parts.h reads.
            shares=int(
                not math.isinf(processors.count)
                and (curves.may_lack_processors(tasks) or (broadcast is not None and broadcast.load > 0))
            ),
            has_spare=int(processors.has_spare),
        )

    def _largest(self) -> dict[PriceQuestion, float]:
        totals = {feature: sum(sums[number][-1] for sums in self.sums) for number, feature in enumerate(self.features)}
        found: dict[PriceQuestion, float] = {}
        for template in self.templates:
            for task in template.tasks:
                for term in task.terms:
                    size = max(1.0, term.factor * totals[term.feature] + term.more)
                    found[term.question] = max(size, found.get(term.question, 0.0))
        return found


class _Curves:
    def __init__(self, prices: StepPrices, largest: Mapping[PriceQuestion, float]) -> None:
        self.processors = prices.costs.processors
        self.found: list[Curve] = []
        self.numbers: dict[PriceQuestion, int] = {}
        for question, size in largest.items():
            self.numbers[question] = len(self.found)
            self.found += prices.curves(question, size)

    def may_lack_processors(self, tasks: Iterable[TaskTemplate]) -> bool:
        """Return whether tasks that overlap, one per stream, may need more processors than the machine has."""
        processors = self.processors
        if math.isinf(processors.count) or not processors.has_spare:
            return not math.isinf(processors.count)
        loads = dict.fromkeys(Stream, 0.0)
        for task in tasks:
            load = self._most_load(task.terms[0].question) if task.is_collective else task.load
            loads[task.stream] = max(loads[task.stream], load)
        loads[Stream.COMPUTE] = processors.compute
        return sum(loads.values()) > processors.count

    def _most_load(self, question: PriceQuestion) -> float:
        number = self.numbers[question]
        took, worked = self.found[number], self.found[number + 1]
        sizes = {*took.sizes, *worked.sizes}
        return max((worked.at(size) / took.at(size) for size in sizes if took.at(size) >= NO_TIME_US), default=0.0)


def _ints(numbers: Iterable[int]) -> array[int]:
    return array("i", numbers)


def _floats(numbers: Iterable[float]) -> array[float]:
    return array("d", numbers)


def _starts(counts: Iterable[int]) -> array[int]:
    return array("i", [0, *accumulate(counts)])


def _places(lists: Iterable[list[int] | None]) -> array[int]:
    """Return each list's start in their concatenation; -1 for None."""
    found, count = array("i"), 0
    for each in lists:
        found.append(count if each else -1)
        count += len(each or ())
    return found
