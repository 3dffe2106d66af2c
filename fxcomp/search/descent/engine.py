"""Price and improve plans in C++; without built kernels, only simulate them."""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import chain, islice, pairwise
from typing import Protocol

from fxcomp.compressors import kernels
from fxcomp.plan.plan import Plan
from fxcomp.search.descent.cells import Limits, Part, Parts, Value
from fxcomp.search.descent.problem import BURSTY, Problem
from fxcomp.search.plan_tasks import StepPrices


class Engine(Protocol):
    def values(self, plans: Sequence[Parts]) -> list[Value]:
        """Predict step time and error of plans."""
        ...

    def with_options(self, plan: Parts, options: Sequence[tuple[int, ...]]) -> list[Value]:
        """Price a plan with each entry of `options`. An entry has one option per strand."""
        ...

    def others(self, plan: Parts) -> list[list[Value]]:
        """For each bucket, price the plan with each option in that bucket."""
        ...

    def improve(self, plan: Parts, limits: Limits) -> tuple[Parts, int]:
        """Change a plan until no change helps; return the new plan and the number of simulated plans."""
        ...


class _EngineLimits(ctypes.Structure):
    _fields_ = (
        ("evaluations", ctypes.c_int64),
        ("options", ctypes.c_int32),
        ("apart", ctypes.c_int32),
        ("dense_only", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("borders", ctypes.c_int32),
        ("price", ctypes.c_double),
    )


class Compiled:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem  # keeps alive the arrays that C++ reads
        self._columns = problem.for_kernels
        opened = kernels.function("fxcomp_search_open", ctypes.c_void_p)(ctypes.byref(self._columns))
        self._search = ctypes.c_void_p(opened)
        self._cells = problem.strand_cells[-1]
        self._options = [end - start for start, end in pairwise(problem.strand_options)]
        weakref.finalize(self, kernels.function("fxcomp_search_close", None), self._search)

    def with_options(self, plan: Parts, options: Sequence[tuple[int, ...]]) -> list[Value]:
        parts, chosen = array("i", chain.from_iterable(plan)), array("i", chain.from_iterable(options))
        found = array("d", bytes(16 * len(options)))
        count, times = ctypes.c_int32(len(plan)), ctypes.c_int32(len(options))
        evaluate = kernels.function("fxcomp_search_with_options", None)
        evaluate(self._search, count, _address(parts), times, _address(chosen), _address(found))
        return _values(found)

    def values(self, plans: Sequence[Parts]) -> list[Value]:
        counts = array("i", map(len, plans))
        parts = array("i", chain.from_iterable(chain.from_iterable(plans)))
        found = array("d", bytes(16 * len(plans)))
        evaluate = kernels.function("fxcomp_search_evaluate", None)
        evaluate(self._search, ctypes.c_int32(len(plans)), _address(counts), _address(parts), _address(found))
        return _values(found)

    def others(self, plan: Parts) -> list[list[Value]]:
        parts, counts = array("i", chain.from_iterable(plan)), [self._options[part.strand] for part in plan]
        found = array("d", bytes(16 * sum(counts)))
        evaluate = kernels.function("fxcomp_search_others", None)
        evaluate(self._search, ctypes.c_int32(len(plan)), _address(parts), _address(found))
        values = iter(_values(found))
        return [list(islice(values, count)) for count in counts]

    def improve(self, plan: Parts, limits: Limits) -> tuple[Parts, int]:
        room = array("i", [*chain.from_iterable(plan), *[0] * (4 * (self._cells + 1 - len(plan)))])
        asked, evaluations = _EngineLimits(*limits), ctypes.c_int64()
        improve = kernels.function("fxcomp_search_improve", ctypes.c_int32)
        size = improve(
            self._search, ctypes.c_int32(len(plan)), _address(room), ctypes.byref(asked), ctypes.byref(evaluations)
        )
        return tuple(Part(*room[4 * k : 4 * k + 4]) for k in range(size)), evaluations.value


class Simulated:
    """Engine without built kernels: simulates plans, and improves none."""

    def __init__(self, problem: Problem, plan_of: Callable[[Parts], Plan], prices: StepPrices) -> None:
        self._problem, self._plan_of, self._prices = problem, plan_of, prices
        self._options = [end - start for start, end in pairwise(problem.strand_options)]
        self._known: dict[Parts, Value] = {}

    def values(self, plans: Sequence[Parts]) -> list[Value]:
        return [self._value(parts) for parts in plans]

    def with_options(self, plan: Parts, options: Sequence[tuple[int, ...]]) -> list[Value]:
        return self.values([tuple(part._replace(option=each[part.strand]) for part in plan) for each in options])

    def others(self, plan: Parts) -> list[list[Value]]:
        """Return infinite times and errors, because simulating the plans would take minutes."""
        return [[Value(math.inf, math.inf)] * self._options[part.strand] for part in plan]

    def improve(self, plan: Parts, limits: Limits) -> tuple[Parts, int]:
        del limits
        return plan, 0

    def _value(self, parts: Parts) -> Value:
        value = self._known.get(parts)
        if value is None:
            lost, bursting = sum(map(self._lost, parts)), sum(map(self._bursting, parts))
            is_allowed = lost <= self._problem.lossable and bursting <= self._problem.bursty
            us = self._prices.step_us(self._plan_of(parts)) if is_allowed else math.inf
            value = self._known[parts] = Value(us, lost)
        return value

    def _lost(self, part: Part) -> float:
        """Return a bucket's error, in elements; infinite if the bucket is too large for the compressor."""
        p, option = self._problem, self._problem.strand_options[part.strand] + part.option
        reach = p.option_reach[option]
        if reach >= 0 and part.stop > p.reach[reach + part.start]:
            return math.inf
        return p.lost(part)

    def _bursting(self, part: Part) -> float:
        p, row = self._problem, self._problem.strand_cells[part.strand] + part.strand
        if not p.option_traits[p.strand_options[part.strand] + part.option] & BURSTY:
            return 0.0
        return p.sums[(row + part.stop) * p.features] - p.sums[(row + part.start) * p.features]


def engine_of(problem: Problem, plan_of: Callable[[Parts], Plan], prices: StepPrices) -> Engine:
    return Compiled(problem) if kernels.available() else Simulated(problem, plan_of, prices)


def search_notes() -> tuple[str, ...]:
    if kernels.available():
        return ()
    return (
        "The search is not built: only plans of one strategy everywhere were compared, in buckets of a few sizes."
        " Install fxcomp where a C++ compiler is found.",
    )


def _values(found: array[float]) -> list[Value]:
    return [Value(us, lost) for us, lost in zip(found[::2], found[1::2], strict=True)]


def _address(column: array[int] | array[float]) -> ctypes.c_void_p:
    return ctypes.c_void_p(column.buffer_info()[0])
