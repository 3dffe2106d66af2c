"""A compressed plan that turns out slower than dense was is given up, by all ranks at the same step."""

from __future__ import annotations

from typing import Any

import torch
from ranks import run_ranks
from torch import nn

import fxcomp
from fxcomp.step import SWITCH_STEPS, WARM_STEPS


def train(dense_ms: float) -> dict[str, Any]:
    """Steps of an int8 plan beside a dense step that is said to have taken `dense_ms`."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def compiled(plan: str) -> fxcomp.CompiledStep:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return fxcomp.compile_step(model, loss, optimizer, batch, plan=plan, verify_every=7)

    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    batch = (torch.randn(8, 64, generator=generator),)
    step = compiled("int8")
    step._dense_plan, step._dense_ms = compiled("dense").plan, dense_ms
    for _ in range(SWITCH_STEPS + WARM_STEPS + 5):
        step(batch)
    parameters = torch.cat([p.detach().flatten() for p in step.training.model.parameters()])
    return {"dense": step.plan.is_dense, "source": step.source, "notes": step.notes, "parameters": parameters.tolist()}


def test_all_ranks_switch_back_together_and_stay_identical():
    one, other = run_ranks(2, train, 1e-6)
    assert one["dense"]
    assert other["dense"]
    assert "rt.compress" not in one["source"]
    assert one["notes"][0].startswith(f"switched back to dense at step {SWITCH_STEPS + WARM_STEPS}")
    assert one["parameters"] == other["parameters"]


def test_a_plan_that_is_faster_than_dense_was_is_kept():
    one, other = run_ranks(2, train, 1e6)
    assert not one["dense"]
    assert not one["notes"]
    assert "rt.compress" in one["source"]
    assert one["parameters"] == other["parameters"]
