"""Apply a plan to the gradients of workers in one process: each part of a gradient by its own bucket's strategy.

    PlanExchange.use(plan)        from the next step on; everything owed goes along
    PlanExchange.apply(gradients) the mean that every worker would apply
    PlanExchange.look(number)     the error table of the last step's gradients and of what was left out before

Compressors never mix parameters, so buckets of equal strategies are run as one. Where a plan changes, a worker's
residual stays with its gradient. An owner's residual, which is in the unit of the mean, joins that of every worker:
their mean is the same. A strategy without error feedback delivers what is owed in its first step. PowerSGD's factors go
along where the rank is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import lcm, prod

import torch
from budget_tasks import BudgetTask
from torch import Tensor

from fxcomp.compressors import Compressor
from fxcomp.compressors.randomness import key_of
from fxcomp.error_tables import Draw, ErrorTable, measure
from fxcomp.plan.plan import Plan
from fxcomp.plan.shards import cut_points
from fxcomp.plan.strategy import Strategy
from fxcomp.testing import Replica, Shard, average, replicas_of
from fxcomp.testing.rounds import fresh_state

Piece = tuple[range, tuple[int, ...]]
"""A part of a gradient: its place among all values, and its shape."""
Factors = dict[tuple[range, str], list[Tensor]]
"""A worker's state of each piece under a compressor, by worker."""


@dataclass(frozen=True)
class StepError:
    """The errors of one step, of the mean that was applied."""

    of_plan: float
    """The sum of squares times error, over the sum of squares."""
    of_values: float
    """|applied - mean v|² / |mean v|² of all values at once."""
    of_gradients: dict[str, float]
    """The same of each gradient."""


@dataclass
class Group:
    """All pieces of one strategy, as one bucket."""

    strategy: Strategy
    pieces: list[Piece]
    workers: int
    seed: int
    replicas: list[Replica] = field(default_factory=list[Replica])
    """Of one compression."""
    shards: list[Shard] = field(default_factory=list[Shard])
    """Of two."""
    due: Tensor | None = None
    """By worker: what is delivered in the first step, because nothing is fed back."""

    def __post_init__(self) -> None:
        self.sizes = tuple(len(extent) for extent, _ in self.pieces)
        self.shapes = [shape for _, shape in self.pieces]
        self.places = torch.cat([torch.arange(extent.start, extent.stop) for extent, _ in self.pieces])

    def start(self, owed: Tensor, factors: Factors) -> None:
        """Begin with what each worker owes, a row each, and with the factors of plans before."""
        compressors = self.strategy.compressors
        if not compressors or not compressors[0].needs_error_feedback:
            self.due = owed if owed.any() else None
        if len(compressors) == 1:
            self.replicas = self._replicas(self._bound(compressors[0]), owed, factors)
        elif compressors:
            self.shards = self._shards(compressors[0], compressors[1], owed)

    def _bound(self, compressor: Compressor) -> Compressor:
        return compressor.bound_to(self.shapes, self.workers)

    def _replicas(self, bound: Compressor, owed: Tensor, factors: Factors) -> list[Replica]:
        found = replicas_of(bound, self.sizes, self.workers, feedback=bound.needs_error_feedback, seed=self.seed)
        unit = self.workers if bound.is_linear else 1  # packing divides what is summed on the wire
        text = str(self.strategy.compressors[0])
        for worker, replica in enumerate(found):
            if replica.residual is not None:
                replica.residual.copy_(owed[worker] / unit)
            if replica.state is not None and bound.facts.state_from_payload:
                parts = list(torch.split_with_sizes(replica.state, self._states(bound)))
                known = [factors.get((extent, text)) for extent, _ in self.pieces]
                kept = [part if old is None else old[worker] for part, old in zip(parts, known, strict=True)]
                replica.state = torch.cat(kept)
        return found

    def _states(self, bound: Compressor) -> list[int]:
        return [bound.of_segment(index).state_elements(size) for index, size in enumerate(self.sizes)]

    def _shards(self, first: Compressor, second: Compressor, owed: Tensor) -> list[Shard]:
        """A shard a worker, as of one bucket."""
        borders = cut_points(self.sizes, self.workers, lcm(first.grain, second.grain))
        found: list[Shard] = []
        for number, (low, high) in enumerate(pairwise(borders)):
            inside, key = _between(self.sizes, low, high), key_of(self.seed, "shard", number)
            workers = replicas_of(first, inside, self.workers, feedback=first.needs_error_feedback, seed=key)
            for worker, replica in enumerate(workers):
                if replica.residual is not None:
                    replica.residual.copy_(owed[worker, low:high])
            residual = torch.zeros(high - low) if second.needs_error_feedback else None
            owner = Replica(residual, fresh_state(second, inside, rank=self.workers, seed=key))
            found.append(Shard(inside, workers, owner))
        return found

    def owed(self) -> Tensor:
        """List each worker's residual, in the unit of its own gradient, without those of shard owners."""
        if self.due is not None:
            return self.due
        if self.shards:
            rows = [[each.workers[worker].residual for each in self.shards] for worker in range(self.workers)]
            return torch.stack([self._joined(row) for row in rows])
        if not self.replicas or self.replicas[0].residual is None:
            return torch.zeros(self.workers, sum(self.sizes))
        unit = self.workers if self.strategy.compressors[0].is_linear else 1
        return unit * torch.stack([each.residual for each in self.replicas if each.residual is not None])

    def owed_by_owners(self) -> Tensor:
        """Return the shard owners' residuals of the mean."""
        return self._joined([each.owner.residual for each in self.shards]) if self.shards else torch.zeros(1)

    def _joined(self, parts: Sequence[Tensor | None]) -> Tensor:
        sizes = [sum(shard.segments) for shard in self.shards]
        return torch.cat([torch.zeros(size) if part is None else part for part, size in zip(parts, sizes, strict=True)])

    def factors(self) -> Factors:
        """The state of each piece whose compressor goes on from the last step's payload."""
        if len(self.strategy.compressors) != 1 or not self.strategy.compressors[0].facts.state_from_payload:
            return {}
        states = [each.state for each in self.replicas if each.state is not None]
        sizes = self._states(self._bound(self.strategy.compressors[0]))
        parts = [torch.split_with_sizes(state, sizes) for state in states]
        text = str(self.strategy.compressors[0])
        return {
            (extent, text): [of_worker[number].clone() for of_worker in parts]
            for number, (extent, _) in enumerate(self.pieces)
        }

    def mean(self, buckets: list[Tensor]) -> Tensor:
        """The mean of all workers' values as the strategy gives it."""
        if self.due is not None:
            buckets = [bucket + due for bucket, due in zip(buckets, self.due, strict=True)]
            self.due = None
        compressors = self.strategy.compressors
        if not compressors:
            return torch.stack(buckets).mean(dim=0)
        if len(compressors) == 1:
            return average(compressors[0], buckets, self.replicas, self.sizes, self.shapes)
        sizes = [sum(shard.segments) for shard in self.shards]
        parts = [torch.split_with_sizes(bucket, sizes) for bucket in buckets]
        decoded: list[Tensor] = []
        for number, shard in enumerate(self.shards):
            own = average(compressors[0], [part[number] for part in parts], shard.workers, shard.segments)
            decoded.append(average(compressors[1], [own], [shard.owner], shard.segments))
        return torch.cat(decoded)


class PlanExchange:
    """Workers under a plan that may change. Plans are of flat strategies, in one shot or two."""

    def __init__(self, task: BudgetTask, seed: int = 0) -> None:
        self._task, self._seed, self._groups = task, seed, list[Group]()
        self._gradients, self._owed = list[Tensor](), list[Tensor]()

    def use(self, plan: Plan) -> None:
        """Take the steps from now on by this plan."""
        size, workers = self._task.task.start.numel(), self._task.task.workers
        owed, factors = self.owed(), Factors()
        for group in self._groups:
            owed[:, group.places] += group.owed_by_owners()
            factors |= group.factors()
        self._groups = [
            Group(Strategy.parse(text), pieces, workers, key_of(self._seed, text) % 2**31)
            for text, pieces in _by_strategy(plan, self._task).items()
        ]
        assert sum(sum(group.sizes) for group in self._groups) == size, "a plan covers all gradients"
        for group in self._groups:
            group.start(owed[:, group.places], factors)

    def owed(self) -> Tensor:
        """Stack the workers' residuals, a row each."""
        found = torch.zeros(self._task.task.workers, self._task.task.start.numel())
        for group in self._groups:
            found[:, group.places] = group.owed()
        return found

    def apply(self, gradients: list[Tensor], *, keep: bool = False) -> Tensor:
        """Make the mean. `keep` remembers the step for `look`."""
        if keep:
            self._gradients, self._owed = gradients, list(self.owed())
        found = torch.empty_like(gradients[0])
        for group in self._groups:
            found[group.places] = group.mean([each[group.places] for each in gradients])
        return found

    def apply_measured(self, gradients: list[Tensor], *, keep: bool = False) -> tuple[Tensor, StepError]:
        """Make the mean and compare it with that of all that it was made from."""
        given = torch.stack(gradients).mean(dim=0) + self.owed().mean(dim=0)
        for group in self._groups:
            given[group.places] += group.owed_by_owners()
        found = self.apply(gradients, keep=keep)
        own = torch.stack([each.double().square() for each in gradients]).mean(dim=0)
        squares, whole, lost = (
            [float(each.sum()) for each in torch.split_with_sizes(values, self._task.task.segments)]
            for values in (own, given.double().square(), (given - found).double().square())
        )
        errors = [left / all_of_it if all_of_it else 0.0 for left, all_of_it in zip(lost, whole, strict=True)]
        spent = sum(weight * error for weight, error in zip(squares, errors, strict=True))
        of_gradients = dict(zip(self._task.names, errors, strict=True))
        return found, StepError(spent / (sum(squares) or 1.0), sum(lost) / (sum(whole) or 1.0), of_gradients)

    def look(self, number: int) -> ErrorTable:
        """Measure the errors of the step that was kept, as all workers together do."""
        gradients = [self._task.parts(each) for each in self._gradients]
        residuals = [self._task.parts(each) for each in self._owed]
        return on_all(
            len(gradients),
            lambda worker, add_up: measure(
                gradients[worker], residuals[worker], draw=Draw(worker, number), all_reduce=add_up
            ),
        )


AddUp = Callable[[Tensor], object]


def on_all(workers: int, work: Callable[[int, AddUp], ErrorTable]) -> ErrorTable:
    """Run what all workers do together, a thread each, and return the first one's result."""
    barrier, brought = threading.Barrier(workers), list[Tensor]([torch.empty(0)] * workers)
    found = list[ErrorTable]([ErrorTable()] * workers)

    def run(worker: int) -> None:
        def add_up(tensor: Tensor) -> None:
            brought[worker] = tensor.clone()
            barrier.wait()
            total = torch.stack(brought).sum(dim=0)
            barrier.wait()
            tensor.copy_(total)

        try:
            found[worker] = work(worker, add_up)
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].rows, "a worker has failed"
    assert found[0].rows == found[-1].rows, "all workers find the same table"
    return found[0]


def _by_strategy(plan: Plan, task: BudgetTask) -> dict[str, list[Piece]]:
    starts = dict(zip(task.names, accumulate((0, *task.task.segments)), strict=False))
    found: dict[str, list[Piece]] = {}
    for bucket in plan.buckets:
        pieces = found.setdefault(str(bucket.strategy), [])
        for name, extent, shape in zip(bucket.names, bucket.extents, bucket.shapes(task.shapes), strict=True):
            first = starts[name] + extent.start
            assert len(extent) == prod(shape), "a part has as many values as its shape"
            pieces.append((range(first, first + len(extent)), shape))
    return found


def _between(sizes: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """The sizes of what lies between two borders, parameter by parameter."""
    edges = [0, *accumulate(sizes)]
    inside = (min(stop, high) - max(start, low) for start, stop in pairwise(edges))
    return tuple(size for size in inside if size > 0)
