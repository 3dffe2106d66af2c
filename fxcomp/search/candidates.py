"""Number the plans that a search compares, and price each by the simulated step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, step_time_us
from fxcomp.plan.error_budget import is_bursty, strategy_error
from fxcomp.plan.modes import Content, Mode, error_limit, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.plan.streams import Stream
from fxcomp.search.atoms import atoms_of, joined
from fxcomp.search.plan_tasks import BucketTasks, assemble, broadcast_task, price_bucket
from fxcomp.search.workload import Gradient, Workload


class Part(NamedTuple):
    """A bucket in the search: atoms start to stop of those with this content, and a strategy's number."""

    content: Content
    start: int
    stop: int
    strategy: int


Choices = Mapping[Content, tuple[Strategy, ...]]
"""The strategies that buckets of each content may have."""

Parts = tuple[Part, ...]
"""A plan in the search: buckets in the order in which their last gradients are ready."""

SAME = 1e-9
"""Times that are relatively closer than this are equal."""


class Candidates:
    """The plans of one workload by number, priced once each."""

    def __init__(
        self,
        workload: Workload,
        costs: CostTable,
        cluster: Cluster,
        mode: Mode,
        choices: Choices | None = None,
        *,
        bursts: float = 1.0,
        mixed: bool = False,
    ) -> None:
        self.workload, self.costs, self.cluster = workload, costs, cluster
        self.atoms = atoms_of(workload, cluster.world_size)
        numbered = list(enumerate(self.atoms))
        self.members = (
            {Content.MIXED: [k for k, _ in numbered]}
            if mixed
            else {
                Content.MATRICES: [k for k, atom in numbered if not atom.gradient.is_vector],
                Content.VECTORS: [k for k, atom in numbered if atom.gradient.is_vector],
            }
        )
        self.main = next(iter(self.members))
        """Its strategies are what a plan is started with."""
        self.choices = choices or {
            content: strategies(mode, cluster, content, offload=costs.offloads) for content in self.members
        }
        self.errors = {content: [strategy_error(s, cluster) for s in found] for content, found in self.choices.items()}
        self.bursts = {content: [is_bursty(s, cluster) for s in found] for content, found in self.choices.items()}
        self.elements = [atom.elements for atom in self.atoms]
        elements = sum(self.elements)
        self.lossable = math.inf if choices else elements * error_limit(mode) * (1 + SAME)
        self.bursty = math.inf if choices or bursts >= 1 else elements * bursts
        self.broadcast = broadcast_task(workload, costs, cluster)
        self.known: dict[Parts, float] = {}
        self.priced: dict[Part, BucketTasks] = {}
        self.busy: dict[Part, tuple[float, float]] = {}
        self.lost: dict[Part, float] = {}
        self.regions: dict[tuple[int, int], Task] = {}

    def step_us(self, parts: Parts) -> float:
        """Simulate the step; infinite for a plan that loses too much."""
        us = self.known.get(parts)
        if us is None:
            us = self.known[parts] = self._simulate(parts) if self._is_allowed(parts) else math.inf
        return us

    def _is_allowed(self, parts: Parts) -> bool:
        if self.loss(parts) > self.lossable:
            return False
        return math.isinf(self.bursty) or sum(map(self._bursting, parts)) <= self.bursty

    def _bursting(self, part: Part) -> int:
        """Count the elements of a bucket that come in bursts."""
        return self._elements(part) if self.bursts[part.content][part.strategy] else 0

    def loss(self, parts: Parts) -> float:
        """Sum the squared error of a plan, in elements lost."""
        return sum([self._lost(part) for part in parts])

    def bound_us(self, parts: Parts) -> float:
        """Bound a plan's step from below: all that compute must do, or all that the wire must, once it may start."""
        known = self.busy
        busy = [known.get(part) or self._busy(part) for part in parts]
        compute = self.workload.backward_us + self.workload.finish_us + sum([us for us, _ in busy])
        wire = self.atoms[self.last(parts[0])].gradient.ready_us + sum([us for _, us in busy])
        return max(compute, wire)

    def _busy(self, part: Part) -> tuple[float, float]:
        """Sum the time that a bucket occupies compute, and the links between hosts."""
        bucket = self._priced(part)
        tasks = [*(task for stage in bucket.stages for task in stage), *bucket.final, bucket.update]
        compute, wire = (
            sum(task.duration_us for task in tasks if task.stream is stream)
            for stream in (Stream.COMPUTE, Stream.INTER)
        )
        self.busy[part] = (compute, wire)
        return compute, wire

    def _simulate(self, parts: Parts) -> float:
        regions: list[Task] = []
        previous = -1
        for part in parts:
            last = self.last(part)
            regions.append(self._region(previous, last))
            previous = last
        known = self.priced
        buckets = [known.get(part) or self._priced(part) for part in parts]
        return step_time_us(assemble(self.workload, regions, buckets, self.broadcast), self.costs.processors)

    def _priced(self, part: Part) -> BucketTasks:
        tasks = self.priced.get(part)
        if tasks is None:
            members = [gradient for gradient, _ in self._joined(part)]
            # Named by the last atom and not by the place in the plan, which other buckets' changes move.
            tasks = self.priced[part] = price_bucket(
                self.last(part), members, self.strategy(part), self.workload, self.costs, self.cluster
            )
        return tasks

    def _region(self, previous: int, last: int) -> Task:
        task = self.regions.get((previous, last))
        if task is None:
            ready = [atom.gradient.ready_us for atom in self.atoms]
            us = ready[last] - (ready[previous] if previous >= 0 else 0.0)
            task = self.regions[previous, last] = Task(f"region {last}", Stream.COMPUTE, us)
        return task

    def _lost(self, part: Part) -> float:
        lost = self.lost.get(part)
        if lost is None:
            lost = self.lost[part] = self._elements(part) * self.errors[part.content][part.strategy]
        return lost

    def last(self, part: Part) -> int:
        return self.members[part.content][part.stop - 1]

    def _positions(self, part: Part) -> list[int]:
        return self.members[part.content][part.start : part.stop]

    def _joined(self, part: Part) -> list[tuple[Gradient, range]]:
        return joined([self.atoms[k] for k in self._positions(part)], self.costs)

    def _elements(self, part: Part) -> int:
        return sum(self.elements[k] for k in self._positions(part))

    def strategy(self, part: Part) -> Strategy:
        return self.choices[part.content][part.strategy]

    def ordered(self, parts: Sequence[Part]) -> Parts:
        return tuple(sorted(parts, key=self.last))

    def plan(self, parts: Parts) -> Plan:
        buckets: list[Bucket] = []
        for part in parts:
            members = self._joined(part)
            names, sizes = tuple(gradient.name for gradient, _ in members), tuple(len(e) for _, e in members)
            starts = tuple(extent.start for _, extent in members)
            buckets.append(Bucket(names, sizes, self.strategy(part), starts))
        return Plan(tuple(buckets))

    def other_strategies(self, part: Part) -> list[Part]:
        numbers = range(len(self.choices[part.content]))
        return [part._replace(strategy=number) for number in numbers if number != part.strategy]
