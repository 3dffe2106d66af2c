"""Choose strategies again for the current plan, from the current compression errors.

    solving = Resolve(prices, plan, terms)
    solving.turn()                                      a few ms of work; returns the new plan at the end

A call fits between two steps, so no step waits. First the same buckets get other strategies, which the running step can
adopt at once. Then plans with other buckets are searched, which must save the fraction `WORTH_MOVING` of the step. Both
searches bisect the price of error (µs per element). The result keeps the error budget, even if the current plan does
not.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Content, worth_offering
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.atoms import Atom
from fxcomp.search.descent.cells import Limits, Part, Parts, Strand, Value
from fxcomp.search.descent.engine import Engine, engine_of
from fxcomp.search.descent.plan_search import PRICES, SPENT, Found, PlanSearch, by_value, option_of, pinned_option
from fxcomp.search.descent.problem import NO_BOUNDS, Bounds, Problems
from fxcomp.search.descent.templates import Setting
from fxcomp.search.losses import Losses
from fxcomp.search.pinned import Pinned
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms, questions_of
from fxcomp.search.workload import content_of

WORTH_MOVING = 0.02
"""Fraction of the step time that a plan with other buckets must save, because it needs a new program."""

_ROUNDS = 8  # prices to try
_ROUND = Limits(evaluations=600, options=5, pairs=False, borders=False)
_STARTS, _MOVING_ROUNDS = 3, 6
_MOVE = Limits(evaluations=2500, options=5, pairs=False)
_MOVED = Limits(evaluations=2500, options=4)
_LAST = Limits(evaluations=1200, options=4, borders=False)


@dataclass(frozen=True, slots=True)
class Solved:
    step_us: float
    error: float


class Resolve:
    def __init__(self, prices: StepPrices, plan: Plan, terms: Terms, *, moves: bool = True) -> None:
        self._prices, self._plan, self._terms = prices, plan, terms
        self._moves = moves
        self.before: Solved | None = None
        """Prediction for the current plan; None until priced."""
        self.after: Solved | None = None
        """Prediction for the new plan; None until found."""
        self._turns = self._solve()

    def turn(self) -> Plan | None:
        """Work for a few milliseconds. Return None, or the new plan at the last call; do not call again after it."""
        return next(self._turns)

    def _solve(self) -> Iterator[Plan | None]:
        losses = self._terms.losses(self._prices.workload, self._prices.cluster)
        yield None
        elements = max(1, losses.elements)
        best, plan = yield from self._with_same_buckets(losses)
        if self._moves:
            value, other = yield from self._with_others()
            if value.us < best.us * (1 - WORTH_MOVING):
                best, plan = value, other
        self.after = Solved(best.us, best.lost / elements)
        yield plan

    def _with_same_buckets(self, losses: Losses) -> Generator[None, None, tuple[Value, Plan]]:
        buckets = _Buckets(self._prices, self._plan, self._terms, losses)
        yield None
        value = buckets.engine(NO_BOUNDS).values([buckets.now])[0]
        self.before = Solved(value.us, value.lost / max(1, losses.elements))
        yield None
        engine, lossable = buckets.engine(buckets.bounds), buckets.bounds.lost
        starts = (buckets.now, buckets.plainest)
        found = list(zip(engine.values(starts), starts, strict=True))
        dense_us = found[1][0].us
        value, parts = min(found, key=itemgetter(0))
        saved_us = max(dense_us - value.us, 0.1 * dense_us)
        low, high = (factor * saved_us / max(lossable, _LEAST) for factor in PRICES)
        for _ in range(_ROUNDS):
            price = math.sqrt(low * high)
            parts, _ = engine.improve(parts, _ROUND._replace(price=price))
            value = engine.values([parts])[0]
            low, high = (price, high) if value.lost > SPENT * lossable else (low, price)
            found.append((value, parts))
            yield None
        parts, _ = engine.improve(min(found, key=itemgetter(0))[1], _LAST)
        return engine.values([parts])[0], buckets.plan(parts)

    def _with_others(self) -> Generator[None, None, tuple[Value, Plan]]:
        ends: list[tuple[Value, Plan]] = []
        for question in questions_of(self._prices, self._terms)[:2]:
            search = PlanSearch(question, self._prices)
            yield None
            starts = search.starts(range(len(search.options[0])), _STARTS)
            yield None
            found: list[Found] = []
            for start in starts:
                found.append(search.improved(start.parts, _MOVE))
                yield None
            for each in search.at_prices(min(found, key=by_value), _MOVE, _MOVING_ROUNDS):
                found.append(each)
                yield None
            best = search.improved(min(found, key=by_value).parts, _MOVED)
            yield None
            ends.append((best.value, search.plan(best)))
        return min(ends, key=itemgetter(0))


_LEAST = 1e-9  # elements


class _Kind(NamedTuple):
    """Key of buckets that may have the same strategies."""

    strategies: tuple[Strategy, ...]
    is_pinned: bool
    element_type: ElementType


class _Buckets:
    """Search input: each bucket is a cell, and buckets of a `_Kind` form a strand."""

    def __init__(self, prices: StepPrices, plan: Plan, terms: Terms, losses: Losses) -> None:
        self._plan, self._prices = plan, prices
        workload, cluster = prices.workload, prices.cluster
        limit = terms.limit(workload, cluster)
        lossable = limit * workload.elements
        offload = prices.costs.offloads
        pinned = Pinned.of(terms.pins, workload, cluster, losses, offload=offload)
        self.bounds: Bounds = pinned.bounds(workload, lossable, terms.bursts)
        left = 0.0 if pinned.exceeds(lossable) else limit
        offered = {each: terms.strategies(left, losses, cluster, each, offload=offload) for each in Content}
        numbers = {gradient.name: number for number, gradient in enumerate(workload.gradients)}
        members = [
            sorted(
                (
                    Atom(numbers[name], extent, workload.gradients[numbers[name]])
                    for name, extent in zip(bucket.names, bucket.extents, strict=True)
                ),
                key=_place_of,
            )
            for bucket in plan.buckets
        ]
        order = {place: k for k, place in enumerate(sorted(_place_of(atom) for each in members for atom in each))}
        by_kind: dict[_Kind, list[int]] = {}
        for number, bucket in enumerate(plan.buckets):
            strand = pinned.strand_of.get(bucket.names[0])
            kind = bucket.element_type
            content = content_of([atom.gradient for atom in members[number]])
            found = strand.strategies if strand else worth_offering(offered[content], kind, cluster, offload=offload)
            by_kind.setdefault(_Kind(found, strand is not None, kind), []).append(number)
        self._numbers = [sorted(each, key=lambda k: order[_place_of(members[k][-1])]) for each in by_kind.values()]
        self._strategies = [
            list(dict.fromkeys((*kind.strategies, *(plan.buckets[k].strategy for k in each))))
            for kind, each in zip(by_kind, self._numbers, strict=True)
        ]
        strands = [_strand_of([members[k] for k in each], order) for each in self._numbers]
        options = [
            [(pinned_option if kind.is_pinned else option_of)(each, cluster) for each in found]
            for kind, found in zip(by_kind, self._strategies, strict=True)
        ]
        self._problems = Problems(losses, strands, options, Setting.of(prices))
        places = [
            (max(order[_place_of(atom)] for atom in members[k]), strand, cell)
            for strand, each in enumerate(self._numbers)
            for cell, k in enumerate(each)
        ]
        self._cells = [(strand, cell) for _, strand, cell in sorted(places)]

    def engine(self, bounds: Bounds) -> Engine:
        return engine_of(self._problems.at(self._prices, bounds), self.plan, self._prices)

    @property
    def now(self) -> Parts:
        return tuple(
            Part(strand, cell, cell + 1, self._strategies[strand].index(self._bucket(strand, cell).strategy))
            for strand, cell in self._cells
        )

    @property
    def plainest(self) -> Parts:
        """Each bucket's first strategy: dense, unless pinned."""
        return tuple(Part(strand, cell, cell + 1, 0) for strand, cell in self._cells)

    def plan(self, parts: Parts) -> Plan:
        found = {self._numbers[part.strand][part.start]: self._strategies[part.strand][part.option] for part in parts}
        return self._plan.with_strategies([found[number] for number in range(len(self._plan.buckets))])

    def _bucket(self, strand: int, cell: int) -> Bucket:
        return self._plan.buckets[self._numbers[strand][cell]]


def _place_of(atom: Atom) -> tuple[int, int]:
    return atom.number, atom.extent.start


def _strand_of(cells: list[list[Atom]], order: dict[tuple[int, int], int]) -> Strand:
    atoms = [atom for cell in cells for atom in cell]
    borders = accumulate(map(len, cells), initial=0)
    return Strand(tuple(atoms), tuple(order[_place_of(atom)] for atom in atoms), tuple(borders))
