"""Rounds in one process: what two shots deliver and owe."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxcomp.compressors import Compressor, Int4, TopK, parse_compressor
from fxcomp.plan.legs import cut_points
from fxcomp.testing import Shard, average_in_two_shots, shards_of

SEGMENTS = (700, 3, 0, 1500, 130)
BLOCK = 512  # of sign, and a multiple of those of int4 and int8
SIZE = sum(SEGMENTS)
PAIRS = [
    ("int4", "int4"),
    ("int4", "int8"),
    ("int4(stochastic=true)", "int4(stochastic=true)"),
    ("int8", "int8"),
    ("sign", "sign"),
    ("topk(0.05)", "topk(0.05)"),
    ("topk(0.05)", "int8"),
]


def gradients_of(ranks: int, step: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randn(SIZE, generator=random) for _ in range(ranks)]


def fresh(first: Compressor, second: Compressor, ranks: int, *, owner_feedback: bool = True) -> list[Shard]:
    return shards_of(first, second, SEGMENTS, cut_points(SEGMENTS, ranks, BLOCK), owner_feedback=owner_feedback, seed=7)


def owed(shards: list[Shard]) -> Tensor:
    """Return what residuals of both sides keep from the mean."""
    parts: list[Tensor] = []
    for shard in shards:
        workers = torch.stack([worker.residual for worker in shard.workers if worker.residual is not None])
        owner = 0.0 if shard.owner.residual is None else shard.owner.residual.double()
        parts.append(workers.double().mean(dim=0) + owner)
    return torch.cat(parts)


def missing_after(
    steps: int,
    first: str,
    second: str,
    ranks: int,
    *,
    owner_feedback: bool = True,
    after_step: Callable[[list[Shard]], None] = lambda shards: None,  # noqa: ARG005
) -> float:
    """The largest value that was neither delivered nor is owed, after so many steps."""
    one, two = parse_compressor(first), parse_compressor(second)
    shards = fresh(one, two, ranks, owner_feedback=owner_feedback)
    due, delivered = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for step in range(steps):
        gradients = gradients_of(ranks, step)
        due += torch.stack(gradients).double().mean(dim=0)
        delivered += average_in_two_shots(one, two, gradients, shards).double()
        after_step(shards)
    return (due - delivered - owed(shards)).abs().max().item()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_what_two_shots_do_not_deliver_is_owed(first: str, second: str, ranks: int):
    assert missing_after(20, first, second, ranks) < 1e-5


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_without_the_owners_residual_something_is_lost_in_every_pair(first: str, second: str):
    assert missing_after(20, first, second, 4, owner_feedback=False) > 1e-3


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_an_owner_may_owe_to_its_own_gradient_if_it_counts_the_ranks(first: str, second: str):
    def move(shards: list[Shard], factor: float) -> None:
        for rank, shard in enumerate(shards):
            own, owners = shard.workers[rank].residual, shard.owner.residual
            assert own is not None
            assert owners is not None
            own += factor * owners
            owners.zero_()

    assert missing_after(20, first, second, 4, after_step=lambda shards: move(shards, 4)) < 1e-5
    assert missing_after(20, first, second, 4, after_step=lambda shards: move(shards, 1)) > 1e-3


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_compressors_that_keep_everything_give_the_mean(ranks: int):
    everything = TopK(1.0)
    gradients = [torch.arange(SIZE) + 1000.0 * rank for rank in range(ranks)]
    mean = average_in_two_shots(everything, everything, gradients, fresh(everything, everything, ranks))
    assert torch.equal(mean, sum(gradients[1:], gradients[0]) * (1.0 / ranks))


def test_a_shard_without_values_changes_nothing():
    int4 = Int4()
    shards = shards_of(int4, int4, (5,), cut_points((5,), 4, int4.block))
    assert sorted(shard.segments for shard in shards) == [(), (), (), (5,)]
    assert average_in_two_shots(int4, int4, [torch.ones(5)] * 4, shards).tolist() == [1.0] * 5


def test_random_encoders_of_both_shots_draw_streams_of_their_own():
    random = parse_compressor("int4(stochastic=true)")
    states = [
        tuple(replica.state.tolist())
        for shard in fresh(random, random, 3)
        for replica in (*shard.workers, shard.owner)
        if replica.state is not None
    ]
    keys = [key for state in states for key in state[::2]]
    assert len(keys) == len(set(keys))
