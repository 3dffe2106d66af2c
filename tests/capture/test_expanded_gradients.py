"""Gradients of sums are expanded, one element in memory for many: a norm over them rounds as over eager's `.grad`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.jobs import OPTIMIZERS
from torch import Tensor, nn

import fxcomp


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(67, 133))
        self.kernel = nn.Parameter(torch.randn(3, 5, 7, 9).to(memory_format=torch.channels_last))
        self.one = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Leave what is summed to the loss."""
        return x * self.one + self.empty.sum()


def everything(model: Weights, x: Tensor) -> Tensor:
    """Sum whole parameters: each gradient is one number."""
    return sum((p.sum() for p in model.parameters()), model(x).mean()) * 0.7


def by_row(model: Weights, x: Tensor) -> Tensor:
    """Sum along one dimension: each gradient is one row, or one channel."""
    return model(x).mean() + (model.matrix.sum(0) * x[0]).sum() + model.kernel.sum((2, 3)).pow(2).sum()


def by_column(model: Weights, x: Tensor) -> Tensor:
    return (model.matrix.mean(1) * model(x)[:67, 0]).sum() + model.kernel.mean(1, keepdim=True).exp().sum()


@pytest.mark.parametrize("loss_fn", [everything, by_row, by_column])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_sums_are_trained_as_in_eager_pytorch(
    loss_fn: Callable[[Weights, Tensor], Tensor], max_grad_norm: float | None
):
    model = Weights()
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference))
    batches = [torch.randn(67, 133) * (i + 1) for i in range(3)]
    step = fxcomp.compile_step(model, loss_fn, optimizer, batches[0], max_grad_norm=max_grad_norm)
    for batch in batches:
        reference_optimizer.zero_grad()
        loss = loss_fn(reference, batch)
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
        reference_optimizer.step()
        assert torch.equal(step(batch), loss.detach())
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name]), name
