"""Models that set themselves up at their first call: refused where that call computes otherwise, else captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.followed import BATCH, compiled
from torch import Tensor, nn

from fxcomp import errors


class SetsItselfUp(nn.Module):
    """A layer after which something happens that `then` says."""

    def __init__(self, then: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.then = nn.Linear(20, 10), then
        self.register_buffer("mean", torch.zeros(10))
        self.is_ready, self.rows, self.last, self.scale = False, 0, 0.0, [2.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x, self.fc(x))


def initialises_from_data(model: Any, _: Tensor, y: Tensor) -> Tensor:
    if not model.is_ready:
        model.mean.copy_(y.detach().mean(0))
        model.is_ready = True
    return y - model.mean


def scales_the_first(model: Any, _: Tensor, y: Tensor) -> Tensor:
    scaled = y * (1.0 if model.is_ready else 2.0)
    model.is_ready = True
    return scaled


def scales_other_sizes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    scaled = y * (2.0 if len(x) != model.rows else 1.0)
    model.rows = len(x)
    return scaled


def scales_by_the_batch_before(model: Any, x: Tensor, y: Tensor) -> Tensor:
    scaled = y * (1.0 + model.last)
    model.last = float(x.max())
    return scaled


def takes_a_constant_once(model: Any, _: Tensor, y: Tensor) -> Tensor:
    scaled = y * torch.tensor(model.scale)
    model.scale = [3.0]
    return scaled


@pytest.mark.parametrize(
    "then",
    [initialises_from_data, scales_the_first, scales_other_sizes, scales_by_the_batch_before, takes_a_constant_once],
)
def test_a_first_call_that_computes_otherwise_is_refused(then: Any):
    with pytest.raises(errors.StepChanged, match=r"(?s)first call, which computes otherwise.*model\..* changed from"):
        compiled(SetsItselfUp(then))


def test_a_model_that_was_called_once_is_captured():
    model = SetsItselfUp(initialises_from_data)
    model(BATCH[0])
    mean = model.mean.clone()
    compiled(model)(BATCH)
    assert torch.equal(model.mean, mean)
    assert mean.abs().sum() > 0


def counts_sizes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.rows = len(x)
    return y


def test_a_first_call_that_computes_the_same_is_captured():
    model = SetsItselfUp(counts_sizes)
    step = compiled(model)
    assert torch.isfinite(step(BATCH))
    assert model.rows == len(BATCH[0])


def test_a_later_first_call_is_refused_too():
    model = SetsItselfUp(scales_other_sizes)
    model.rows = len(BATCH[0])
    step = compiled(model)
    step(BATCH)
    with pytest.raises(errors.StepChanged, match="first call, which computes otherwise"):
        step(tuple(each[:3] for each in BATCH))
