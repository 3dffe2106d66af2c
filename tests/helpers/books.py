"""A job of several ranks whose steps are arithmetic, and books of what was applied and what is owed."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import torch
from torch import Tensor

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import Compressor
from fxcomp.errors import BadStrategy
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.legs import Route
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.arena import Arena
from fxcomp.runtime.compressor_states import CompressorStates
from fxcomp.state.checkpoint import states_of
from fxcomp.state.checksums import sealed
from fxcomp.state.gradient_state import GradientState, residual_layout, state_layout
from fxcomp.state.saved_state import read_together, restore, state_dict
from fxcomp.testing.rounds import Replica
from helpers.legs import Walker, walk
from helpers.virtual_ranks import VirtualRank, run_virtual

CPU = torch.device("cpu")
SHAPES = {"a": (6, 5), "b": (7,), "c": (4, 3, 2), "d": (1,), "e": (9, 4)}
SIZES = {name: int(torch.tensor(shape).prod()) for name, shape in SHAPES.items()}
CLUSTERS = {shape: Cluster(*shape, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1)) for shape in
            ((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1))}  # fmt: skip
LINKS = {"intra": Link(5.0, 5.0), "inter": Link(50.0, 0.1)}
EVERYWHERE = [*CLUSTERS.values(), Cluster.parse("2x3", **LINKS), Cluster.parse("2+1", **LINKS)]
"""With hosts that have several ranks each, and with hosts that differ."""

EXACT = "topk(1.0)"
GATHERED = ["topk(0.1)", "topk(0.3)", "sign", "int4", "int4(block=8)", "int2", "bf16", EXACT]
LINEAR = ["powersgd(2)", "randomk(0.2)", "shared_int8(stochastic=false)"]


class WhereLossy(ErrorFeedback):
    """Feedback for whatever loses something, so that what is applied and what is owed are all gradients."""

    def surrounds(self, compressor: Compressor) -> bool:
        return str(compressor) != EXACT


FEEDBACK = WhereLossy()

FLAT = [
    "all_reduce@world",
    "compress(A) > all_gather@world > decompress",
    "compress(A) > all_to_all@world > decompress > compress(B) > all_gather@world > decompress",
    "compress(A) > all_to_all@world > decompress > all_gather@world",
    "compress(A) > all_to_all@world > all_gather@world > decompress",
    "compress(A) > gather@world > decompress > compress(B) > broadcast@world > decompress",
    "compress(A) > gather@world > broadcast@world > decompress",
    "reduce_scatter@world > compress(A) > all_gather@world > decompress",
    "reduce@world > compress(A) > broadcast@world > decompress",
    "compress(L) > all_reduce@world > decompress",
    "propose(L) > all_reduce@world > compress(L) > all_reduce@world > decompress",
]
BY_LEVEL = [
    "reduce_scatter@intra > compress(A) > all_gather@inter > decompress > all_gather@intra",
    "reduce_scatter@intra > compress(A) > all_gather@inter > all_gather@intra > decompress",
    "reduce_scatter@intra > compress(A) > all_to_all@inter > decompress > compress(B) > all_gather@inter"
    " > all_gather@intra > decompress",
    "reduce_scatter@intra > compress(L) > all_reduce@inter > decompress > all_gather@intra",
    "all_reduce@intra > compress(A) > all_gather@inter > decompress",
    "reduce@intra > compress(A) > all_gather@inter > decompress > broadcast@intra",
    "compress(A) > all_gather@intra > decompress > compress(B) > all_gather@inter > decompress",
    "compress(A) > all_to_all@intra > decompress > compress(B) > all_to_all@inter > decompress > compress(C)"
    " > all_gather@inter > all_gather@intra > decompress",
    "compress(A) > all_to_all@intra > all_to_all@inter > decompress > compress(B) > all_gather@inter"
    " > all_gather@intra > decompress",
    "reduce_scatter@intra > reduce_scatter@inter > compress(A) > all_gather@inter > decompress > compress(B)"
    " > all_gather@intra > decompress",
]
"""Strategies, in which letters stand for compressors."""


def some_strategy(draw: random.Random, cluster: Cluster) -> Strategy:
    """One of any shape that the cluster allows, with any compressors that the shape allows."""
    while True:
        text = draw.choice([*FLAT, *BY_LEVEL, *BY_LEVEL] if cluster.has_levels else FLAT)
        linear = draw.choice(LINEAR)
        for letter in "ABC":
            text = text.replace(f"({letter})", f"({draw.choice(GATHERED)})")
        try:
            return Strategy.parse(text.replace("(L)", f"({linear})"))
        except BadStrategy:
            continue


# A job of several ranks, whose steps are arithmetic


class Job:
    """All ranks of a step without model, graph or network: its state is the real one."""

    def __init__(self, cluster: Cluster, plan: Plan, steps: int = 0):
        self.cluster, self.plan, self.steps = cluster, plan, steps
        self.carried = [self._fresh(rank) for rank in range(cluster.world_size)]

    def _fresh(self, rank: int) -> GradientState:
        residuals = Arena(residual_layout(self.plan, self.cluster, rank, FEEDBACK), CPU)
        states = CompressorStates(state_layout(self.plan, SHAPES, self.cluster, rank), CPU)
        return GradientState(residuals, states)

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The mean that is applied."""
        self.steps += 1
        together = [{n: mine[n] + kept.owed.get(n, 0.0) for n in SIZES}
                    for mine, kept in zip(gradients, self.carried, strict=True)]  # fmt: skip
        applied: dict[str, Tensor] = {}
        for number, bucket in enumerate(self.plan.buckets):
            held = list(zip(bucket.names, bucket.extents, strict=True))
            flat = [torch.cat([mine[name][e.start : e.stop] for name, e in held]) for mine in together]
            mean = self._reduced(number, bucket, flat)
            for (name, extent), piece in zip(held, torch.split(mean, list(bucket.sizes)), strict=True):
                applied.setdefault(name, torch.zeros(SIZES[name]))[extent.start : extent.stop] = piece
        for kept in self.carried:
            kept.owed = {}
        return applied or dict(together[0])

    def _reduced(self, number: int, bucket: Bucket, flat: list[Tensor]) -> Tensor:
        walkers = [
            Walker(route, value, {leg.slot: self._replica(rank, number, leg.slot) for leg in route.slots})
            for rank, (value, route) in enumerate(zip(flat, self._routes(bucket), strict=True))
        ]
        means = walk(walkers, self.cluster)
        assert all(torch.equal(means[0], mean) for mean in means[1:]), (
            f"ranks end with other means by {bucket.strategy}"
        )
        return means[0]

    def _routes(self, bucket: Bucket) -> list[Route]:
        shapes = bucket.shapes(SHAPES)
        return [route_of(bucket.strategy, shapes, self.cluster, rank) for rank in range(self.cluster.world_size)]

    def _replica(self, rank: int, number: int, slot: int) -> Replica:
        residuals, states = self.carried[rank].residuals, self.carried[rank].compressor_states
        return Replica(
            residuals.of(number, slot) if (number, slot) in residuals.layout else None,
            states.of(number, slot) if self.plan.buckets[number].strategy.compressors[slot].has_state else None,
        )

    def owed(self) -> dict[str, Tensor]:
        """Of the mean gradient, from where the routes say that things lie."""
        ranks = self.cluster.world_size
        total = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
        for kept in self.carried:
            for name, value in kept.owed.items():
                total[name] += value.double() / ranks
        for number, bucket in enumerate(self.plan.buckets):
            whole = torch.zeros(bucket.elements, dtype=torch.float64)
            for rank, route in enumerate(self._routes(bucket)):
                for leg in route.slots:
                    residual = self._replica(rank, number, leg.slot).residual
                    if residual is not None:
                        places = torch.tensor([place for piece in leg.pieces for place in piece], dtype=torch.long)
                        whole[places] += residual.double() * float(leg.unit.weight)
            pieces = torch.split(whole, list(bucket.sizes))
            for name, extent, piece in zip(bucket.names, bucket.extents, pieces, strict=True):
                total[name][extent.start : extent.stop] += piece
        return total

    def saved(self) -> list[dict[str, Any]]:
        """Write each rank's state to a file, and read it back."""
        ranks = self.cluster.world_size
        return [
            through_a_file(sealed(state_dict(kept, self.plan, self.steps, rank, ranks)))
            for rank, kept in enumerate(self.carried)
        ]

    def load(self, given: Sequence[Any]) -> None:
        def work(peer: VirtualRank) -> int:
            kept = self.carried[peer.rank]
            agreed = read_together(states_of(given[peer.rank]), SIZES, peer.sharing())
            assert agreed is not None
            restore(agreed, kept, {name: SIZES[name] for name in sorted(SIZES)}, peer.sharing("restoring"))
            return agreed.steps

        self.steps = run_virtual(self.cluster.world_size, work)[0]

    def follow(self, plan: Plan) -> None:
        """Another plan for the same ranks, without a state in between."""
        before, self.plan = self.carried, plan
        self.carried = [self._fresh(rank) for rank in range(self.cluster.world_size)]

        def work(peer: VirtualRank) -> None:
            before[peer.rank].carry_to(self.carried[peer.rank], SIZES, peer.sharing())

        run_virtual(self.cluster.world_size, work)


def through_a_file(state: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def some_plan(draw: random.Random, cluster: Cluster) -> Plan:
    """Buckets of any parameters or parts, in any order, with strategies that the cluster allows; none on one rank."""
    if cluster.world_size == 1:
        return Plan(())
    members = [(name, part) for name in sorted(SIZES) for part in some_parts(draw, SIZES[name])]
    members = draw.sample(members, len(members))
    cuts = [0, *sorted(draw.sample(range(1, len(members)), draw.randint(0, 2))), len(members)]
    buckets: list[Bucket] = []
    for start, stop in itertools.pairwise(cuts):
        names, parts = zip(*members[start:stop], strict=True)
        starts = tuple(part.start for part in parts)
        buckets.append(Bucket(names, tuple(map(len, parts)), some_strategy(draw, cluster), starts))
    return Plan(tuple(buckets))


def some_parts(draw: random.Random, size: int) -> list[range]:
    """The whole, mostly, or two or three parts of it."""
    pieces = draw.choice([1, 1, 2, 3])
    cuts = [0, *sorted(draw.sample(range(1, size), pieces - 1)), size] if size >= pieces else [0, size]
    return list(itertools.starmap(range, itertools.pairwise(cuts)))


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
    """Sum what was applied, and all mean gradients."""

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
