"""Choose a plan: which gradients travel together, and how each bucket travels, judged only by the simulated step.

Plans are improved from several starts (buckets of a few sizes, one strategy everywhere) by changing one bucket at a
time: another strategy, merge with the next, split, move the border by a gradient; until no single change helps.
Among equals the plan that loses less wins, so error is spent only where it shortens the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import parse_compressor
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, simulate, step_time_us
from fxcomp.plan.error_budget import is_bursty, strategy_error
from fxcomp.plan.modes import Mode, error_limit, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.plan.streams import Stream
from fxcomp.search.plan_tasks import BucketTasks, assemble, broadcast_task, plan_tasks, price_bucket
from fxcomp.search.workload import Workload

MIB = 1 << 20
CAPS = (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 25 * MIB, 64 * MIB, math.inf)
"""Sizes of the buckets that the search starts from."""

_STARTS = 3  # how many of the best starts are improved
_SPLITS = 6  # how many places a bucket is split at
_EVALUATIONS = 8_000  # simulated plans, a bound in numbers and not in time: every rank must stop at the same one
_WORTH_A_ROUND = 1e-3  # relative: a round that gains less is the last
_SAME = 1e-9  # relative: times closer than this are equal
_FLIP_RATIO = 1.2  # where the verdict flips is known to ten percent: predictions are not better
_FLIP_BUCKETS = 32  # and from plans of so many buckets, which cost a search most


@dataclass(frozen=True, slots=True)
class Alternative:
    """What the step would be had one bucket another strategy."""

    strategy: Strategy
    step_us: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen plan, and what the others would have cost."""

    plan: Plan
    step_us: float
    dense: Plan
    dense_us: float
    fastest: Plan
    """The plan with the shortest predicted step, chosen or not."""
    fastest_us: float
    bf16_us: float
    """bf16 everywhere."""
    free_us: float
    """No communication at all."""
    error: float
    """The prediction's own relative error, which a gain must exceed."""
    alternatives: tuple[tuple[Alternative, ...], ...]
    """For each bucket of the plan, the other strategies."""
    evaluations: int

    @property
    def gain(self) -> float:
        """What the fastest plan saves of the dense step."""
        return 1.0 - self.fastest_us / self.dense_us if self.dense_us > 0 else 0.0

    @property
    def reason(self) -> str:
        if self.fastest.is_dense:
            return "no compressed plan is predicted to be faster than the best dense one"
        verdict = "stays dense" if self.plan.is_dense else "leaves dense"
        sign = "is not above" if self.plan.is_dense else "is above"
        return f"{verdict}: the predicted gain of {self.gain:.1%} {sign} the prediction's error of {self.error:.1%}"

    def __str__(self) -> str:
        steps = {
            "chosen": self.step_us,
            "dense": self.dense_us,
            "bf16 everywhere": self.bf16_us,
            "no communication": self.free_us,
        }
        lines = [f"{name:<17}{us / 1e3:10.3f} ms" for name, us in steps.items()]
        return "\n".join([*lines, self.reason, str(self.plan)])


def choose_plan(workload: Workload, costs: CostTable, cluster: Cluster, mode: Mode) -> Plan:
    """The plan with the shortest predicted step; dense unless the gain exceeds the prediction's error."""
    return choose(workload, costs, cluster, mode).plan


def choose(workload: Workload, costs: CostTable, cluster: Cluster, mode: Mode, *, bursts: float = 1.0) -> Choice:
    """`choose_plan` with its reasons. At most the part `bursts` of all elements may come in bursts (budget.py)."""
    search = _Search(workload, costs, cluster, mode, bursts=bursts)
    dense, dense_us = search.best_dense()
    fastest, fastest_us = search.best(dense)
    error = costs.error_of(workload.free_us, dense_us)
    leaves_dense = _leaves_dense(dense_us, fastest_us, error)
    parts, step_us = (fastest, fastest_us) if leaves_dense else (dense, dense_us)
    return Choice(
        plan=search.plan(parts),
        step_us=step_us,
        dense=search.plan(dense),
        dense_us=dense_us,
        fastest=search.plan(fastest),
        fastest_us=fastest_us,
        bf16_us=predict_us(workload, uniform("bf16", workload, costs, cluster), costs, cluster),
        free_us=workload.free_us,
        error=error,
        alternatives=search.alternatives(parts),
        evaluations=len(search.known),
    )


def _leaves_dense(dense_us: float, fastest_us: float, error: float) -> bool:
    return dense_us - fastest_us > error * dense_us


def predict_us(workload: Workload, plan: Plan, costs: CostTable, cluster: Cluster) -> float:
    """The predicted step of any plan."""
    return simulate(plan_tasks(workload, plan, costs, cluster), costs.processors).step_time_us


def uniform(name: str, workload: Workload, costs: CostTable, cluster: Cluster) -> Plan:
    """One compressor everywhere (`dense`, `bf16`, `int8`, ...), flat, in buckets of the best size.

    Vectors stay dense where balanced mode would not compress them.
    """
    strategy = DENSE if name == "dense" else Strategy.flat(parse_compressor(name))
    gentle = strategies(Mode.BALANCED, cluster, is_vector=True)
    vector = strategy if strategy in gentle else DENSE
    search = _Search(workload, costs, cluster, Mode.LOSSLESS, {False: (strategy,), True: (vector,)})
    return search.plan(min((search.start(cap, 0) for cap in CAPS), key=search.step_us))


def flip_gbit(
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    mode: Mode,
    *,
    bursts: float = 1.0,
    choice: Choice | None = None,
) -> float | None:
    """The bandwidth between hosts, in Gbit/s, above which the plan is dense and below which it is not.

    None if the verdict is the same from 1 Mbit/s to 1 Tbit/s. Asks the cluster's links, not what was measured live.
    Plans are compared as the search starts from them, not improved one by one: within 17 % of where whole searches flip
    (measured on nine pairs of job and cluster, the median 8 %). `choice`, the verdict on this cluster by its links,
    is never contradicted.
    """
    costs = costs.without_collectives()

    def is_dense(gbit: float) -> bool:
        return _Search(workload, costs, cluster.with_inter(gbit / 8), mode, bursts=bursts).stays_dense()

    low, high = 1e-3, 1e3
    here = 8 * cluster.inter.gb_per_s
    if choice is not None and low < here < high:
        low, high = (low, here) if choice.plan.is_dense else (here, high)
    if (choice is None or high == here) and is_dense(low):
        return None
    if (choice is None or low == here) and not is_dense(high):
        return None
    while high / low > _FLIP_RATIO:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_dense(middle) else (middle, high)
    return math.sqrt(low * high)


class _Part(NamedTuple):
    """A bucket in the search: gradients start to stop of the vectors or the matrices, and a strategy's number."""

    is_vector: bool
    start: int
    stop: int
    strategy: int


_Parts = tuple[_Part, ...]  # in the order in which their last gradients are ready


class _Search:
    """The plans of one workload by number, and the memory of what was simulated."""

    def __init__(
        self,
        workload: Workload,
        costs: CostTable,
        cluster: Cluster,
        mode: Mode,
        choices: dict[bool, tuple[Strategy, ...]] | None = None,
        *,
        bursts: float = 1.0,
    ) -> None:
        self.workload, self.costs, self.cluster = workload, costs, cluster
        self.choices = choices or {
            vector: strategies(mode, cluster, vector, offload=costs.offloads) for vector in (False, True)
        }
        self.errors = {vector: [strategy_error(s, cluster) for s in self.choices[vector]] for vector in (False, True)}
        self.bursts = {vector: [is_bursty(s, cluster) for s in self.choices[vector]] for vector in (False, True)}
        self.members = {
            vector: [k for k, gradient in enumerate(workload.gradients) if gradient.is_vector == vector]
            for vector in (False, True)
        }
        self.elements = [gradient.elements for gradient in workload.gradients]
        elements = sum(self.elements)
        self.lossable = math.inf if choices else elements * error_limit(mode) * (1 + _SAME)
        self.bursty = math.inf if choices or bursts >= 1 else elements * bursts
        self.broadcast = broadcast_task(workload, costs, cluster)
        self.known: dict[_Parts, float] = {}
        self.priced: dict[_Part, BucketTasks] = {}
        self.busy: dict[_Part, tuple[float, float]] = {}
        self.lost: dict[_Part, float] = {}
        self.regions: dict[tuple[int, int], Task] = {}

    # Evaluation

    def step_us(self, parts: _Parts) -> float:
        """The simulated step; infinite for a plan that loses too much."""
        us = self.known.get(parts)
        if us is None:
            us = self.known[parts] = self._simulate(parts) if self._is_allowed(parts) else math.inf
        return us

    def _is_allowed(self, parts: _Parts) -> bool:
        if self.loss(parts) > self.lossable:
            return False
        return math.isinf(self.bursty) or sum(map(self._bursting, parts)) <= self.bursty

    def _bursting(self, part: _Part) -> int:
        """The elements of a bucket that come in bursts."""
        return self._elements(part) if self.bursts[part.is_vector][part.strategy] else 0

    def loss(self, parts: _Parts) -> float:
        """The squared error of a plan, in elements lost."""
        return sum([self._lost(part) for part in parts])

    def _bound_us(self, parts: _Parts) -> float:
        """What a plan's step takes at least: all that compute must do, or all that the wire must, once it may start."""
        known = self.busy
        busy = [known.get(part) or self._busy(part) for part in parts]
        compute = self.workload.backward_us + self.workload.finish_us + sum([us for us, _ in busy])
        wire = self.workload.gradients[self._last(parts[0])].ready_us + sum([us for _, us in busy])
        return max(compute, wire)

    def _busy(self, part: _Part) -> tuple[float, float]:
        """How long a bucket occupies compute and the links between hosts."""
        bucket = self._priced(part)
        tasks = [*(task for stage in bucket.stages for task in stage), *bucket.final, bucket.update]
        compute, wire = (
            sum(task.duration_us for task in tasks if task.stream is stream)
            for stream in (Stream.COMPUTE, Stream.INTER)
        )
        self.busy[part] = (compute, wire)
        return compute, wire

    def _simulate(self, parts: _Parts) -> float:
        regions: list[Task] = []
        previous = -1
        for part in parts:
            last = self._last(part)
            regions.append(self._region(previous, last))
            previous = last
        known = self.priced
        buckets = [known.get(part) or self._priced(part) for part in parts]
        return step_time_us(assemble(self.workload, regions, buckets, self.broadcast), self.costs.processors)

    def _priced(self, part: _Part) -> BucketTasks:
        tasks = self.priced.get(part)
        if tasks is None:
            members = [self.workload.gradients[k] for k in self._positions(part)]
            # Named by the last gradient and not by the place in the plan, which other buckets' changes move.
            tasks = self.priced[part] = price_bucket(
                self._last(part),
                [gradient.shape for gradient in members],
                self._strategy(part),
                sum(gradient.update_us for gradient in members),
                self.costs,
                self.cluster,
                commits=self.workload.commits,
                velocity=self.workload.keeps_velocity,
            )
        return tasks

    def _region(self, previous: int, last: int) -> Task:
        task = self.regions.get((previous, last))
        if task is None:
            ready = [gradient.ready_us for gradient in self.workload.gradients]
            us = ready[last] - (ready[previous] if previous >= 0 else 0.0)
            task = self.regions[previous, last] = Task(f"region {last}", Stream.COMPUTE, us)
        return task

    def _lost(self, part: _Part) -> float:
        lost = self.lost.get(part)
        if lost is None:
            lost = self.lost[part] = self._elements(part) * self.errors[part.is_vector][part.strategy]
        return lost

    # Buckets

    def _last(self, part: _Part) -> int:
        return self.members[part.is_vector][part.stop - 1]

    def _positions(self, part: _Part) -> list[int]:
        return self.members[part.is_vector][part.start : part.stop]

    def _elements(self, part: _Part) -> int:
        return sum(self.elements[k] for k in self._positions(part))

    def _strategy(self, part: _Part) -> Strategy:
        return self.choices[part.is_vector][part.strategy]

    def _ordered(self, parts: Sequence[_Part]) -> _Parts:
        return tuple(sorted(parts, key=self._last))

    def plan(self, parts: _Parts) -> Plan:
        buckets: list[Bucket] = []
        for part in parts:
            members = [self.workload.gradients[k] for k in self._positions(part)]
            names, sizes = tuple(g.name for g in members), tuple(g.elements for g in members)
            buckets.append(Bucket(names, sizes, self._strategy(part)))
        return Plan(tuple(buckets))

    def alternatives(self, parts: _Parts) -> tuple[tuple[Alternative, ...], ...]:
        """What the step would be had one bucket another strategy, all else the same."""
        return tuple(
            tuple(
                Alternative(self._strategy(other), self.step_us((*parts[:k], other, *parts[k + 1 :])))
                for other in self._other_strategies(part)
            )
            for k, part in enumerate(parts)
        )

    # Search

    def start(self, cap: float, strategy: int) -> _Parts:
        """Buckets of at most `cap` bytes in ready order; vectors take the matrices' strategy if they may."""
        parts: list[_Part] = []
        for is_vector, members in self.members.items():
            number = strategy
            if is_vector:
                wanted = self.choices[False][strategy]
                number = self.choices[True].index(wanted) if wanted in self.choices[True] else 0
            begun, size = 0, 0
            for k, position in enumerate(members):
                more = 4 * self.elements[position]
                if k > begun and size + more > cap:
                    parts.append(_Part(is_vector, begun, k, number))
                    begun, size = k, 0
                size += more
            if members:
                parts.append(_Part(is_vector, begun, len(members), number))
        return self._ordered(parts)

    def best_dense(self) -> tuple[_Parts, float]:
        """The fastest plan that compresses nothing."""
        numbers = [k for k, strategy in enumerate(self.choices[False]) if strategy.is_dense]
        return self._improve_best([self.start(cap, k) for k in numbers for cap in CAPS], dense_only=True)

    def best(self, dense: _Parts) -> tuple[_Parts, float]:
        """The fastest plan of all; `dense` if none is faster."""
        numbers = range(len(self.choices[False]))
        return self._improve_best([dense, *(self.start(cap, k) for k in numbers for cap in CAPS)], dense_only=False)

    def stays_dense(self) -> bool:
        """Whether no plan of those that a search starts from gains enough to leave dense; stops when that is clear."""
        workload, costs = self.workload, self.costs
        numbers = range(len(self.choices[False]))
        dense = [k for k in numbers if self.choices[False][k].is_dense]
        caps = [cap for cap in CAPS if 4 * sum(self.elements) <= _FLIP_BUCKETS * cap]
        dense_us = min(self.step_us(self.start(cap, k)) for k in dense for cap in caps)
        error = costs.error_of(workload.free_us, dense_us)
        if not _leaves_dense(dense_us, workload.free_us, error):
            return True  # not even without any communication
        others = (self.start(cap, k) for k in reversed(numbers) if k not in dense for cap in caps)
        return not any(_leaves_dense(dense_us, self.step_us(parts), error) for parts in others)

    def _improve_best(self, starts: list[_Parts], *, dense_only: bool) -> tuple[_Parts, float]:
        distinct = list(dict.fromkeys(starts))
        chosen = [starts[0], *sorted(distinct, key=self.step_us)[:_STARTS]]
        ends = [self._improve(start, dense_only) for start in dict.fromkeys(chosen)]
        best = min(ends, key=self.step_us)
        return best, self.step_us(best)

    def _improve(self, parts: _Parts, dense_only: bool) -> _Parts:
        """Change one bucket at a time, round by round, until a round no longer helps."""
        limit = len(self.known) + _EVALUATIONS
        while True:
            before_us = self.step_us(parts)
            k = 0
            while k < len(parts) and len(self.known) < limit:
                parts, k = self._better(parts, k, dense_only), k + 1
            if self.step_us(parts) >= before_us * (1 - _WORTH_A_ROUND):
                return parts

    def _better(self, parts: _Parts, k: int, dense_only: bool) -> _Parts:
        """The best of a plan and what can be made of it by changing bucket k."""
        best, us, loss = parts, self.step_us(parts), self.loss(parts)
        for candidate in self._neighbours(parts, k, dense_only):
            if self._bound_us(candidate) > us * (1 + _SAME):
                continue
            candidate_us = self.step_us(candidate)
            if candidate_us > us * (1 + _SAME):
                continue
            candidate_loss = self.loss(candidate)
            if candidate_us < us * (1 - _SAME) or candidate_loss < loss:
                best, us, loss = candidate, candidate_us, candidate_loss
        return best

    def _neighbours(self, parts: _Parts, k: int, dense_only: bool) -> Iterator[_Parts]:
        part = parts[k]
        for other in self._other_strategies(part):
            if not dense_only or self._strategy(other).is_dense:
                yield (*parts[:k], other, *parts[k + 1 :])
        others = (*parts[:k], *parts[k + 1 :])
        for cut in self._cuts(part):
            yield self._ordered((*others, part._replace(stop=cut), part._replace(start=cut)))
        following = next((j for j in range(k + 1, len(parts)) if parts[j].is_vector == part.is_vector), None)
        if following is None:
            return
        after = parts[following]
        others = (*parts[:k], *parts[k + 1 : following], *parts[following + 1 :])
        yield self._ordered((*others, after._replace(start=part.start)))
        if part.strategy != after.strategy:
            yield self._ordered((*others, part._replace(stop=after.stop)))
        for border in (part.stop - 1, part.stop + 1):
            if part.start < border < after.stop:
                yield self._ordered((*others, part._replace(stop=border), after._replace(start=border)))

    def _other_strategies(self, part: _Part) -> list[_Part]:
        numbers = range(len(self.choices[part.is_vector]))
        return [part._replace(strategy=number) for number in numbers if number != part.strategy]

    def _cuts(self, part: _Part) -> list[int]:
        """Where to split a bucket: everywhere if it is short, else at even places."""
        inner = part.stop - part.start - 1
        if inner <= _SPLITS:
            return list(range(part.start + 1, part.stop))
        return [part.start + 1 + (inner - 1) * k // (_SPLITS - 1) for k in range(_SPLITS)]
