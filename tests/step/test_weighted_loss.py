"""A loss with a count: every element weighs the same, whatever rank and micro-batch it is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS, OPTIMIZERS
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters, replica_fingerprint
from torch import Tensor, nn

import fxcomp
from fxcomp import WeightedLoss
from fxcomp.errors import StepChanged, Unsupported

JOB = JOBS["transformer"]
IGNORED = -100
KEPT = ((3, 9), (7, 1), (0, 4), (10, 10), (2, 0), (5, 6))
"""Tokens of ten that each of two ranks keeps, call by call."""


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> WeightedLoss:
    inputs, target = batch
    total = nn.functional.cross_entropy(model(inputs).flatten(0, -2), target.flatten(), reduction="sum")
    return WeightedLoss(total, (target != IGNORED).sum())


def batch(call: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs, target = JOB.batch(call, rank)
    target.view(-1)[KEPT[call][rank] :] = IGNORED
    return inputs, target


def eager(accumulate: int) -> nn.Module:
    """Train on the batches of both ranks at once, by their sums over their counts."""
    model = JOB.build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for first in range(0, len(KEPT), accumulate):
        losses = [summed(model, batch(first + k, rank)) for k in range(accumulate) for rank in range(2)]
        total, count = sum(loss.sum for loss in losses), sum(int(loss.count) for loss in losses)
        (total / count).backward()  # pyright: ignore
        optimizer.step()
        optimizer.zero_grad()
    return model


def compiled(accumulate: int, plan: str = "dense", **options: Any) -> fxcomp.CompiledStep:
    model = JOB.build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    rank = dist.get_rank() if dist.is_initialized() else 0
    return fxcomp.compile_step(
        model, summed, optimizer, batch(0, rank), accumulate=accumulate, **gathered(plan=plan, **options)
    )


def trained(accumulate: int, plan: str) -> tuple[float, str, list[float]]:
    rank = dist.get_rank()
    step = compiled(accumulate, plan, verify=1 if plan == "dense" else "never")
    losses = [step(batch(call, rank)).item() for call in range(len(KEPT))]
    off = (flat_parameters(step.training.model) - flat_parameters(eager(accumulate))).abs().max().item()
    found = off, replica_fingerprint(step.training.model), losses
    assert len(step.in_force.programs) == 1, "counts are live"
    step.close()
    return found


CASES = [(1, "dense"), (2, "dense"), (3, "int8"), (2, "topk(0.1)")]


def all_trained() -> list[tuple[float, str, list[float]]]:
    return [trained(*case) for case in CASES]


def test_counts_that_differ_between_ranks_and_calls_weigh_every_token_alike():
    one, other = run_ranks(2, all_trained)
    for (_, plan), mine, theirs in zip(CASES, one, other, strict=True):
        assert mine[1] == theirs[1], plan
        if plan == "dense":
            assert max(mine[0], theirs[0]) <= 2e-6
        assert mine[2][2] == 0, "nothing counted here"
        expected = [summed(JOB.build(), batch(0, rank)).mean.item() for rank in range(2)]
        assert [mine[2][0], theirs[2][0]] == pytest.approx(expected), "the mean of a rank's own tokens"


def test_one_rank_alone_divides_by_its_own_counts():
    step = compiled(2)
    model = JOB.build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for call in range(4):
        step(batch(call, 0))
        loss = summed(model, batch(call, 0))
        loss.sum.backward()
        if call % 2:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= KEPT[call][0] + KEPT[call - 1][0]
            optimizer.step()
            optimizer.zero_grad()
    assert (flat_parameters(step.training.model) - flat_parameters(model)).abs().max() <= 1e-6


def test_a_count_may_be_a_number_and_stand_before_an_auxiliary_result():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def squares(model: nn.Module, rows: Tensor) -> tuple[WeightedLoss, dict[str, Any]]:
        return WeightedLoss(model(rows).square().sum(), rows.shape[0]), {"rows": rows.shape[0]}

    step = fxcomp.compile_step(model, squares, optimizer, torch.ones(3, 4), checks=fxcomp.Checks(verify=1))
    for rows in (3, 5, 6, 7):
        expected = model(torch.ones(rows, 4)).square().mean().item()
        loss, aux = step(torch.ones(rows, 4))
        assert loss.item() == pytest.approx(expected)
        assert aux == {"rows": rows}


def test_all_batches_are_weighted_or_none():
    def sometimes(model: nn.Module, rows: Tensor) -> Any:
        loss = model(rows).sum()
        return WeightedLoss(loss, 1) if len(rows) == 3 else loss

    model = nn.Linear(4, 1)
    step = fxcomp.compile_step(model, sometimes, torch.optim.SGD(model.parameters()), torch.ones(3, 4))
    with pytest.raises(StepChanged, match="WeightedLoss for some batches"):
        step(torch.ones(2, 4))


def test_the_sum_is_a_scalar():
    model = nn.Linear(4, 2)
    with pytest.raises(Unsupported, match="shape"):
        fxcomp.compile_step(
            model, lambda m, x: WeightedLoss(m(x), 3), torch.optim.SGD(model.parameters()), torch.ones(3, 4)
        )
