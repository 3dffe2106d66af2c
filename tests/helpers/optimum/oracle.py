"""Find the best plan of a small workload exactly, to judge searches by.

The space is `choose`'s: gradients, the large ones cut into atoms, stand in ready order, vectors apart from matrices or
together with them. Every way to cut each row into buckets is looked at, with every strategy that the terms give to a
bucket's content, within the error of their mode or budget and the share of bursts. What is returned is within `EXACT`
of the fastest.

Partial plans grow bucket by bucket, in the order of launches, and a partial plan is dropped only by proof:

- *bounded*: streams must still do what is left at its cheapest; see `Rest`;
- *dominated*: another one holds the same gradients, and no stream, no bucket that is still on its way and no final
  work is further with it. A step is a longest path where streams share no processors, and all that may follow one
  may follow the other, so the other's best end is no later.

Where streams share processors a step is no longest path: nothing is dominated then, bounds hold all the same (a block
never takes less than its time alone), and every plan that is left is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import step_time_us
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Plan
from fxcomp.search.bound import bound_us
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from helpers.optimum.labels import Label, Option, plan_of
from helpers.optimum.rest import Rest
from helpers.optimum.space import Rows, rows_of

__all__ = ["EXACT", "MOST_LABELS", "Optimum", "TooLarge", "bound_us", "optimum"]

EXACT = 1e-6
"""Relative: a plan that could be faster by less is not looked for."""

MOST_LABELS = 2_000_000
"""Partial plans, a bound in numbers and not in time; beyond it the workload is too large."""

_BEAM = 30  # partial plans for the same gradients that the first, inexact pass keeps


class TooLarge(ValueError):
    """A workload has more partial plans than are looked at."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The fastest plan of all, and how many partial plans it took to prove that."""

    plan: Plan
    step_us: float
    looked_at: int


def optimum(
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    terms: Terms | Mode,
    *,
    known: Plan | None = None,
    most: int = MOST_LABELS,
) -> Optimum:
    """Find the fastest plan. `known` is one to begin with, which saves time and changes no result.

    Raises TooLarge. The workload shares no buffers; nothing is pinned.
    """
    assert not workload.broadcast_bytes, "the oracle knows no broadcast of buffers"
    job = _Job(workload, costs, cluster)
    begun = known or Plan(())
    best = Optimum(begun, job.step_us(begun) if known or not workload.gradients else math.inf, 0)
    if not workload.gradients:
        return best
    spaces = rows_of(workload, costs, cluster, terms if isinstance(terms, Terms) else Terms(terms))
    for beam in (_BEAM, None):
        for rows in spaces:
            best = _Search(job, rows, best, most).run(beam)
    return best


@dataclass(frozen=True, slots=True)
class _Job:
    workload: Workload
    costs: CostTable
    cluster: Cluster

    def step_us(self, plan: Plan) -> float:
        return step_time_us(plan_tasks(self.workload, plan, self.costs, self.cluster), self.costs.processors)


class _Search:
    """One grouping's partial plans, by what they hold."""

    def __init__(self, job: _Job, rows: Rows, best: Optimum, most: int) -> None:
        self.job, self.rows, self.best, self.most = job, rows, best, most
        self.rest = Rest(job.workload, rows)
        self.waiting: dict[tuple[int, ...], list[Label]] = {}
        """By the place up to which each row is dealt."""
        self.looked_at = best.looked_at

    def run(self, beam: int | None) -> Optimum:
        """Deal atoms in ready order; with a `beam`, keep so many of each place and prove nothing."""
        start = (0,) * len(self.rows.rows)
        self.waiting = {start: [Label()]}
        for last in range(-1, len(self.rows.atoms)):
            for place in [place for place in self.waiting if self.rows.last_of(place) == last]:
                labels = self._worth(self.waiting.pop(place))
                for label in labels if beam is None else labels[:beam]:
                    self._extend(label, place)
        return Optimum(self.best.plan, self.best.step_us, self.looked_at)

    def _worth(self, labels: Sequence[Label]) -> list[Label]:
        """Keep the labels that may lead to something better, the most promising first."""
        kept: list[Label] = []
        limit, limits = self._limit, self.rows.limits
        for label in sorted(labels, key=_bound):
            if label.bound_us >= limit:
                break
            if not self.rows.can_dominate or not any(other.dominates(label, limits=limits) for other in kept):
                kept.append(label)
        return kept

    @property
    def _limit(self) -> float:
        return self.best.step_us * (1 - EXACT)

    def _extend(self, label: Label, place: tuple[int, ...]) -> None:
        previous = self.rows.last_of(place)
        for after, options in self._next(place, previous):
            last = self.rows.last_of(after)
            region_us = self.rows.ready_us(last) - self.rows.ready_us(previous)
            is_end = after == self.rows.end
            for option in options:
                self._count()
                grown = label.grown(region_us, option)
                if not self.rows.allows(grown.lost, grown.bursting):
                    continue
                if is_end:
                    self._finish(grown)
                    continue
                grown.bound_us = max(label.bound_us, self.rest.bound_us(grown, after))
                if grown.bound_us < self._limit:
                    self.waiting.setdefault(after, []).append(grown)

    def _next(self, place: tuple[int, ...], previous: int) -> Iterator[tuple[tuple[int, ...], Sequence[Option]]]:
        for number, row in enumerate(self.rows.rows):
            for stop in range(place[number] + 1, len(row.members) + 1):
                after = (*place[:number], stop, *place[number + 1 :])
                if row.members[stop - 1] > previous and self.rows.can_end(after):
                    yield after, row.options(place[number], stop)

    def _count(self) -> None:
        self.looked_at += 1
        if self.looked_at > self.most:
            raise TooLarge(f"more than {self.most:,} partial plans for {len(self.rows.atoms)} atoms")

    def _finish(self, label: Label) -> None:
        if label.end_us(self.job.workload) >= self._limit:
            return
        plan = plan_of(label.options())
        us = self.job.step_us(plan)
        if us < self._limit:
            self.best = Optimum(plan, us, self.looked_at)


def _bound(label: Label) -> float:
    return label.bound_us
