"""Real ranks come and go: by saved states alone, what was applied and what is still owed are all gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS
from helpers.plans import TWO_HOSTS, plan_in_turns
from helpers.ranks import run_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.plan.strategy import Strategy

JOB = JOBS["mlp"]


@dataclass(frozen=True)
class World:
    """Some ranks that load what the last ones saved, train, and save."""

    ranks: int
    compressors: list[str | None]
    steps: int = 2
    by_level: bool = False
    gives_up: bool = False
    """Becomes dense before it saves, so that what it owes waits in the saved state."""
    options: dict[str, Any] = field(default_factory=dict)


WORLDS = [
    World(4, ["topk(0.1)", None]),
    World(4, ["int4"], by_level=True, gives_up=True),
    World(4, ["topk(0.1)", "sign"], by_level=True, options={"verify": 1}),
    World(2, ["powersgd(2)", "int4"]),
    World(1, [], options={"verify": 1}),
    World(2, ["topk(0.1)"], gives_up=True, options={"warmup": fxcomp.Warmup(int4_steps=40)}),
    World(3, [None]),
    World(3, [None, "topk(0.05)"]),
    World(1, [], steps=1, options={"verify": 1, "max_grad_norm": 1e9}),
]


def linear(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Its gradients are the batch, whatever the parameters."""
    return sum((batch[name] * p).sum() for name, p in model.named_parameters())  # pyright: ignore


def drawn(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(p.shape, generator=generator) for name, p in JOB.build().named_parameters()}


def train(world: World, number: int, folder: Path) -> None:
    rank, model = dist.get_rank(), JOB.build()
    if number:
        model.load_state_dict(torch.load(folder / f"model {number - 1}"))
    kind = Strategy.hierarchical if world.by_level else Strategy.flat
    strategies = [kind(parse_compressor(name) if name else None) for name in world.compressors]
    step = fxcomp.compile_step(
        model,
        linear,
        torch.optim.SGD(model.parameters(), lr=1.0),
        drawn(0, rank),
        cluster=TWO_HOSTS if world.ranks == 4 else None,
        **gathered(plan=plan_in_turns(model, strategies, per_bucket=2) if strategies else "dense", **world.options),
    )
    if number:
        saved = sorted(folder.glob(f"state {number - 1} *"))
        mine = [torch.load(path, weights_only=True) for path in saved[rank :: world.ranks]]
        step.load_state_dict(mine[0] if len(mine) == 1 else mine or None)
    first = sum(before.steps for before in WORLDS[:number])
    assert step.steps == first
    for i in range(first, first + world.steps):
        step(drawn(i, rank))
    if world.gives_up:
        dense = plan_in_turns(model, [Strategy.flat(None)], per_bucket=3)
        step.in_force.switch(replace(step.in_force.decision, plan=dense), "going back to dense")
        assert step.plan.is_dense
        assert step.state_dict()["residuals"] == {}
    torch.save(step.state_dict(), folder / f"state {number} {rank}")
    torch.save(model.state_dict(), folder / f"model {number}")


@pytest.mark.filterwarnings("ignore:fxcomp. the compressor state")
def test_ranks_come_and_go_and_plans_change_and_no_gradient_is_lost(tmp_path: Path):
    due = {name: torch.zeros(start.shape, dtype=torch.float64) for name, start in JOB.build().state_dict().items()}
    first = 0
    for number, world in enumerate(WORLDS):
        run_ranks(world.ranks, train, world, number, tmp_path)
        for step, rank in itertools.product(range(first, first + world.steps), range(world.ranks)):
            for name, gradient in drawn(step, rank).items():
                due[name] += gradient.double() / world.ranks
        first += world.steps
    model = torch.load(tmp_path / f"model {len(WORLDS) - 1}")
    for name, start in JOB.build().state_dict().items():  # the last world owes nothing
        assert (start.double() - model[name].double() - due[name]).abs().max().item() <= 1e-5
