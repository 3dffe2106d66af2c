"""A job of several ranks whose steps are arithmetic, and books of what was applied and what is owed."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from virtual_ranks import VirtualRank, run_virtual

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.arena import Residuals
from fxcomp.runtime.compressor_states import CompressorStates
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.layouts import residual_layout, shard_of, state_layout
from fxcomp.state.saved_state import Here, read_together, restore, state_dict
from fxcomp.testing import average
from fxcomp.testing.rounds import Replica

CPU = torch.device("cpu")
SHAPES = {"a": (6, 5), "b": (7,), "c": (4, 3, 2), "d": (1,), "e": (9, 4)}
SIZES = {name: int(torch.tensor(shape).prod()) for name, shape in SHAPES.items()}
CLUSTERS = {shape: Cluster(*shape, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1)) for shape in
            ((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1))}  # fmt: skip
COMPRESSORS = [
    "topk(0.1)",
    "topk(0.3)",
    "sign",
    "powersgd(2)",
    "randomk(0.2)",
    "int4",
    "shared_int8(stochastic=false)",
]


# A job of several ranks, whose steps are arithmetic


class Job:
    """All ranks of a step without model, graph or network: its state is the real one."""

    def __init__(self, cluster: Cluster, plan: Plan, steps: int = 0):
        self.cluster, self.plan, self.steps = cluster, plan, steps
        self.carried = [self._fresh(rank) for rank in range(cluster.world_size)]

    def _fresh(self, rank: int) -> GradientState:
        residuals = Residuals(residual_layout(self.plan, self.cluster, rank), CPU)
        states = CompressorStates(state_layout(self.plan, SHAPES, self.cluster, rank), CPU)
        return GradientState(residuals, states)

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The mean that is applied."""
        self.steps += 1
        together = [{n: mine[n] + kept.undelivered.get(n, 0.0) for n in SIZES}
                    for mine, kept in zip(gradients, self.carried, strict=True)]  # fmt: skip
        applied: dict[str, Tensor] = {}
        for number, bucket in enumerate(self.plan.buckets):
            flat = [torch.cat([mine[name] for name in bucket.names]) for mine in together]
            mean = self._reduced(number, bucket, flat)
            applied |= dict(zip(bucket.names, torch.split(mean, list(bucket.sizes)), strict=True))
        for kept in self.carried:
            kept.undelivered = {}
        return applied or dict(together[0])

    def _reduced(self, number: int, bucket: Bucket, flat: list[Tensor]) -> Tensor:
        shards, _ = shard_of(bucket, self.cluster, 0)
        means: list[Tensor] = []
        for place in range(shards):
            segments = bucket.segments(shards, place)
            hosts, leaders = self._parts(flat, shards, place)
            compressor, sizes = bucket.strategy.compressor, [size for _, size in segments]
            if compressor is None:
                means.append(torch.stack(hosts).mean(dim=0))
                continue
            shapes = [(size,) for size in sizes] if shards > 1 else [SHAPES[name] for name in bucket.names]
            kept = [self.carried[rank] for rank in leaders]
            replicas = [Replica(k.residuals.of_bucket(number), self._state(k, number)) for k in kept]
            means.append(average(compressor, hosts, replicas, sizes, shapes))
            for k, replica in zip(kept, replicas, strict=True):
                if replica.state is not None:
                    k.compressor_states.of_bucket(number).copy_(replica.state)
        return torch.cat(means)[: bucket.elements]

    def _parts(self, flat: list[Tensor], shards: int, place: int) -> tuple[list[Tensor], list[int]]:
        """What ranks compress of a shard, and which ranks these are: a host's mean, or each rank's own."""
        if shards == 1:
            return flat, list(range(len(flat)))
        padded = [torch.cat([value, torch.zeros(-len(value) % shards)]) for value in flat]
        part = len(padded[0]) // shards
        hosts: list[Tensor] = []
        ranks: list[int] = []
        for host in range(self.cluster.hosts):
            here = [r for r in range(len(flat)) if self.cluster.placement[r] == host]
            hosts.append(torch.stack([padded[r] for r in here]).mean(dim=0)[place * part : (place + 1) * part])
            ranks.append(next(r for r in here if self.cluster.local_rank(r) == place))
        return hosts, ranks

    def _state(self, kept: GradientState, number: int) -> Tensor | None:
        compressor = self.plan.buckets[number].strategy.compressor
        return kept.compressor_states.of_bucket(number) if compressor is not None and compressor.has_state else None

    def owed(self) -> dict[str, Tensor]:
        """Of the mean gradient, from where the plan says that things lie."""
        ranks = self.cluster.world_size
        total = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
        for rank, kept in enumerate(self.carried):
            for name, value in kept.undelivered.items():
                total[name] += value.double() / ranks
            for number, layout in residual_layout(self.plan, self.cluster, rank).items():
                whole = torch.zeros(layout.padded, dtype=torch.float64)
                part = layout.padded // layout.shards
                whole[layout.shard * part :][:part] = kept.residuals.of_bucket(number).double()
                whole *= layout.shards * layout.divisor / ranks
                pieces = torch.split(whole[: sum(layout.sizes)], list(layout.sizes))
                for name, piece in zip(layout.names, pieces, strict=True):
                    total[name] += piece
        return total

    def saved(self) -> list[dict[str, Any]]:
        """What each rank writes to a file and reads back."""
        ranks = self.cluster.world_size
        return [
            through_a_file(state_dict(kept, self.plan, self.steps, rank, ranks))
            for rank, kept in enumerate(self.carried)
        ]

    def load(self, given: Sequence[Any]) -> None:
        def work(peer: VirtualRank) -> int:
            kept = self.carried[peer.rank]
            here = Here(SIZES, sorted(SIZES), {self.plan.digest}, kept.residuals.slices)
            agreed = read_together(given[peer.rank], here, peer.exchange())
            assert agreed is not None
            restore(agreed, kept, here, peer.exchange("restoring"))
            return agreed.steps

        self.steps = run_virtual(self.cluster.world_size, work)[0]

    def follow(self, plan: Plan) -> None:
        """Another plan for the same ranks, without a state in between."""
        before, self.plan = self.carried, plan
        self.carried = [self._fresh(rank) for rank in range(self.cluster.world_size)]

        def work(peer: VirtualRank) -> None:
            before[peer.rank].carry_to(self.carried[peer.rank], SIZES, peer.exchange())

        run_virtual(self.cluster.world_size, work)


def through_a_file(state: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def some_plan(draw: random.Random, cluster: Cluster) -> Plan:
    """Buckets of any parameters, in any order, each with a strategy that the cluster allows; none on one rank."""
    if cluster.world_size == 1:
        return Plan(())
    names = draw.sample(sorted(SIZES), len(SIZES))
    cuts = [0, *sorted(draw.sample(range(1, len(names)), draw.randint(0, 2))), len(names)]
    buckets: list[Bucket] = []
    for start, stop in itertools.pairwise(cuts):
        named = tuple(names[start:stop])
        compressor = draw.choice([None, *map(parse_compressor, COMPRESSORS)])
        kinds = [Strategy.flat]
        if cluster.ranks_per_host > 1 and cluster.hosts > 1 and "powersgd" not in str(compressor):
            kinds = [Strategy.flat, Strategy.hierarchical, Strategy.hierarchical]
        buckets.append(Bucket(named, tuple(SIZES[n] for n in named), draw.choice(kinds)(compressor)))
    return Plan(tuple(buckets))


def dealt(draw: random.Random, states: list[dict[str, Any]], ranks: int) -> list[Any]:
    """Each state to some rank: its own where there is one, mostly, or all mixed up."""
    hands: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    is_orderly = draw.random() < 0.5
    order = states if is_orderly else draw.sample(states, len(states))
    for number, state in enumerate(order):
        hands[number if number < ranks else draw.randrange(ranks)].append(state)
    return [None if not hand else hand[0] if len(hand) == 1 and draw.random() < 0.7 else hand for hand in hands]


@dataclass
class Books:
    """What was applied, and all mean gradients."""

    due: dict[str, Tensor]
    applied: dict[str, Tensor]

    @classmethod
    def empty(cls) -> Books:
        return cls(*({name: torch.zeros(n, dtype=torch.float64) for name, n in SIZES.items()} for _ in range(2)))

    def train(self, job: Job, generator: torch.Generator, size: float = 1.0) -> None:
        ranks = range(job.cluster.world_size)
        gradients = [{n: size * torch.randn(k, generator=generator) for n, k in SIZES.items()} for _ in ranks]
        applied = job.step(gradients)
        for name in SIZES:
            self.due[name] += torch.stack([mine[name].double() for mine in gradients]).mean(dim=0)
            self.applied[name] += applied[name].double()

    def off_by(self, owed: Mapping[str, Tensor]) -> float:
        return max((self.applied[n] + owed[n] - self.due[n]).abs().max().item() for n in SIZES)
