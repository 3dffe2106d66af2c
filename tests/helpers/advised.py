"""Train what follows an error's advice, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp.step.compiled_step import CompiledStep
from helpers.followed import compile_alone
from helpers.jobs import JOBS, cross_entropy


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows(number: int = 0) -> tuple[Tensor, Tensor]:
    return JOBS["mlp"].batch(number)


def assert_alike(model: nn.Module, reference: nn.Module) -> None:
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def assert_trains(
    model: nn.Module,
    reference: nn.Module | None = None,
    loss: Any = cross_entropy,
    eager_loss: Any = None,
    batches: Any = None,
    optimizer: Callable[[Any], Any] = sgd,
    **options: Any,
) -> CompiledStep:
    """Train one model compiled, another one eagerly, by the same batches, and compare the bits."""
    reference = reference or copy.deepcopy(model)
    batches = batches or [rows(number) for number in range(3)]
    ours, eager = optimizer(model), optimizer(reference)
    step = compile_alone(model, loss, ours, batches[0], **options)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        returned = step(batch)
        torch.manual_seed(number)
        eager.zero_grad()
        expected = (eager_loss or loss)(reference, batch)
        first = expected[0] if isinstance(expected, tuple) else expected
        first.backward()
        eager.step()
        assert torch.equal(returned[0] if isinstance(returned, tuple) else returned, first)
    assert_alike(model, reference)
    return step


@dataclass(frozen=True)
class Row:
    """One refusal, and what is tried."""

    text: str
    """Some words of the error's."""
    provoke: Callable[[], Any]
    follow: Callable[[], Any] | None = None
    """Does what the error says; None where it says only what is wrong, or the row beside it follows it."""
    at: str = ""
    """The file under fxcomp/, `::`, and the function that raises it, unless one place alone has these words."""
