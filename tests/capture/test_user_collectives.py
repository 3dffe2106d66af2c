"""A loss function that communicates trains as it does under DistributedDataParallel."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from helpers.eager import beside_ddp, sgd, trains_as_eager
from helpers.graphs import COSTS
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.frontends.job import Job
from fxcomp.frontends.what_if import capture_job
from fxcomp.graph.edit import is_collective
from fxcomp.pipeline import Compiler
from fxcomp.search.choose import uniform

STEPS = 4


# Losses that communicate


def towers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def contrast(embeddings: Tensor, own: Tensor) -> Tensor:
    target = torch.arange(len(own)) + dist.get_rank() * len(own)
    return nn.functional.cross_entropy(own @ embeddings.T, target)


def gathered_with_gradients(model: nn.Module, batch: Tensor) -> Tensor:
    own = model(batch)
    return contrast(torch.cat(differentiable.all_gather(own)), own)


def gathered_into_a_list(model: nn.Module, batch: Tensor) -> Tensor:
    own = model(batch)
    everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    everyone[dist.get_rank()] = own
    return contrast(torch.cat(everyone), own)


def gathered_functionally(model: nn.Module, batch: Tensor) -> Tensor:
    own = model(batch)
    return contrast(functional.all_gather_tensor_autograd(own, 0, dist.group.WORLD), own)


def reduced_functionally(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    mean = functional.all_reduce(out.mean(0), "sum", dist.group.WORLD) / dist.get_world_size()
    shares = functional.reduce_scatter_tensor(out, "sum", 0, dist.group.WORLD)
    return (out - mean).pow(2).mean() + shares.abs().mean()


def normalised_by_tokens(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
    out = model(batch)
    kept = batch[:, 0] > -0.5
    tokens = kept.sum()
    dist.all_reduce(tokens)
    loss = (out.pow(2).sum(1) * kept).sum() / tokens * dist.get_world_size()
    return loss, {"tokens": tokens}


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Centred(nn.Module):
    """Subtracts the mean over all ranks' samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = towers()

    def forward(self, value: Tensor) -> Tensor:
        out = self.body(value)
        return out - SumOverRanks.apply(out.mean(0)) / dist.get_world_size()


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def all_that_fill_tensors(model: nn.Module, batch: Tensor) -> Tensor:
    """One of each, in eager's own spelling; some asynchronous, one in a smaller group."""
    out, rank, ranks = model(batch), dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        own = out.mean(0)
        largest = out.amax()
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
        whole = own.new_empty(ranks * len(own))
        dist.all_gather_into_tensor(whole, own)
        first = own.clone()
        dist.broadcast(first, 1)
        summed = own.clone()
        dist.reduce(summed, 0)
        share = own.new_empty(len(own))
        dist.reduce_scatter_tensor(share, whole.clone())
        parts = [torch.empty_like(own) for _ in range(ranks)] if rank == 1 else None
        dist.gather(own, parts, dst=1)
        scattered = torch.empty_like(own)
        dist.scatter(scattered, [own * (k + 1) for k in range(ranks)] if rank == 0 else None, src=0)
        exchanged = torch.empty_like(whole)
        dist.all_to_all_single(exchanged, whole * (rank + 1))
        alone = own * 3
        dist.all_reduce(alone, group=GROUPS[rank])
        dist.barrier()
        assert work is not None
        work.wait()
        told = first + share + scattered + alone + largest + exchanged.sum()
        told = told + (summed if rank == 0 else 0) + (sum(parts) if parts is not None else 0)
    return (out * told).mean()


GROUPS: list[Any] = []

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any]]] = {
    "gathered with gradients": (towers, gathered_with_gradients),
    "gathered into a list": (towers, gathered_into_a_list),
    "gathered functionally": (towers, gathered_functionally),
    "reduced functionally": (towers, reduced_functionally),
    "normalised by tokens": (towers, normalised_by_tokens),
    "all_reduce in a module": (Centred, squares),
    "all that fill tensors": (towers, all_that_fill_tensors),
}

LENGTHS = {0: [4, 6, 8, 10], 1: [6, 4, 6, 12]}
"""Rank 1 has its own where payloads do not depend on them. From the third on, sizes are symbols."""


def batch_of(case: str, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    differs = case in ("normalised by tokens", "all_reduce in a module")
    return torch.randn(LENGTHS[rank if differs else 0][step], 6, generator=generator)


# What is refused


def with_objects(model: nn.Module, batch: Tensor) -> Tensor:
    dist.all_gather_object([None] * dist.get_world_size(), {"rows": len(batch)})
    return squares(model, batch)


def with_objects_from_rank_0(model: nn.Module, batch: Tensor) -> Tensor:
    dist.broadcast_object_list([len(batch)])
    return squares(model, batch)


def with_messages(model: nn.Module, batch: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(batch.sum(), 1)
    else:
        dist.recv(batch.sum(), 0)
    return squares(model, batch)


def with_a_new_group(model: nn.Module, batch: Tensor) -> Tensor:
    dist.new_group([0, 1])
    return squares(model, batch)


KEPT = torch.zeros(())


def into_a_tensor_that_stays(model: nn.Module, batch: Tensor) -> Tensor:
    dist.all_reduce(KEPT)
    return squares(model, batch) * KEPT


def deciding_by_a_sum(model: nn.Module, batch: Tensor) -> Tensor:
    total = batch.sum()
    dist.all_reduce(total)
    return squares(model, batch) * (2 if total > 0 else 1)


def synchronised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any], str, str]] = {
    "objects": (towers, with_objects, "Unsupported", "a collective of Python objects"),
    "objects from rank 0": (towers, with_objects_from_rank_0, "Unsupported", "a collective of Python objects"),
    "messages": (towers, with_messages, "Unsupported", "torch.distributed's "),
    "a new group": (towers, with_a_new_group, "Unsupported", "a new process group"),
    "a tensor that stays": (towers, into_a_tensor_that_stays, "Unsupported", "which outlives the step"),
    "a decision": (towers, deciding_by_a_sum, "CaptureFailed", "decides by the values of tensors"),
    "SyncBatchNorm": (synchronised, squares, "Unsupported", "1 is a SyncBatchNorm"),
}


# On the ranks


def follow_ddp() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    GROUPS[:] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return {case: _attempt(case) for case in CASES} | {case: _refusal(case) for case in REFUSED}


def _refusal(case: str) -> tuple[str, str]:
    build, loss_fn, _, _ = REFUSED[case]
    model = build()
    try:
        fxcomp.compile_step(
            model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 6), compress="dense"
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "compiled"


def _attempt(case: str) -> Any:
    try:
        return _follow(case)
    except Exception:
        return traceback.format_exc()


def _follow(case: str) -> dict[str, Any]:
    build, loss_fn = CASES[case]
    torch.manual_seed(3)
    model = build()
    distances, _ = beside_ddp(model, loss_fn, [batch_of(case, k, dist.get_rank()) for k in range(STEPS)])
    return {"distance": max(distances.values()), "fingerprint": replica_fingerprint(model)}


# What must hold


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, follow_ddp)


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_communicates_trains_as_under_ddp(on_two_ranks: Any, case: str):
    for numbers in on_two_ranks:
        assert isinstance(numbers[case], dict), numbers[case]
        assert numbers[case]["distance"] <= 1e-6
    assert len({numbers[case]["fingerprint"] for numbers in on_two_ranks}) == 1


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_repeated_is_refused_by_name_on_all_ranks(on_two_ranks: Any, case: str):
    _, _, error, text = REFUSED[case]
    for numbers in on_two_ranks:
        assert numbers[case][0] == error, numbers[case][1]
        assert text in numbers[case][1]
    if error == "Unsupported" and case != "SyncBatchNorm":
        assert "at test_user_collectives.py:" in numbers[case][1]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered_if_there_are_ranks(model: nn.Module, batch: Tensor) -> Tensor:
    if not dist.is_initialized():
        return squares(model, batch)
    count = batch.new_full((), float(len(batch)))
    dist.all_reduce(count)
    return model(batch).pow(2).sum() / count


def alone(loss_fn: Any) -> fxcomp.CompiledStep:
    return trains_as_eager(towers(), loss_fn, [torch.ones(4, 6)] * 2, sgd, verify=1)


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_rank_is_eager_exactly():
    step = alone(gathered_if_there_are_ranks)
    assert "rt.exchange(" in step.source
    assert any(span.task.name.startswith("exchange ") for span in step.timeline.spans)


@pytest.mark.usefixtures("group_of_one")
def test_a_process_group_that_is_gone_is_missed_by_name():
    group = dist.new_group([0])

    def summed(model: nn.Module, batch: Tensor) -> Tensor:
        total = batch.sum()
        dist.all_reduce(total, group=group)
        return squares(model, batch) * total

    model = towers()
    step = fxcomp.compile_step(model, summed, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 6))
    dist.destroy_process_group(group)
    with pytest.raises(fxcomp.errors.StepChanged, match=r"no longer exists.\n  Make groups once"):
        step(torch.ones(4, 6))


def test_without_a_process_group_a_loss_that_asks_first_is_eager_exactly():
    alone(gathered_if_there_are_ranks)


def test_a_loss_that_needs_a_process_group_says_so_where_there_is_none():
    with pytest.raises(fxcomp.errors.BadCall, match=r"at test_user_collectives.py:\d+: .*\n.*a group of one"):
        alone(gathered_into_a_list)


def test_a_slower_network_makes_an_exchange_longer_and_gradients_keep_their_own_collectives(group_of_one: None):  # noqa: ARG001
    model = towers()
    _, captured = capture_job(
        Job(model, gathered_if_there_are_ranks, torch.optim.SGD(model.parameters()), torch.ones(4, 6))
    )
    fast, slow = (Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(25.0, rate)) for rate in (1e-3, 1e-6))
    steps = [Compiler(cluster).analyze(captured.graph, COSTS) for cluster in (fast, slow)]
    assert steps[1].backward_us > steps[0].backward_us + 3000
    plan = uniform("dense", steps[1], COSTS, slow)
    graph = Compiler(slow).graphs_after_each_pass(captured.graph, plan, COSTS)["label_gradients"]
    assert len([node for node in graph.graph.nodes if is_collective(node)]) == len(list(model.parameters()))
