"""Criteria and queues outside the model, which the loss function writes at every step, are written as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.eager import sgd, trains_as_eager
from torch import Tensor, nn


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, out: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(out.detach().mean(0))
        return (out - self.mean).square().mean()


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, out: Tensor) -> Tensor:
        self.calls += 1
        self.queue.copy_(torch.cat([self.queue[3:], out.detach()[:3]]))
        return (out @ self.queue.T).mean() / self.calls


class Slices(nn.Module):
    """A tensor that is no buffer, written through views, and read between two writings."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(6, 4)

    def forward(self, out: Tensor) -> Tensor:
        self.rows[:3] = out.detach()[:3]
        before = self.rows[1:4].clone()
        self.rows[1:2].add_(1)
        return (out[:3] * before).mean() + self.rows.sum()


class Criterion(nn.Module):
    """Writes its buffers, or tensors that lie elsewhere."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any], kept: Sequence[Tensor], elsewhere: Sequence[Tensor]):
        super().__init__()
        self._write, self._elsewhere = write, elsewhere
        for number, tensor in enumerate(kept):
            self.register_buffer(f"c{number}", tensor)

    def forward(self, out: Tensor) -> Tensor:
        found = torch.zeros(())
        for c in (*self.buffers(), *self._elsewhere):
            self._write(c, out.detach())
            found = found + c.sum()
        return out.square().mean() * (1 + found)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda c, _: c.mul_(0.5),
    "+=": lambda c, _: c.__iadd__(1),
    "out=": lambda c, _: torch.mul(c, 0.9, out=c),
    "a moving average": lambda c, out: c.mul_(0.9).add_(out.mean() * 0.1),
    "a view": lambda c, _: c.view(-1, 1).mul_(0.5),
    "a number as a tensor": lambda c, _: c.mul_(torch.tensor(0.5)),
    "foreach": lambda c, _: torch._foreach_mul_([c], 0.5),
    "foreach of numbers": lambda c, _: torch._foreach_add_([c], [2.0]),
    "foreach of a tensor": lambda c, _: torch._foreach_mul_([c], torch.tensor(0.5)),
    "a decision": lambda c, _: c.mul_(0.5) if c.sum() > c.numel() * 0.6 else c.add_(0.3),
    "a decision by what was written": lambda c, _: c.add_(0.8) if c.mul_(0.5).sum() < 0.4 * c.numel() else None,
}
"""Writings of a tensor that is no buffer of the model, given what the model returns."""


def sizes() -> list[Tensor]:
    return [torch.linspace(1.2, 0.2, elements) for elements in (1, 3, 300)]


CASES: dict[str, Callable[[], nn.Module]] = {
    "Mean": Mean,
    "Queue": Queue,
    "Slices": Slices,
    **{f"{name}, buffers": lambda write=write: Criterion(write, sizes(), []) for name, write in WRITES.items()},
    **{f"{name}, elsewhere": lambda write=write: Criterion(write, [], sizes()) for name, write in WRITES.items()},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("verify", [2, "never"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_written_outside_the_model_are_eagers_in_every_capture(name: str, verify: Any):
    torch.manual_seed(0)
    criterion = CASES[name]()
    other, before = copy.deepcopy(criterion), written(criterion)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        if not seen:
            seen.append(all(map(torch.equal, written(criterion), before)))

    trains_as_eager(
        nn.Linear(6, 4),
        lambda model, batch: criterion(model(batch)),
        [torch.randn(rows, 6) for rows in (3, 4, 5, 3)],
        sgd,
        eager_loss=lambda model, batch: other(model(batch)),
        change=look,
        verify=verify,
    )
    assert seen == [True], "tracing writes nothing"
    assert all(map(torch.equal, written(criterion), written(other)))
    assert not all(map(torch.equal, written(criterion), before))


def written(criterion: Any) -> list[Tensor]:
    own = (value for value in vars(criterion).values() if isinstance(value, Tensor))
    return [each.clone() for each in (*criterion.buffers(), *own, *getattr(criterion, "_elsewhere", ()))]
