"""A plan that follows what compressors lose of the gradients: ranks stay the same, and nothing owed is lost."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.plan.budget import ErrorBudget, plan_error
from fxcomp.plan.plan import Plan
from fxcomp.search.resolve import Resolve
from fxcomp.step import calendar
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.errors import adaptation, error_looks
from fxcomp.step.plan_in_force import PlanInForce

WHERE = Cluster.parse("2x1, inter 10mbit@20us, intra 100gbit")
STEPS, CHANGES_AT = 200, 70
_TITLES = ("Error", "By layer", "How the plan moved")


@contextmanager
def soon() -> Generator[None]:
    """Look at gradients every third step, and meet for answers every tenth."""
    with (
        patch.multiple(error_looks, LOOKS=3, LOOKS_SHARE=1e9, FIRST=3),
        patch.object(calendar, "SETTLED", 3),
        patch.object(adaptation, "MEETING", 10),
    ):
        yield


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def compiled(budget: str | float, **options: Any) -> CompiledStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given: dict[str, Any] = {"verify": "never", "race": "off", "replan": "off", **options}
    return fxcomp.compile_step(
        model,
        loss_of,
        optimizer,
        batch_of(0),
        cluster=WHERE,
        costs=CostTable(),
        **gathered(within=ErrorBudget.parse(str(budget)), measured=True, **given),
    )


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Inputs along few directions at first, and along all of them later: gradients of a low rank, and of a high one."""
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    inputs, targets = torch.randn(32, 64, generator=draw), torch.randn(32, 16, generator=draw)
    return (inputs if step >= CHANGES_AT else inputs * (torch.arange(64) < 2)), targets


def owed(force: PlanInForce) -> dict[str, Tensor]:
    """Sum all ranks' residuals, by parameter."""
    found = force.state.owed_here(force.inputs.sizes, dist.get_world_size())
    for value in found.values():
        dist.all_reduce(value)
    return found


def trained(budget: str | float) -> dict[str, Any]:
    changes: list[float] = []
    ways = {"switch": PlanInForce.switch, "retune": PlanInForce.retune}
    taken: list[str] = []

    def watched(way: str, self: PlanInForce, *arguments: Any) -> None:
        taken.append(way)
        before = owed(self)
        ways[way](self, *arguments)
        after = owed(self)
        for name in before.keys() | after.keys():
            was, now = (each.get(name, torch.zeros(1)) for each in (before, after))
            changes.append(float((was - now).norm() / (was.norm() + 1e-12)))

    changing = {way: partialmethod(partial(watched, way)) for way in ways}
    with soon(), patch.multiple(PlanInForce, **changing):
        step = compiled(budget)
        first = step.plan.digest
        for number in range(STEPS):
            step(batch_of(number))
        moves = step.moves
        table = step.error_table
    return {
        "first": first,
        "plan": step.plan.digest,
        "moves": [str(move) for move in moves],
        "ways": taken,
        "errors": [(move.error, move.limit) for move in moves],
        "error": plan_error(step.plan, WHERE, table),
        "parameters": replica_fingerprint(step.training.model),
        "lost": max(changes, default=0.0),
        "notes": list(step.notes),
        "report": [line for line in step.explain().splitlines() if line in _TITLES],
    }


def solving_raises() -> dict[str, Any]:
    """Rank 0 fails in its solution, some turns after it has begun."""
    turn = Resolve.turn

    def raising(self: Resolve) -> Plan | None:
        if self.before is not None:
            raise ZeroDivisionError("a mistake of ours")
        return turn(self)

    with soon(), patch.object(Resolve, "turn", raising):
        step = compiled("powersgd(2)")
        first = step.plan.digest
        for number in range(STEPS // 2):
            step(batch_of(number))
    parameters = replica_fingerprint(step.training.model)
    return {"stays": step.plan.digest == first, "notes": list(step.notes), "parameters": parameters}


def test_an_error_while_solving_is_noted_on_all_ranks_and_the_plan_stays():
    one, other = run_ranks(2, solving_raises)
    assert one == other
    assert one["stays"]
    said = [note for note in one["notes"] if "ZeroDivisionError: a mistake of ours" in note]
    assert len(said) == 1
    assert "the plan stays" in said[0]


@pytest.mark.parametrize("budget", [pytest.param(0.2, marks=pytest.mark.slow), "powersgd(2)"])
def test_the_plan_follows_the_gradients_and_ranks_stay_the_same(budget: str | float):
    one, other = run_ranks(2, trained, budget)
    assert one == other
    assert len(one["moves"]) >= 2
    assert one["plan"] != one["first"]
    assert one["report"] == list(_TITLES)
    assert one["lost"] < 1e-5, "what is owed is owed after each change"
    for (_, after), limit in one["errors"]:
        assert after <= limit
