"""The meaning of strategies in plain torch, and routes that keep to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from legs import run_legs
from torch import Tensor

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.plan.space import Space, published_space, strategies_in, ways_through
from fxcomp.plan.strategy import Strategy
from fxcomp.testing.strategy_meaning import meaning

SHAPES = [(7, 3), (5,), (150,)]
COMPRESSORS = ("bf16", "int8(block=16)", "int4(block=16)", "topk(0.05)")
NEAR = {"bf16": 1e-2, "int8(block=16)": 3e-2, "int4(block=16)": 0.5, "topk(0.05)": 2.0}


def cluster(shape: str) -> Cluster:
    return Cluster.parse(f"{shape}, inter 1gbit, intra 10gbit")


@cache
def published(compressor: str) -> tuple[Strategy, ...]:
    return tuple(strategies_in(published_space(parse_compressor(compressor))))


def gradients_of(shapes: Sequence[Sequence[int]], ranks: int, seed: int = 0) -> list[Tensor]:
    """One for each rank. The second parameter's values are 1e6 times the others'."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(sum(map(math.prod, shapes)), generator=generator) for _ in range(ranks)]
    if len(shapes) > 1:
        start = math.prod(shapes[0])
        for gradient in gradients:
            gradient[start : start + math.prod(shapes[1])] *= 1e6
    return gradients


def check(strategy: Strategy, shapes: Sequence[Sequence[int]], on: Cluster, steps: int = 2) -> None:
    """Take steps with feedback. Routes give the meaning's bits, ranks agree, and what is applied and kept add up."""
    size = sum(map(math.prod, shapes))
    owed = torch.zeros(size, dtype=torch.float64)
    residuals = None
    for step in range(steps):
        gradients = gradients_of(shapes, on.world_size, seed=step)
        told = meaning(strategy, shapes, on, gradients, residuals)
        run = run_legs(strategy, shapes, on, gradients, residuals)
        for rank, (result, ran) in enumerate(zip(told.results, run.results, strict=True)):
            assert torch.equal(result, told.results[0]), f"{strategy}: rank {rank} ends with other values than rank 0"
            assert torch.equal(result, ran), f"{strategy}: rank {rank} strays from the meaning"
        for slot, (leg, legs_residuals) in enumerate(zip(told.slots, run.residuals, strict=True)):
            encodes = [route.slots[slot] for route in run.routes]
            for rank, encode in enumerate(encodes):
                assert torch.equal(leg.residuals[rank], legs_residuals[rank]), f"{strategy}: slot {slot}, rank {rank}"
                if encode.elements:
                    assert encode.unit.weight == leg.weights[rank], f"{strategy}: slot {slot}, rank {rank}"
        residuals = [slot.residuals for slot in told.slots]
        mean = torch.stack(gradients).double().mean(dim=0)
        missing = sum((slot.missing(size) for slot in told.slots), torch.zeros(size, dtype=torch.float64))
        # What earlier steps owe is in: mean + owed = applied + missing.
        wanted = mean + owed
        lost = (told.results[0].double() + missing - wanted).abs()
        scale = torch.stack([g.double().abs() for g in gradients]).amax(dim=0) + owed.abs()
        assert (lost <= 4e-6 * len(strategy.steps) * scale).all() or is_close(lost, scale, shapes), (
            f"{strategy}: {lost.max()}"
        )
        owed = missing


def is_close(lost: Tensor, scale: Tensor, shapes: Sequence[Sequence[int]]) -> bool:
    """Compare by parameter: a value may round as coarsely as the largest of its parameter."""
    sizes = list(map(math.prod, shapes))
    pairs = zip(lost.split(sizes), scale.split(sizes), strict=True)
    return all(part.max() <= 1e-6 * whole.max() for part, whole in pairs if len(part))


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("shape", ["2x1", "1x2", "4x1", "2x2", "1x4"])
def test_every_published_path_keeps_to_its_meaning(shape: str, compressor: str):
    for strategy in published(compressor):
        check(strategy, SHAPES, cluster(shape))
