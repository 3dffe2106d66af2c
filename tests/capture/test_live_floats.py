"""Floats that have changed twice become inputs of the captured step, unless Python branches on their value."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.followed import count_captures
from helpers.jobs import JOBS
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn
from torch.nn import functional as F

import fxcomp

VALUES = (0.1, 0.2, 0.312, 0.447, 0.2, 0.73, 0.81, 0.95)
LIVE_CAPTURES = 2
"""One for the second value, and one for the third, from which on the float is an input."""
EACH = len(set(VALUES))
"""One for each new value, and one for which it was tried as an input."""

Loss = Callable[[Tensor, Any], Any]

LIVE: dict[str, Loss] = {
    "a factor": lambda y, c: y.sum() * c.w,
    "in arithmetic": lambda y, c: y.sum() * (1.0 - 2.0 * c.w) + c.w,
    "a divisor": lambda y, c: (y / c.w).sum(),
    "a tensor of it": lambda y, c: (y * torch.full((), c.w)).sum(),
    "a limit": lambda y, c: y.clamp(-c.w, c.w).sum(),
    "a slope": lambda y, c: F.leaky_relu(y, c.w).sum(),
    "a threshold": lambda y, c: torch.where(y > c.w, y, y * c.w).sum(),
    "in half precision": lambda y, c: (y.half() * c.w).float().sum(),
    "rounded": lambda y, c: y.sum() * round(c.w, 1),
    "returned": lambda y, c: (y.sum() * c.w, {"w": c.w, "twice": 2 * c.w}),
    "asked for its class": lambda y, c: y.sum() * (c.w if isinstance(c.w, float) else 7.0),
}

CONSTANT: dict[str, Loss] = {
    "a branch": lambda y, c: y.sum() * (2.0 if c.w > 0.35 else 1.0) * c.w,
    "a text": lambda y, c: y.sum() * float(f"{c.w:.1f}"),
    "the length of a text": lambda y, c: y.sum() * float(len(str(c.w))),
    "a key": lambda y, c: y.sum() * {value: 1.0 + value for value in VALUES}[c.w],
    "a function of math": lambda y, c: y.sum() * math.exp(c.w),
    "a whole number": lambda y, c: y.sum() * int(10 * c.w),
    "the larger one": lambda y, c: y.sum() * max(c.w, 0.3),
    "a new tensor": lambda y, c: (y * torch.tensor(c.w)).sum(),
    "dropout": lambda y, c: F.dropout(y, c.w / 4).sum(),
    "smoothing": lambda y, c: F.cross_entropy(y, torch.zeros(4, dtype=torch.long), label_smoothing=c.w / 4),
    "a number of a norm": lambda y, c: F.layer_norm(y, (8,), eps=c.w).square().sum(),
}


def trained(loss: Loss, *, compiled: bool, values: tuple[float, ...] = VALUES) -> tuple[nn.Module, list[Any], int]:
    """Train with a value that changes before each step; also returns the results, and the number of new captures."""
    torch.manual_seed(0)
    model, settings, x = nn.Linear(8, 8), SimpleNamespace(w=values[0]), torch.randn(4, 8)
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.01), list[Any]()

    def loss_fn(model: nn.Module, batch: Tensor) -> Any:
        return loss(model(batch), settings)

    def eager(batch: Tensor) -> Any:
        optimizer.zero_grad()
        result = loss_fn(model, batch)
        (result[0] if isinstance(result, tuple) else result).backward()
        optimizer.step()
        return result

    captures, step = list[None](), eager
    if compiled:
        step = fxcomp.compile_step(model, loss_fn, optimizer, x, checks=fxcomp.Checks(verify="never"))
        captures = count_captures(step)
    torch.manual_seed(1)
    for value in values:
        settings.w = value
        results.append(step(x))
        assert settings.w is value, "what stands there while tracing is taken out"
    return model, results, len(captures)


def plain(results: list[Any]) -> list[Any]:
    """Results as numbers."""
    leaves = [list(r) if isinstance(r, tuple) else [r] for r in results]
    return [[value.item() if isinstance(value, Tensor) else value for value in each] for each in leaves]


@pytest.mark.filterwarnings("ignore:fxcomp.* changed")
@pytest.mark.parametrize(
    ("loss", "captures"),
    [*((loss, LIVE_CAPTURES) for loss in LIVE.values()), *((loss, EACH) for loss in CONSTANT.values())],
    ids=[*LIVE, *CONSTANT],
)
@pytest.mark.one_in(3)
def test_a_float_that_changes_in_every_step_trains_as_in_eager(loss: Loss, captures: int):
    expected, wanted, _ = trained(loss, compiled=False)
    model, results, found = trained(loss, compiled=True)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert plain(results) == plain(wanted)
    assert found == captures


@pytest.mark.filterwarnings("ignore:fxcomp.* changed")
def test_a_float_that_becomes_something_else_is_captured_again():
    def loss(y: Tensor, c: Any) -> Tensor:
        return y.sum() if c.w is None else y.sum() * c.w

    values: Any = (0.1, 0.2, 0.3, 0.4, None, 0.5, 1, True)
    expected, model = (trained(loss, compiled=compiled, values=values)[0] for compiled in (False, True))
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.filterwarnings("ignore:fxcomp.* changed")
@pytest.mark.parametrize("how", ["replaced", "in turns"])
def test_a_float_is_read_in_the_object_that_holds_it_now(how: str):
    """Another object of settings has the place of the first one."""
    found: list[nn.Module] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        both = SimpleNamespace(w=0.1), SimpleNamespace(w=0.5)
        holder, optimizer = SimpleNamespace(settings=both[0]), torch.optim.SGD(model.parameters(), lr=0.01)

        def loss_fn(model: nn.Module, batch: Tensor, holder: SimpleNamespace = holder) -> Tensor:
            return model(batch).sum() * holder.settings.w

        step = fxcomp.compile_step(model, loss_fn, optimizer, x, checks=fxcomp.Checks(verify="never"))
        for number in range(14):
            holder.settings = both[number // 7 if how == "replaced" else number % 2]
            holder.settings.w = 0.1 * (number + 1)
            if compiled:
                step(x)
            else:
                optimizer.zero_grad()
                loss_fn(model, x).backward()
                optimizer.step()
        found.append(model)
    assert all(map(torch.equal, found[0].parameters(), found[1].parameters()))


@pytest.mark.filterwarnings("ignore:fxcomp.* changed")
def test_one_float_that_decides_and_one_of_an_exact_type_stay_constants():
    def loss(y: Tensor, c: Any) -> Tensor:
        return y.sum() * (2.0 if c.w > 0.3 else 1.0) * (c.w if type(c.w) is float else 3.0)

    expected, _, _ = trained(loss, compiled=False)
    model, _, _ = trained(loss, compiled=True)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


class Annealed(nn.Module):
    """A model with a weight of a penalty, as variational models have one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kl = JOBS["mlp"].build(), 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.kl * y.square().mean()


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    y, penalty = model(batch[0])
    return F.cross_entropy(y, batch[1]) + penalty


def annealed() -> tuple[str, int, float]:
    """Train on several ranks, in groups of two micro-batches, with compression; every step is verified."""
    torch.manual_seed(0)
    model = Annealed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch, rank = JOBS["mlp"].batch, dist.get_rank()
    costs, checks = fxcomp.CostTable(), fxcomp.Checks(verify=1)
    step = fxcomp.compile_step(
        model, penalised, optimizer, batch(0, rank), compress="int8", accumulate=2, costs=costs, checks=checks
    )
    captures = count_captures(step)
    for number in range(16):
        model.kl = 0.01 * (number + 1) + 0.001 * rank
        step(batch(number, rank))
    return replica_fingerprint(model), len(captures), model.kl


def test_on_several_ranks_micro_batches_and_verified_steps_follow_it():
    (one, captures, _), (other, _, kl) = run_ranks(2, annealed)
    assert one == other
    assert captures <= LIVE_CAPTURES + 1
    assert kl == pytest.approx(0.161)


@pytest.mark.filterwarnings("ignore:fxcomp.* changed")
def test_a_jump_of_several_floats_at_once_keeps_those_live_that_may_be():
    def loss(y: Tensor, c: Any) -> Tensor:
        return y.sum() * c.w * (2.0 if c.v > 0.5 else 1.0)

    torch.manual_seed(0)
    model, settings, x = nn.Linear(8, 8), SimpleNamespace(w=0.1, v=0.1), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = fxcomp.compile_step(model, lambda m, b: loss(m(b), settings), optimizer, x)
    for value in VALUES:
        settings.w = settings.v = value
        step(x)
    captures = count_captures(step)
    for value in (0.33, 0.44, 0.55):
        settings.w = value
        step(x)
    assert captures == []
