"""Improve a plan by changing one bucket at a time, the last one first, and then two.

A change gives a bucket another option, splits it, joins it with the next one of its strand, or moves the border between
them. The best options of a bucket by themselves are tried together with another change, too. csrc/search.cpp does the
same, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fxcomp.search.descent.cells import SAME, Limits, Part, Parts, Value
from fxcomp.search.descent.problem import DENSE, Problem
from helpers.descent.plan_clock import PlanClock
from helpers.descent.priced_parts import PricedParts, Record

_WORTH_A_ROUND = 1e-4  # relative: a round that gains less is the last
_CUTS = 6  # even parts that a bucket is split into, and near its ends
_BORDERS = (-4, -2, -1, 1, 2, 4)  # cells by which a border is moved

_NEVER = Value(math.inf, math.inf)


class _Bucket(NamedTuple):
    part: Part
    record: Record


_Plan = list[_Bucket]


class Descent:
    """The search in Python."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.parts, self.clock = PricedParts(problem), PlanClock(problem)
        self.evaluations = 0
        self.limits = Limits()
        self.price = 0.0
        """Of an element's loss, while a plan is improved."""
        self.plan: _Plan = []
        self.value = _NEVER
        self.base: _Plan = []
        """The plan whose neighbours are tried."""

    def values(self, plans: Sequence[Parts]) -> list[Value]:
        return [self._value(self._bound(plan), _NEVER) for plan in plans]

    def with_options(self, plan: Parts, options: Sequence[tuple[int, ...]]) -> list[Value]:
        return self.values([tuple(part._replace(option=each[part.strand]) for part in plan) for each in options])

    def others(self, plan: Parts) -> list[list[Value]]:
        starts = self.p.strand_options
        return [
            self.values(
                [
                    (*plan[:k], part._replace(option=option), *plan[k + 1 :])
                    for option in range(starts[part.strand + 1] - starts[part.strand])
                ]
            )
            for k, part in enumerate(plan)
        ]

    def improve(self, plan: Parts, limits: Limits) -> tuple[Parts, int]:
        self.limits = limits._replace(evaluations=limits.evaluations + self.evaluations)
        self.price = limits.price
        self.plan = self._bound(plan)
        self.value = self._value(self.plan, _NEVER)
        while self.evaluations < self.limits.evaluations:
            before_us = self.value.us
            self._round()
            if self.value.us < before_us * (1 - _WORTH_A_ROUND):
                continue
            if not limits.pairs:
                break
            before_us = self.value.us
            self._pairs()
            if self.value.us >= before_us * (1 - _WORTH_A_ROUND):
                break
        self.price = 0.0
        return tuple(bucket.part for bucket in self.plan), self.evaluations

    def _bound(self, plan: Parts) -> _Plan:
        return [self._bucket(part) for part in plan]

    def _bucket(self, part: Part) -> _Bucket:
        return _Bucket(part, self.parts.of(part))

    def _value(self, plan: _Plan, best: Value) -> Value:
        """Return a plan's value if it beats `best`, else one that does not. Its time has its loss's price in it."""
        p = self.p
        lost = bursting = inter = intra = 0.0
        compute = p.backward_us + p.finish_us
        for _, record in plan:
            lost += record.lost
            bursting += record.bursting
            compute += record.compute_us
            inter += record.inter_us
            intra += record.intra_us
        if lost > p.lossable or bursting > p.bursty:
            return Value(math.inf, lost)
        paid_us = self.price * lost
        wires = plan[0].record.ready_us + max(inter, intra) if plan else 0.0
        us = max(compute, wires) + paid_us
        if us > best.us * (1 + SAME):
            return Value(us, lost)
        self.evaluations += 1
        records = [record for _, record in plan]
        if p.shares:
            us = self.clock.alone_us(records) + paid_us
            if us > best.us * (1 + SAME):
                return Value(us, lost)
        return Value(self.clock.step_us(records) + paid_us, lost)

    def _round(self) -> None:
        """Change one bucket at a time, the last one first."""
        k = len(self.plan) - 1
        while k >= 0 and self.evaluations < self.limits.evaluations:
            self.base = self.plan
            options = self._best_options(k)
            if self.limits.borders:
                self._split(k, options)
                self._join(k, options)
            k = min(k, len(self.plan)) - 1

    def _attempt(self, trial: _Plan) -> Value:
        """Keep a plan if it beats what is known."""
        found = self._value(trial, self.value)
        if found.beats(self.value):
            self.plan, self.value = trial, found
        return found

    def _instead(self, places: Sequence[int], parts: Sequence[Part]) -> None:
        """Try the base with these buckets in the place of others."""
        trial = [bucket for k, bucket in enumerate(self.base) if k not in places]
        for part in parts:
            bucket = self._bucket(part)
            at = len(trial)
            while at > 0 and trial[at - 1].record.last > bucket.record.last:
                at -= 1
            trial.insert(at, bucket)
        self._attempt(trial)

    def _switch(self, changes: Sequence[tuple[int, int]]) -> Value:
        """Try the base with other options for some buckets."""
        trial = list(self.base)
        for k, option in changes:
            trial[k] = self._bucket(trial[k].part._replace(option=option))
        return self._attempt(trial)

    def _options(self, part: Part) -> list[int]:
        """The other options of a bucket."""
        first = self.p.strand_options[part.strand]
        count = self.p.strand_options[part.strand + 1] - first
        return [
            option
            for option in range(count)
            if option != part.option and (not self.limits.dense_only or self.p.option_traits[first + option] & DENSE)
        ]

    def _best_options(self, k: int) -> list[int]:
        """Try a bucket's other options, and list the best few, its own first."""
        part = self.base[k].part
        ranked = sorted((self._switch([(k, option)]), option) for option in self._options(part))
        return [part.option, *(option for _, option in ranked)][: max(1, self.limits.options)]

    def _cuts(self, part: Part) -> list[int]:
        """The places to split a bucket at: all if it is short, else 1, 2, 4, ... cells from its ends, and evenly."""
        size = part.stop - part.start
        if size <= _CUTS + 1:
            return list(range(part.start + 1, part.stop))
        steps = [1 << k for k in range(size.bit_length()) if (1 << k) * _CUTS < size]
        near_ends = [cut for step in steps for cut in (part.start + step, part.stop - step)]
        return [*near_ends, *(part.start + size * number // _CUTS for number in range(1, _CUTS))]

    def _split(self, k: int, options: Sequence[int]) -> None:
        """Split a bucket, and give one side another option."""
        own = self.base[k].part.option
        for cut in self._cuts(self.base[k].part):
            for option in options:
                self._split_at(k, cut, option, own)
                if option != own:
                    self._split_at(k, cut, own, option)

    def _split_at(self, k: int, cut: int, first: int, second: int) -> None:
        part = self.base[k].part
        sides = part._replace(stop=cut, option=first), part._replace(start=cut, option=second)
        self._instead((k,), sides)

    def _join(self, k: int, options: Sequence[int]) -> None:
        """Join a bucket with the next one of its strand, exchange their options, or move the border between them."""
        part = self.base[k].part
        strand = (j for j in range(k + 1, len(self.base)) if self.base[j].part.strand == part.strand)
        other = next(strand, None)
        if other is None:
            return
        after = self.base[other].part
        for option in options:
            self._instead((k, other), [part._replace(stop=after.stop, option=option)])
        if after.option != part.option:
            if after.option not in options:
                self._instead((k, other), [after._replace(start=part.start)])
            self._border(k, other, part.stop, (after.option, part.option))
        for moved in _BORDERS:
            self._border(k, other, part.stop + moved, (part.option, after.option))

    def _border(self, k: int, other: int, border: int, options: tuple[int, int]) -> None:
        part, after = self.base[k].part, self.base[other].part
        if part.start < border < after.stop:
            first, second = part._replace(stop=border, option=options[0]), after._replace(start=border)
            self._instead((k, other), [first, second._replace(option=options[1])])

    def _pairs(self) -> None:
        """Change two buckets at a time: other options for both, an exchange, or one for another everywhere."""
        self.base = self.plan
        options = [self._best_options(k) for k in range(len(self.base))]
        for k in reversed(range(len(self.base))):
            if self.evaluations >= self.limits.evaluations:
                break
            for other in range(k - 1, max(0, k - self.limits.apart) - 1, -1):
                for one in options[k][1:]:
                    for two in options[other][1:]:
                        self._switch([(k, one), (other, two)])
            for other in range(k):
                self._exchange(k, other)
            for cut in self._cuts(self.base[k].part) if self.limits.borders else ():
                for first in options[k][1:]:
                    for second in options[k][1:]:
                        self._split_at(k, cut, first, second)
        self._everywhere()

    def _exchange(self, k: int, other: int) -> None:
        one, two = self.base[k].part, self.base[other].part
        if one.strand == two.strand and one.option != two.option:
            self._switch([(k, two.option), (other, one.option)])

    def _everywhere(self) -> None:
        """Give all buckets with one option another one."""
        kinds = dict.fromkeys(bucket.part._replace(start=0, stop=0) for bucket in self.base)
        for kind in kinds:
            alike = [k for k, bucket in enumerate(self.base) if bucket.part._replace(start=0, stop=0) == kind]
            for option in self._options(kind):
                self._switch([(k, option) for k in alike])
