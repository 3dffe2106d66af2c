"""A verified step leaves what the forward pass writes outside of buffers as if it had run once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from helpers.followed import BATCH
from helpers.jobs import cross_entropy
from torch import Tensor, nn

import fxcomp


class Averaging(nn.Module):
    """Keeps an average of its weights in frozen ones, and its bias in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(20, 10)
        self.mean = copy.deepcopy(self.fc).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.weight.mul_(0.9).add_(self.fc.weight, alpha=0.1)
            self.fc.bias.clamp_(-0.1, 0.1)
        return self.fc(x) - self.mean(x)


def trained(verify: Any) -> list[Tensor]:
    """Parameters, a teacher's statistics and a generator's next number after three steps; eagerly for None."""
    torch.manual_seed(0)
    model, teacher = Averaging(), nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10)).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] + torch.randn(batch[0].shape, generator=generator)
        return cross_entropy(model, (x, batch[1])) + (model(x) - teacher(x)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if verify is not None:
        step = fxcomp.compile_step(model, loss, optimizer, BATCH, checks=fxcomp.Checks(verify=verify))
    for _ in range(3):
        if verify is not None:
            step(BATCH)
            continue
        optimizer.zero_grad()
        loss(model, BATCH).backward()
        optimizer.step()
    return [*model.state_dict().values(), *teacher.state_dict().values(), torch.randn(1, generator=generator)]


def test_a_teacher_a_generator_and_an_average_are_as_if_a_step_had_not_been_verified():
    eager = trained(None)
    for verify in ("never", 1):
        assert all(map(torch.equal, trained(verify), eager)), verify
