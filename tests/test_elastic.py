"""Real ranks come and go: by saved states alone, what was applied and what is still owed are all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import JOBS
from judged import judge_by_dense
from plans import TWO_HOSTS, plan_in_turns
from ranks import run_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp import compat
from fxcomp import ranks as ranks_module
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
    World(4, ["int8"], by_level=True, gives_up=True),
    World(4, ["topk(0.1)", "randomk(0.2)"], by_level=True, options={"verify_every": 1}),
    World(2, ["powersgd(2)", "int8"]),
    World(1, [], options={"verify_every": 1}),
    World(2, ["randomk(0.1)"], gives_up=True, options={"error_feedback": fxcomp.ErrorFeedback(density_steps=40)}),
    World(3, [None]),
    World(3, [None, "topk(0.05)"]),
    World(1, [], steps=1, options={"verify_every": 1, "max_grad_norm": 1e9}),
]


def linear(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Its gradients are the batch, whatever the parameters."""
    return sum((batch[name] * p).sum() for name, p in model.named_parameters())  # pyright: ignore


def drawn(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(p.shape, generator=generator) for name, p in JOB.build().named_parameters()}


@contextmanager
def begun(number: int, ranks: int, place: int, store: Any) -> Iterator[bool]:
    """Whether this process is one of so many ranks that meet as if they had just been started."""
    ranks_module._calls.clear()
    if place < ranks:
        own = dist.PrefixStore(f"world {number}", store)
        dist.init_process_group("gloo", store=own, rank=place, world_size=ranks, timeout=timedelta(seconds=60))
    yield place < ranks
    if place < ranks:
        dist.barrier()
        dist.destroy_process_group()


def train(world: World, number: int, folder: Path) -> None:
    rank, model = dist.get_rank(), JOB.build()
    if number:
        model.load_state_dict(torch.load(folder / f"model {number - 1}"))
    kind = Strategy.hierarchical if world.by_level else Strategy.flat
    strategies = [kind(parse_compressor(name) if name else None) for name in world.compressors]
    step = fxcomp.compile_step(
        model, linear, torch.optim.SGD(model.parameters(), lr=1.0), drawn(0, rank),
        plan=plan_in_turns(model, strategies, per_bucket=2) if strategies else "dense",
        cluster=TWO_HOSTS if world.ranks == 4 else None, **world.options,
    )  # fmt: skip
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
        judge_by_dense(step, dense, 1e-9)
        step.in_force.switch(step.in_force.decision.for_dense(), "going back to dense")
        assert step.plan.is_dense
        assert step.state_dict()["residuals"] == {}
    torch.save(step.state_dict(), folder / f"state {number} {rank}")
    torch.save(model.state_dict(), folder / f"model {number}")


def history(folder: Path) -> float:
    """How far what was applied is from all mean gradients, when the last world owes nothing."""
    place, store = dist.get_rank(), compat.default_store()
    dist.barrier()
    dist.destroy_process_group()
    for number, world in enumerate(WORLDS):
        with begun(number, world.ranks, place, store) as takes_part:
            if takes_part:
                train(world, number, folder)
    with begun(len(WORLDS), 4, place, store):
        model, off = torch.load(folder / f"model {len(WORLDS) - 1}"), 0.0
        for name, start in JOB.build().state_dict().items():
            due, number = torch.zeros(start.shape, dtype=torch.float64), 0
            for world in WORLDS:
                for step in range(number, number + world.steps):
                    due += sum(drawn(step, rank)[name].double() for rank in range(world.ranks)) / world.ranks
                number += world.steps
            off = max(off, (start.double() - model[name].double() - due).abs().max().item())
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=place, world_size=4)
    return off


@pytest.mark.filterwarnings("ignore:fxcomp. what compressors remember")
def test_ranks_come_and_go_and_plans_change_and_no_gradient_is_lost(tmp_path: Path):
    for off in run_ranks(4, history, tmp_path):
        assert off <= 1e-5
