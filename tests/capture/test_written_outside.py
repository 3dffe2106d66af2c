"""Criteria and queues outside the model, which the loss function writes at every step, are written as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomp
from fxcomp import errors


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
        self.queue.copy_(torch.cat([self.queue[3:], out.detach()]))
        return (out @ self.queue.T).mean() / self.calls


class Slices(nn.Module):
    """A tensor that is no buffer, written through views, and read between two writings."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(6, 4)

    def forward(self, out: Tensor) -> Tensor:
        self.rows[:3] = out.detach()
        before = self.rows[1:4].clone()
        self.rows[1:2].add_(1)
        return (out * before).mean() + self.rows.sum()


class Replaced(Mean):
    def forward(self, out: Tensor) -> Tensor:
        self.mean = self.mean + out.detach().mean(0)
        return (out - self.mean).square().mean()


def written(criterion: Any) -> list[Tensor]:
    return [*criterion.buffers(), *(value for value in vars(criterion).values() if isinstance(value, Tensor))]


@pytest.mark.parametrize("kind", [Mean, Queue, Slices])
@pytest.mark.parametrize("verify_every", [1, "never"])
def test_what_lies_outside_the_model_is_written_at_every_step(kind: type[nn.Module], verify_every: Any):
    torch.manual_seed(0)
    model, criterion, batches = nn.Linear(6, 4), kind(), [torch.randn(3, 6) for _ in range(4)]
    reference, beside = copy.deepcopy((model, criterion))
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    step = fxcomp.compile_step(model, lambda m, b: criterion(m(b)), ours, batches[0], verify_every=verify_every)
    assert all(map(torch.equal, written(criterion), written(beside))), "tracing writes nothing"
    for batch in batches:
        theirs.zero_grad()
        loss = beside(reference(batch))
        loss.backward()
        theirs.step()
        assert step(batch) == loss
        assert all(map(torch.equal, written(criterion), written(beside)))
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_a_criterion_that_puts_another_buffer_in_the_place_is_told_to_write_in_place():
    model, criterion = nn.Linear(6, 4), Replaced()
    with pytest.raises(errors.CaptureFailed, match=r"(?s)stores a tensor in .*mean.*buffer\.copy_\(value\)"):
        fxcomp.compile_step(
            model, lambda m, b: criterion(m(b)), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6)
        )
    assert type(criterion.mean) is Tensor
    assert not criterion.mean.any()
