"""The meaning of strategies in plain torch, and routes that keep to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
from helpers.legs import Walker, walk
from helpers.strategy_meaning import meaning
from helpers.strategy_space import ROOTED, Phase, Space, published_space, strategies_in, ways_through
from torch import Tensor

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import parse_compressor
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import Route
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Collective, Decompress, Step, Strategy
from fxcomp.testing.rounds import Replica

SHAPES = [(7, 3), (5,), (150,)]
COMPRESSORS = ("bf16", "int8(block=16)", "topk(0.05)")
EXACT = 2e-6
"""A few roundings to fp32, of the largest value of a parameter."""
SUMMED_IN_BF16 = 2e-2
GATHERED_INSIDE = Collective(CollectiveKind.GATHER, Level.INTRA)


def cluster(shape: str) -> Cluster:
    return Cluster.parse(f"{shape}, inter 1gbit, intra 10gbit")


@cache
def published(compressor: str) -> tuple[Strategy, ...]:
    return tuple(strategies_in(published_space(parse_compressor(compressor))))


def gradients_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[Tensor]:
    """One for each rank. The second parameter's values are 1e6 times the others'."""
    generator = torch.Generator().manual_seed(0)
    sizes = list(map(math.prod, shapes))
    gradients = [torch.randn(sum(sizes), generator=generator) for _ in range(ranks)]
    for gradient in gradients:
        gradient[sizes[0] : sum(sizes[:2])] *= 1e6
    return gradients


def residuals_of(routes: Sequence[Route]) -> list[list[Tensor]]:
    """Draw what earlier steps may have left, by slot and rank: the same where ranks compress the same."""
    generator = torch.Generator().manual_seed(1)
    residuals: list[list[Tensor]] = []
    for slots in zip(*(route.slots for route in routes), strict=True):
        places = 1 + max(slot.place for slot in slots)
        noise = torch.randn(places, len(routes[0].whole), generator=generator)
        residuals.append([torch.cat([noise[s.place, p.start : p.stop] for p in s.pieces]) for s in slots])
    return residuals


def check(strategy: Strategy, shapes: Sequence[Sequence[int]], on: Cluster) -> None:
    """A bound route gives the meaning's bits; ranks agree; what is applied and what is left out add up."""
    routes = [route_of(strategy, shapes, on, rank) for rank in range(on.world_size)]
    gradients, residuals = gradients_of(shapes, on.world_size), residuals_of(routes)
    told = meaning(strategy, shapes, on, gradients, residuals)
    walkers = [
        Walker(route, gradient, {slot: Replica(each[rank].clone(), None) for slot, each in enumerate(residuals)})
        for rank, (route, gradient) in enumerate(zip(routes, gradients, strict=True))
    ]
    for rank, (result, walked) in enumerate(zip(told.results, walk(walkers, on), strict=True)):
        assert torch.equal(result, told.results[0]), f"{strategy}: rank {rank} ends with other values than rank 0"
        assert torch.equal(result, walked), f"{strategy}: rank {rank} strays from the meaning"
    for number, slot in enumerate(told.slots):
        for rank, walker in enumerate(walkers):
            where = f"{strategy}: slot {number}, rank {rank}"
            kept = walker.replicas[number].residual
            assert kept is not None
            assert torch.equal(slot.residuals[rank], kept), where
            assert routes[rank].slots[number].unit.weight == slot.weights[rank] or not slot.extents[rank], where

    size = len(gradients[0])
    wanted, found = torch.stack(gradients).double().mean(dim=0), told.results[0].double()
    for slot, before in zip(told.slots, residuals, strict=True):
        wanted += replace(slot, residuals=tuple(before)).missing(size)
        found += slot.missing(size)
    adds_payloads = any(
        held.compressor and is_sum(step) for held, step in zip(strategy.held, strategy.steps, strict=False)
    )
    sizes = list(map(math.prod, shapes))
    for left, right in zip(found.split(sizes), wanted.split(sizes), strict=True):
        largest = max(gradient.abs().max() for gradient in (left, right, torch.ones(1)))
        assert (left - right).abs().max() <= (SUMMED_IN_BF16 if adds_payloads else EXACT) * largest, strategy


def is_sum(step: Step) -> bool:
    return isinstance(step, Collective) and step.kind.sums


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("shape", "turn"), [("2x2", 1), ("2x1", 0), ("1x2", 0), ("4x1", 1), ("2x2", 2), ("1x4", 2)])
def test_every_published_path_keeps_to_its_meaning(shape: str, turn: int):
    """Compressors take turns, as the network is the same for all."""
    for number, choices in enumerate(zip(*map(published, COMPRESSORS), strict=True)):
        check(choices[(number + turn) % len(choices)], SHAPES, cluster(shape))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compressor", ["int4(block=16)", "topk(0.05)"])
@pytest.mark.parametrize("shape", ["3x1", "2x3", "3x2", "2x2x2"])
def test_published_paths_keep_to_their_meaning_on_more_ranks(shape: str, compressor: str):
    for strategy in published(compressor)[::7]:
        check(strategy, SHAPES, cluster(shape))


@pytest.mark.parametrize("shape", ["2x1", "4x1", "2x3"])
def test_sizes_that_leave_shards_uneven_or_empty(shape: str):
    ranks, block = cluster(shape).world_size, 16
    for size in (1, ranks - 1, ranks, block * ranks - 1, block * ranks, block * ranks + 1, 97):
        for strategy in published("int8(block=16)")[::23]:
            check(strategy, [(size,)], cluster(shape))


def test_parameters_of_one_value():
    for strategy in published("int4(block=16)")[::3]:
        check(strategy, [(1,), (1,), (1,)], cluster("2x2"))


@pytest.mark.parametrize("shape", ["2x2", "2x3", "2x2x2"])
@pytest.mark.one_in(3)
def test_mixed_compressors_and_sums_of_payloads_keep_to_their_meaning(shape: str):
    on, compressors = cluster(shape), (parse_compressor("int4(block=16)"), parse_compressor("bf16"))
    space = Space(ways=ways_through(on), compressors=compressors, mixes_compressors=True, most_compressions=2)
    found = list(strategies_in(space))
    for strategy in found[:: len(found) // 30]:
        check(strategy, SHAPES, on)


def test_agreements_keep_to_their_meaning():
    space = Space(ways=ways_through(cluster("2x2")), compressors=(parse_compressor("shared_int8(stochastic=false)"),))
    agreed = [strategy for strategy in strategies_in(space) if not strategy.is_dense]
    assert agreed
    for strategy in agreed:
        check(strategy, SHAPES, cluster("2x2"))


@pytest.mark.parametrize("shape", ["2+1", "3+1+2"])
def test_hosts_that_differ_add_up_on_their_first_ranks(shape: str):
    ways = ((Phase(Level.WORLD),), (Phase(Level.INTRA, ROOTED), Phase(Level.INTER)))
    found = list(strategies_in(Space(ways=ways, compressors=(parse_compressor("int8(block=16)"),))))
    kept = [strategy for strategy in found if not forwards_unequal_piles(strategy)]
    assert len(kept) > 40
    for strategy in kept[::4]:
        check(strategy, SHAPES, cluster(shape))


def forwards_unequal_piles(strategy: Strategy) -> bool:
    """Return whether payloads gathered inside hosts travel between them, as many as each host has ranks."""
    pairs = pairwise(strategy.steps)
    return any(step == GATHERED_INSIDE and not isinstance(then, Decompress) for step, then in pairs)


def test_a_placement_out_of_order_keeps_to_the_meaning():
    on = Cluster.parse("2x2, inter 1gbit, intra 10gbit, placed 0 1 1 0")
    for strategy in published("int8(block=16)")[::5]:
        check(strategy, SHAPES, on)


def test_a_gradient_of_one_rank_counts_once():
    """Each rank's share of the mean is 1 / p, whichever rank it is."""
    for shape in ("2x2", "2+1"):
        on = cluster(shape)
        strategy = Strategy.parse("compress(bf16) > gather@intra > decompress > all_reduce@inter > broadcast@intra")
        for owner in range(on.world_size):
            gradients = [torch.full((6,), float(rank == owner)) for rank in range(on.world_size)]
            (result, *_) = meaning(strategy, [(6,)], on, gradients).results
            assert torch.allclose(result, torch.full((6,), 1 / on.world_size), rtol=4e-3)


def test_the_second_residual_is_the_owners_own():
    """Ranks keep what they did not send of a gradient, owners what they did not send of a mean."""
    strategy = Strategy.two_shots(parse_compressor("topk(0.5)"), parse_compressor("topk(0.5)"))
    told = meaning(strategy, [(8,)], cluster("2x1"), [torch.arange(8.0), torch.zeros(8)])
    first, second = told.slots
    assert first.extents == (range(8), range(8))
    assert second.extents == (range(4), range(4, 8))
    assert first.weights == (Fraction(1, 2), Fraction(1, 2))
    assert second.weights == (1, 1)
    assert first.residuals[0].tolist() == [0, 1, 0, 0, 4, 5, 0, 0]
