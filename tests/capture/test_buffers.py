"""All ranks take rank 0's buffers, whatever each writes for its own batches, as under DistributedDataParallel."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.eager import beside_ddp
from helpers.ranks import run_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import CaptureFailed

LENGTHS = {0: [4, 4, 8, 4, 9], 1: [5, 9, 5, 9, 4]}
"""Rank 1 sees a long batch first; from the third length on, sizes are symbols."""

LONG = 6


class Remembers(nn.Module):
    """Buffers of every kind, which what it computes depends on."""

    mean: Tensor
    rows: Tensor
    calls: Tensor
    turned: Tensor
    any_negative: Tensor
    rank_1_alone: Tensor
    unused: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.zeros(3, 2).t())
        self.register_buffer("any_negative", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("rank_1_alone", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("unused", torch.ones(200, 200))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x) + self.mean + 0.01 * self.rows + self.turned.sum() + self.any_negative.float()
        out = out * (1 + self.rank_1_alone.sum().float())
        with torch.no_grad():
            self.calls += 1
            self.rows += len(x)
            self.turned += x[:2].t()[:2].mean() * 0.01
            if len(x) > LONG:
                self.mean.mul_(0.9).add_(0.1 * out.mean(0))
                self.any_negative |= (x < 0).any(0)
            if dist.get_rank() == 1:
                self.rank_1_alone += 0.1
        return out


class WritesBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.buffer.mul_(0.5).add_(gradient.abs().mean())
        return gradient, None


class RemembersGradients(nn.Module):
    """Writes a buffer near the end of backward."""

    largest: Tensor

    def __init__(self, long: int = LONG) -> None:
        super().__init__()
        self.long = long
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body[0](x)
        if len(x) > self.long:
            out = WritesBackwards.apply(out, self.largest)
        return self.body[1](out) * (1 + self.largest)


class Normalised(nn.Module):
    """Batch norm's statistics, and its counter of batches; a second branch for long batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.other = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.body(x))
        return out + self.other(out) if len(x) > LONG else out


class WritesMuch(nn.Module):
    """A large buffer that only long batches write."""

    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.register_buffer("history", torch.zeros(300, 300))
        self.register_buffer("expanded", torch.zeros(1, 1, dtype=torch.complex64).expand(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > LONG:
            self.history += 1
        return self.body(x)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


CASES: dict[str, Callable[[], nn.Module]] = {
    "of every kind": Remembers,
    "written in the backward pass": RemembersGradients,
    "written in the backward pass of a first batch": lambda: RemembersGradients(4),
    "batch norm": Normalised,
}


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(LENGTHS[rank][step], 3, generator=torch.Generator().manual_seed(100 * step + rank))


# On the ranks


def follow_ddp() -> dict[str, Any]:
    return {case: _attempt(lambda build=build: _follow(build)) for case, build in CASES.items()} | {
        "a large one": _attempt(_write_much)
    }


def _attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception:
        return traceback.format_exc()


def _follow(build: Callable[[], nn.Module]) -> dict[str, float]:
    rank = dist.get_rank()
    torch.manual_seed(3)
    return beside_ddp(build(), squares, [batch_of(k, rank) for k in range(len(LENGTHS[rank]))])[0]


def _write_much() -> str:
    model = WritesMuch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxcomp.compile_step(model, squares, optimizer, torch.ones(4, 3), compress="dense")
    step(torch.ones(4, 3))
    try:
        step(torch.ones(8, 3))
    except fxcomp.errors.StepChanged as error:
        return str(error)
    return "no error"


# What must hold


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, follow_ddp)


@pytest.mark.parametrize("case", CASES)
def test_buffers_and_parameters_follow_ddp_whoever_writes_what_and_when(on_two_ranks: Any, case: str):
    for numbers in on_two_ranks:
        assert isinstance(numbers[case], dict), numbers[case]
        assert {name: distance for name, distance in numbers[case].items() if distance > 1e-6} == {}


def test_a_large_buffer_that_nobody_was_seen_to_write_is_refused_by_name(on_two_ranks: Any):
    for numbers in on_two_ranks:
        assert "the buffer 'history' (360 kB) is written for this batch" in numbers["a large one"]
        assert "an example batch" in numbers["a large one"]


def refused_to_write_a_parameter() -> str:
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        fxcomp.compile_step(model, lambda model, batch: model(batch).sum(), optimizer, torch.arange(3), compress="int4")
    except CaptureFailed as error:
        return str(error)
    return "compiled"


def test_a_forward_pass_that_writes_parameters_is_refused_on_several_ranks_which_would_drift_apart():
    for text in run_ranks(2, refused_to_write_a_parameter):
        assert text.startswith("the forward pass writes the parameter '0.weight'")
