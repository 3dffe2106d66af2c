"""Every published strategy runs on real ranks, and gives what it means in plain torch, to the bit.

A model has one parameter for each strategy, and a plan one bucket for each parameter, so that one compiled step runs
them all. Gradients are small whole numbers: sums of them are exact in whatever order the network adds.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from helpers.strategy_meaning import meaning
from helpers.strategy_space import Phase, Space, published_space, strategies_in, ways_through
from torch import Tensor, nn

import fxcomp
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import parse_compressor
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Device, Strategy

COMPRESSORS = ("bf16", "int8(block=16)", "topk(0.1)")
"""One that is linear, one that quantises, one that is sparse."""
SHAPE = (6, 15)
SIZE = 6 * 15
STEPS = 2
"""The second step sends what the first leaves out."""


class Parameters(nn.Module):
    """So many parameters, all zero. The loss is linear: a batch holds their gradients."""

    def __init__(self, count: int):
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(SHAPE)) for _ in range(count)])


def loss(model: Parameters, batch: Tensor) -> Tensor:
    return torch.dot(torch.cat([parameter.flatten().float() for parameter in model.all]), batch)


def gradients(step: int, rank: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-40, 41, (count * SIZE,), generator=generator).float()


def published(compressor: str) -> list[Strategy]:
    """The published paths; every third one compresses on the cpu."""
    spaces = [published_space(parse_compressor(compressor), devices=(device,)) for device in Device]
    on_gpu, on_cpu = (list(strategies_in(space)) for space in spaces)
    return [there if number % 3 else here for number, (there, here) in enumerate(zip(on_gpu, on_cpu, strict=True))]


def cluster_of(shape: str) -> Cluster:
    return Cluster.parse(f"{shape}, inter 1gbit@50us, intra 50gbit@5us")


def train(shape: str, texts: list[str]) -> tuple[str, list[str]]:
    """Digest what this rank has trained, and list the strategies that stray from their meaning."""
    cluster, strategies = cluster_of(shape), list(map(Strategy.parse, texts))
    rank, count = dist.get_rank(), len(strategies)
    model = Parameters(count)
    plan = plan_in_turns(model, strategies[::-1])
    step = fxcomp.compile_step(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=1.0),
        gradients(0, rank, count),
        cluster=cluster,
        compress=fxcomp.Compress(plan=plan, feedback=ErrorFeedback(everywhere=True)),
        checks=fxcomp.Checks(verify=1, replan="off"),
    )
    for number in range(STEPS):
        step(gradients(number, rank, count))
    step.close()
    mine = range(rank, count, cluster.world_size)  # ranks share the work of comparing
    strays = [
        str(strategies[number])
        for number in mine
        if not torch.equal(model.all[number].detach(), trained(strategies[number], cluster, number, count))
    ]
    return replica_fingerprint(model), strays


def trained(strategy: Strategy, cluster: Cluster, number: int, count: int, steps: int = STEPS) -> Tensor:
    """Return a parameter's value after these steps, by the meaning of its strategy."""
    value, residuals = torch.zeros(SHAPE), None
    for step in range(steps):
        given = [gradients(step, rank, count)[number * SIZE :][:SIZE] for rank in range(cluster.world_size)]
        told = meaning(strategy, [SHAPE], cluster, given, residuals)
        residuals = [slot.residuals for slot in told.slots]
        value.sub_(told.results[0].view(SHAPE))
    return value


def check(shape: str, strategies: list[Strategy]) -> None:
    ranks = cluster_of(shape).world_size
    results = run_ranks(ranks, train, shape, list(map(str, strategies)), timeout_s=900.0)
    assert len({fingerprint for fingerprint, _ in results}) == 1
    assert [strays for _, strays in results] == [[]] * ranks


@pytest.mark.parametrize(("shape", "first", "every"), [("2x1", 0, 4), ("1x2", 2, 4), ("2x2", 0, 3)])
@pytest.mark.one_in(3)
def test_published_strategies_give_what_they_mean(shape: str, first: int, every: int):
    """A part of them, in which compressors take turns."""
    taken = [choices[number // 3 % 3] for number, choices in enumerate(zip(*map(published, COMPRESSORS), strict=True))]
    check(shape, taken[first::every])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "compressor"),
    [*zip(("2x1", "1x2", "2x1"), COMPRESSORS, strict=True), *(("2x2", compressor) for compressor in COMPRESSORS)],
)
def test_every_published_strategy_gives_what_it_means_with_each_compressor(shape: str, compressor: str):
    check(shape, published(compressor))


def train_in(dtype: torch.dtype, shape: str, texts: list[str]) -> tuple[str, list[tuple[str, float]]]:
    """Digest what this rank has trained in one step, and list the strategies that are far from their meaning."""
    cluster, strategies = cluster_of(shape), list(map(Strategy.parse, texts))
    rank, count = dist.get_rank(), len(strategies)
    model = Parameters(count).to(dtype)
    step = fxcomp.compile_step(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=1.0),
        gradients(0, rank, count),
        cluster=cluster,
        compress=fxcomp.Compress(plan=plan_in_turns(model, strategies[::-1]), feedback=ErrorFeedback(everywhere=True)),
        checks=fxcomp.Checks(replan="off"),
    )
    step(gradients(0, rank, count))
    step.close()
    strays: list[tuple[str, float]] = []
    for number in range(rank, count, cluster.world_size):
        expected = trained(strategies[number], cluster, number, count, steps=1)
        off = (model.all[number].detach() - expected).abs().max() / expected.abs().max()
        if off > ANOTHER_LEVEL:
            strays.append((str(strategies[number]), off.item()))
    return replica_fingerprint(model), strays


ANOTHER_LEVEL = 2e-2
"""Relative to the largest: int8 may round to another level after a sum that was rounded otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", ["2x2", "2+1"])
def test_strategies_mean_the_same_for_gradients_of_other_types(shape: str, dtype: torch.dtype):
    int8, ways = "int8(block=16)", ((Phase(Level.INTRA, (CollectiveKind.REDUCE,)), Phase(Level.INTER)),)
    uneven = list(strategies_in(Space(ways=ways, compressors=(parse_compressor(int8),))))
    texts = list(map(str, published(int8) if shape == "2x2" else uneven))
    results = run_ranks(cluster_of(shape).world_size, train_in, dtype, shape, texts, timeout_s=900.0)
    assert len({fingerprint for fingerprint, _ in results}) == 1
    assert [strays for _, strays in results] == [[] for _ in results]


@pytest.mark.slow
def test_mixed_compressors_and_sums_of_payloads_give_what_they_mean():
    compressors = (parse_compressor("int4(block=16)"), parse_compressor("bf16"))
    ways = ways_through(cluster_of("2x2"))
    space = Space(ways=ways, compressors=compressors, mixes_compressors=True, most_compressions=2)
    check("2x2", list(strategies_in(space))[::14])


def test_hosts_that_differ_give_what_it_means():
    """Sums inside hosts are dense, by their first ranks; between hosts everything goes."""
    ways = ((Phase(Level.INTRA, (CollectiveKind.REDUCE,)), Phase(Level.INTER)),)
    check("2+1", list(strategies_in(Space(ways=ways, compressors=(parse_compressor("int8(block=16)"),)))))
