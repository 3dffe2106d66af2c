"""Improve plans from several starts by changing one bucket at a time, until no single change helps.

Starts are buckets of a few sizes, one strategy everywhere. A change gives a bucket another strategy, merges it with the
next, splits it, or moves its border by a gradient. Among equals the plan that loses less wins, so error is spent only
where it shortens the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxcomp.search.candidates import SAME, Candidates, Part, Parts

MIB = 1 << 20
CAPS = (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 25 * MIB, 64 * MIB, math.inf)
"""Sizes of the buckets that the search starts from."""

_STARTS = 3  # how many of the best starts are improved
_SPLITS = 6  # how many places a bucket is split at
_EVALUATIONS = 8_000  # simulated plans, a bound in numbers and not in time: every rank must stop at the same one
_WORTH_A_ROUND = 1e-3  # relative: a round that gains less is the last
_FLIP_BUCKETS = 32  # the verdict's flip is looked for among plans of so many buckets, which cost a search most


def leaves_dense(dense_us: float, fastest_us: float, error: float) -> bool:
    """Tell that a gain exceeds the prediction's own error."""
    return dense_us - fastest_us > error * dense_us


class LocalSearch:
    """The search among one workload's plans."""

    def __init__(self, plans: Candidates) -> None:
        self._plans = plans
        self._main = plans.choices[plans.main]

    def start(self, cap: float, strategy: int) -> Parts:
        """Make buckets of at most `cap` bytes in ready order; vectors take the matrices' strategy if they may."""
        parts: list[Part] = []
        wanted = self._main[strategy]
        for content, members in self._plans.members.items():
            choices = self._plans.choices[content]
            number = choices.index(wanted) if wanted in choices else 0
            begun, size = 0, 0
            for k, position in enumerate(members):
                more = 4 * self._plans.elements[position]
                if k > begun and size + more > cap:
                    parts.append(Part(content, begun, k, number))
                    begun, size = k, 0
                size += more
            if members:
                parts.append(Part(content, begun, len(members), number))
        return self._plans.ordered(parts)

    def best_dense(self) -> tuple[Parts, float]:
        """Find the fastest plan that compresses nothing."""
        numbers = [k for k, strategy in enumerate(self._main) if strategy.is_dense]
        return self._improve_best([self.start(cap, k) for k in numbers for cap in CAPS], dense_only=True)

    def best(self, dense: Parts) -> tuple[Parts, float]:
        """Find the fastest plan of all; `dense` if none is faster."""
        numbers = range(len(self._main))
        return self._improve_best([dense, *(self.start(cap, k) for k in numbers for cap in CAPS)], dense_only=False)

    def stays_dense(self) -> bool:
        """Tell that no start of a search gains enough to leave dense; stop when that is clear."""
        workload, costs = self._plans.workload, self._plans.costs
        numbers = range(len(self._main))
        dense = [k for k in numbers if self._main[k].is_dense]
        caps = [cap for cap in CAPS if 4 * sum(self._plans.elements) <= _FLIP_BUCKETS * cap]
        dense_us = min(self._plans.step_us(self.start(cap, k)) for k in dense for cap in caps)
        error = costs.error_of(workload.free_us, dense_us)
        if not leaves_dense(dense_us, workload.free_us, error):
            return True  # not even without any communication
        others = (self.start(cap, k) for k in reversed(numbers) if k not in dense for cap in caps)
        return not any(leaves_dense(dense_us, self._plans.step_us(parts), error) for parts in others)

    def _improve_best(self, starts: list[Parts], *, dense_only: bool) -> tuple[Parts, float]:
        distinct = list(dict.fromkeys(starts))
        chosen = [starts[0], *sorted(distinct, key=self._plans.step_us)[:_STARTS]]
        ends = [self._improve(start, dense_only) for start in dict.fromkeys(chosen)]
        best = min(ends, key=self._plans.step_us)
        return best, self._plans.step_us(best)

    def _improve(self, parts: Parts, dense_only: bool) -> Parts:
        """Change one bucket at a time, round by round, until a round no longer helps."""
        limit = len(self._plans.known) + _EVALUATIONS
        while True:
            before_us = self._plans.step_us(parts)
            k = 0
            while k < len(parts) and len(self._plans.known) < limit:
                parts, k = self._better(parts, k, dense_only), k + 1
            if self._plans.step_us(parts) >= before_us * (1 - _WORTH_A_ROUND):
                return parts

    def _better(self, parts: Parts, k: int, dense_only: bool) -> Parts:
        """Return the best of a plan and its neighbours by changing bucket k."""
        best, us, loss = parts, self._plans.step_us(parts), self._plans.loss(parts)
        for candidate in self._neighbours(parts, k, dense_only):
            if self._plans.bound_us(candidate) > us * (1 + SAME):
                continue
            candidate_us = self._plans.step_us(candidate)
            if candidate_us > us * (1 + SAME):
                continue
            candidate_loss = self._plans.loss(candidate)
            if candidate_us < us * (1 - SAME) or candidate_loss < loss:
                best, us, loss = candidate, candidate_us, candidate_loss
        return best

    def _neighbours(self, parts: Parts, k: int, dense_only: bool) -> Iterator[Parts]:
        part = parts[k]
        for other in self._plans.other_strategies(part):
            if not dense_only or self._plans.strategy(other).is_dense:
                yield (*parts[:k], other, *parts[k + 1 :])
        others = (*parts[:k], *parts[k + 1 :])
        for cut in self._cuts(part):
            yield self._plans.ordered((*others, part._replace(stop=cut), part._replace(start=cut)))
        following = next((j for j in range(k + 1, len(parts)) if parts[j].content is part.content), None)
        if following is None:
            return
        after = parts[following]
        others = (*parts[:k], *parts[k + 1 : following], *parts[following + 1 :])
        yield self._plans.ordered((*others, after._replace(start=part.start)))
        if part.strategy != after.strategy:
            yield self._plans.ordered((*others, part._replace(stop=after.stop)))
        for border in (part.stop - 1, part.stop + 1):
            if part.start < border < after.stop:
                yield self._plans.ordered((*others, part._replace(stop=border), after._replace(start=border)))

    def _cuts(self, part: Part) -> list[int]:
        """Return the places to split a bucket at: everywhere if it is short, else evenly."""
        inner = part.stop - part.start - 1
        if inner <= _SPLITS:
            return list(range(part.start + 1, part.stop))
        return [part.start + 1 + (inner - 1) * k // (_SPLITS - 1) for k in range(_SPLITS)]
