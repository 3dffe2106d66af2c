"""Compare a step with eager while things around it change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxcomp
from fxcomp.step.compiled_step import CompiledStep
from helpers.gathered import gathered
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy

BATCH = JOBS["mlp"].batch(0)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(20, 10)


def compiled(model: nn.Module, loss: Any = cross_entropy, **options: Any) -> CompiledStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fxcomp.compile_step(model, loss, optimizer, BATCH, **gathered(**options))


def compile_alone(
    model: nn.Module, loss: Any = cross_entropy, optimizer: Any = "sgd", batch: Any = BATCH, **options: Any
) -> CompiledStep:
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer](model.parameters())
    return fxcomp.compile_step(model, loss, optimizer, batch, **gathered(**{"verify": 1, **options}))


def assert_eager(
    model: nn.Module,
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
    loss: Any = cross_entropy,
    **options: Any,
) -> CompiledStep:
    """Six steps with a change before the fourth, compiled and eager, give the same bits."""
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), **{"lr": 0.1, **options}) for m in (model, reference)]
    step = compile_alone(model, loss, optimizers[0])
    for i in range(6):
        if i == 3:
            change(model, optimizers[0])
            change(reference, optimizers[1])
        batch = JOBS["mlp"].batch(i)
        step(batch)
        optimizers[1].zero_grad()
        loss(reference, batch).backward()
        optimizers[1].step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
    return step


def assert_followed(model: nn.Module, loss: Any, *changes: Callable[[Any], Any], captures: int | None = None) -> None:
    """A step, then one after each change: the bits of eager, which sees every change. A capture each if not said."""
    reference = copy.deepcopy(model)
    step = compiled(model, loss)
    built = count_captures(step)
    eager = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i, change in enumerate([lambda _: None, *changes]):
        batch = JOBS["mlp"].batch(i)
        change(model)
        ours = step(batch)
        change(reference)
        theirs = loss(reference, batch)
        eager.zero_grad()
        theirs.backward()
        eager.step()
        assert ours == theirs, f"change {i}"
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(built) == (len(changes) if captures is None else captures)


def count_captures(step: CompiledStep) -> list[None]:
    """Grows with every capture of a step from now on."""
    built: list[None] = []
    make = step.in_force.programs._make

    def counted(*arguments: Any) -> Any:
        built.append(None)
        return make(*arguments)

    step.in_force.programs._make = counted
    return built
