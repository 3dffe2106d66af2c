"""Writes that others see are functionalized by tracing again; others are written where they stand."""

from __future__ import annotations

import pytest
import torch
from helpers.jobs import OPTIMIZERS
from torch import Tensor, nn

import fxcomp
from fxcomp import compat


def test_writes_that_others_see_are_functionalized_by_tracing_again(monkeypatch: pytest.MonkeyPatch):
    again: list[object] = []
    trace = compat.trace_functional
    monkeypatch.setattr(compat, "trace_functional", lambda *a: again.append(a) or trace(*a))

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x) * 2.0
            first = out[:, 0]
            out.add_(1.0)  # through the view, too
            return out.sum() + 3.0 * first.sum()

    torch.manual_seed(0)
    model, batch = Seen(), torch.randn(2, 3)
    expected = model(batch).detach()
    step = fxcomp.compile_step(
        model, lambda m, x: m(x), OPTIMIZERS["sgd"](model.parameters()), batch, checks=fxcomp.Checks(verify=1)
    )
    assert len(again) == 1
    assert torch.equal(step(batch), expected)
