"""List the buckets that a search may make: rows of atoms to be cut, and what each piece may travel by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.budget import is_bursty
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Content, worth_offering
from fxcomp.plan.pins import NO_PINS
from fxcomp.plan.strategy import Strategy
from fxcomp.search.atoms import Atom, atoms_of, joined
from fxcomp.search.losses import Losses
from fxcomp.search.plan_tasks import BucketWriter
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from helpers.optimum.blocks import Blocks
from helpers.optimum.labels import Option

_SAME = 1e-9  # relative: a plan's error may exceed the limit by rounding


_Kind = tuple[Content, ElementType]


class Row:
    """Atoms of one content and type, in ready order; a bucket holds neighbours."""

    def __init__(
        self,
        members: Sequence[int],
        atoms: Sequence[Atom],
        choices: Sequence[Strategy],
        job: tuple[Workload, CostTable, Cluster],
        losses: Losses,
        *,
        prunes: bool,
        limits: bool,
    ) -> None:
        self.members, self.choices = members, choices
        self._atoms, self._job, self._prunes, self._limits = atoms, job, prunes, limits
        self._lost = losses.sums([atoms[k] for k in members], range(len(members) + 1), choices)
        self._bursts = [is_bursty(each, job[2]) for each in choices]
        self._known: dict[tuple[int, int], tuple[Option, ...]] = {}

    def options(self, start: int, stop: int) -> tuple[Option, ...]:
        """List what a bucket of these members may be, without those that another one makes needless."""
        known = self._known.get((start, stop))
        if known is None:
            known = self._known[start, stop] = self._listed(start, stop)
        return known

    def _listed(self, start: int, stop: int) -> tuple[Option, ...]:
        workload, writer = self._job[0], BucketWriter(*self._job)
        members = joined([self._atoms[k] for k in self.members[start:stop]])
        gradients = [gradient for gradient, _ in members]
        elements = sum(len(extent) for _, extent in members)
        all_lost = (self._lost[stop] - self._lost[start]).tolist()
        found: list[Option] = []
        for strategy, lost, bursts in zip(self.choices, all_lost, self._bursts, strict=True):
            try:
                tasks = writer.bucket(0, gradients, strategy)
            except BadOption:  # it cannot carry one of them
                continue
            blocks = Blocks.of(tasks)
            assert blocks is not None, f"{strategy} has tasks that run beside each other"
            bursting = elements if bursts else 0
            option = Option(blocks, strategy, tuple(members), lost, bursting, workload.updates_wait)
            if not self._prunes:
                found.append(option)
            elif not any(self._is_no_worse(other, option) for other in found):
                found = [other for other in found if not self._is_no_worse(option, other)]
                found.append(option)
        return tuple(found)

    def _is_no_worse(self, one: Option, other: Option) -> bool:
        if self._limits and (one.lost > other.lost or one.bursting > other.bursting):
            return False
        return one.blocks.is_within(other.blocks)


@dataclass(frozen=True)
class Rows:
    """One way to group gradients: each row is cut by itself, and buckets leave by their last atoms."""

    rows: tuple[Row, ...]
    atoms: tuple[Atom, ...]
    lossable: float
    """The squared error that a plan may have, in elements."""
    bursty: float
    """The elements that may come in bursts."""
    limits: bool
    """Some plan is not allowed."""
    can_dominate: bool
    """Streams share no processors."""

    @cached_property
    def end(self) -> tuple[int, ...]:
        return tuple(len(row.members) for row in self.rows)

    def last_of(self, place: tuple[int, ...]) -> int:
        """Return the last atom that is dealt."""
        return max(row.members[stop - 1] if stop else -1 for row, stop in zip(self.rows, place, strict=True))

    def ready_us(self, atom: int) -> float:
        return self.atoms[atom].gradient.ready_us if atom >= 0 else 0.0

    def can_end(self, place: tuple[int, ...]) -> bool:
        """Return whether the remaining buckets can still launch in order."""
        last = self.last_of(place)
        return all(
            stop == len(row.members) or row.members[-1] > last for row, stop in zip(self.rows, place, strict=True)
        )

    def allows(self, lost: float, bursting: int) -> bool:
        return lost <= self.lossable and bursting <= self.bursty


def rows_of(workload: Workload, costs: CostTable, cluster: Cluster, terms: Terms) -> list[Rows]:
    """List the groupings: vectors apart from matrices, and together with them if there are both."""
    assert terms.pins == NO_PINS, "the oracle knows no pins"
    atoms = tuple(atoms_of(workload, cluster.world_size))
    elements = sum(atom.elements for atom in atoms)
    losses, limit = terms.losses(workload, cluster), terms.limit(workload, cluster)
    lossable = elements * limit * (1 + _SAME)
    bursty = elements * terms.bursts if terms.bursts < 1 else math.inf
    can_dominate = not shares_processors(costs)
    apart: dict[_Kind, list[int]] = {}
    mixed: dict[_Kind, list[int]] = {}
    for content in (Content.MATRICES, Content.VECTORS):
        for k, atom in enumerate(atoms):
            if atom.gradient.is_vector == (content is Content.VECTORS):
                apart.setdefault((content, atom.gradient.element_type), []).append(k)
    for k, atom in enumerate(atoms):
        mixed.setdefault((Content.MIXED, atom.gradient.element_type), []).append(k)
    groupings = [apart, mixed] if len({content for content, _ in apart}) == 2 else [apart]
    made: list[Rows] = []
    for grouping in groupings:
        choices = {
            (content, kind): worth_offering(
                terms.strategies(limit, losses, cluster, content, offload=costs.offloads),
                kind,
                cluster,
                offload=costs.offloads,
            )
            for content, kind in grouping
        }
        worst = _most_lost(losses, [strategy for each in choices.values() for strategy in each])
        limits = worst > lossable or bursty < elements
        job = workload, costs, cluster
        rows = [
            Row(members, atoms, choices[kind], job, losses, prunes=can_dominate, limits=limits)
            for kind, members in grouping.items()
        ]
        made.append(Rows(tuple(rows), atoms, lossable, bursty, limits, can_dominate))
    return made


def _most_lost(losses: Losses, choices: Sequence[Strategy]) -> float:
    """Bound what a plan of these strategies may lose, in elements: each gradient by the worst for it."""
    worst = np.max([losses.errors(strategy) for strategy in choices], axis=0)
    return float((losses.weights * worst).sum())


def shares_processors(costs: CostTable) -> bool:
    """Return whether work on one stream may slow work on another: the pool's threads, or the network's software."""
    processors = costs.processors
    if math.isinf(processors.count):
        return False
    return bool(costs.transport) or (costs.offloads and processors.count < processors.compute + 2 * costs.pool_load)
