"""Saved states on several ranks: they must belong together, and a rank without one joins the others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks, try_ranks
from helpers.replicas import replica_fingerprint

import fxcomp
from fxcomp.step.compiled_step import CompiledStep

JOB = JOBS["mlp"]
SHARED = ["randomk(0.1)", "powersgd(2)"]
"""Payloads of these are summed, so all ranks must send the same places, or use the same basis."""


def compiled(plan: str, seed: int = 0, **options: Any) -> CompiledStep:
    model = JOB.build()
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = JOB.batch(0, dist.get_rank())
    return fxcomp.compile_step(model, cross_entropy, optimizer, batch, **gathered(plan=plan, verify=1, **options))


def train(step: CompiledStep, first: int, last: int) -> None:
    for i in range(first, last):
        step(JOB.batch(i, dist.get_rank()))


def joined(plan: str, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 goes on from its third step; the others have lost what they saved."""
    old, new = compiled(plan, **options), compiled(plan, seed=1, **options)
    train(old, 0, 3)
    gone = ", ".join(map(str, range(1, dist.get_world_size())))
    is_told = pytest.warns(UserWarning, match=rf"no rank loads the state of rank {gone} of \d: .* there are lost")
    with is_told if dist.get_rank() == 0 else nullcontext():
        new.load_state_dict(old.state_dict() if dist.get_rank() == 0 else None)
    new.training.model.load_state_dict(old.training.model.state_dict())
    train(new, 3, 6)
    return {"steps": new.steps, "parameters": replica_fingerprint(new.training.model)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("plan", [*SHARED, "int8(stochastic=true)"])
def test_a_rank_without_a_state_joins_the_others(plan: str) -> None:
    first, *others = run_ranks(3, joined, plan, {})
    assert first["steps"] == 6
    assert all(other == first for other in others)


def test_a_rank_without_a_state_joins_the_others_in_their_warm_up() -> None:
    first, second = run_ranks(2, joined, "topk(0.1)", {"warmup": fxcomp.Warmup(dense_steps=2)})
    assert first == second


def of_other_steps(plan: str) -> None:
    """Each rank loads what it had after another number of steps."""
    step = compiled(plan)
    states = [step.state_dict()]
    for i in range(2):
        train(step, i, i + 1)
        states.append(step.state_dict())
    step.load_state_dict(states[dist.get_rank() + 1])


def of_other_streams() -> None:
    """As many steps, but of another job with other random numbers."""
    step, other = compiled("randomk(0.1)"), compiled("randomk(0.1)", seed=1)
    step.load_state_dict((step if dist.get_rank() == 0 else other).state_dict())


@pytest.mark.parametrize("plan", ["int4", "randomk(0.1)"])
def test_states_of_other_steps_are_refused_on_every_rank(plan: str) -> None:
    for outcome in try_ranks(2, of_other_steps, plan):
        assert outcome.error == "BadState", outcome.trace
        assert "they differ in number of steps (2 and 1)" in outcome.text


def test_states_of_other_random_numbers_are_refused_on_every_rank() -> None:
    for outcome in try_ranks(2, of_other_streams):
        assert outcome.error == "BadState", outcome.trace
        assert "do not belong together" in outcome.text
