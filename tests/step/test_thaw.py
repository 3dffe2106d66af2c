"""A frozen second moment that fits no more is noticed on all ranks, which exchange gradients again; nothing is lost."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.guarded import JUMP, STEPS, TWO_SHOTS, WARM, batch, started
from helpers.ranks import run_ranks, try_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor

import fxcomp
from fxcomp.plan.strategy import Strategy
from fxcomp.state.momenta import Momenta
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.freeze import LOOK_EVERY


def notes(step: CompiledStep) -> list[str]:
    return [note for note in step.notes if "exchange gradients again" in note]


def after_a_jump(optimizer: str, grows: bool) -> tuple[list[str], bool, str, bool, int]:
    model, _, step = started(optimizer)
    for number in range(STEPS):
        loss = step(batch(number, grows=grows))
    since = step.in_force.calendar.followed_from
    return notes(step), step.plan.moves_exchange, replica_fingerprint(model), bool(loss.isfinite()), since


@pytest.mark.parametrize("optimizer", ["adamw", "adam with decay", "nadam"])
def test_a_jump_in_the_data_ends_the_exchange_of_momenta(optimizer):
    results = run_ranks(2, after_a_jump, optimizer, True)
    found, moves, _, is_finite, since = results[0]
    assert len(found) == 1
    noticed = math.ceil((JUMP + 1) / LOOK_EVERY) * LOOK_EVERY
    assert found[0].startswith(f"step {noticed}: ")
    assert since == noticed, "steps are held against the prediction of the plan that is followed"
    assert not moves
    assert is_finite
    assert len({(tuple(notes), fingerprint) for notes, _, fingerprint, _, _ in results}) == 1


@pytest.mark.parametrize(("optimizer", "grows"), [("adamw", False), ("sgd", True)])
def test_what_fits_and_what_has_no_second_moment_is_left_alone(optimizer, grows):
    for found, moves, _, _, _ in run_ranks(2, after_a_jump, optimizer, grows):
        assert not found
        assert moves


def one_rank_alone(energy: float) -> tuple[int, str]:
    own = Momenta.energies

    def other(momenta: Momenta, plan: Any) -> dict[str, float]:
        return {name: energy if dist.get_rank() == 1 else value for name, value in own(momenta, plan).items()}

    with patch.object(Momenta, "energies", other):
        model, _, step = started()
        for number in range(JUMP):
            step(batch(number, grows=False))
    return len(notes(step)), replica_fingerprint(model)


@pytest.mark.parametrize("energy", [100.0, math.nan])
def test_what_one_rank_finds_all_act_on(energy):
    results = run_ranks(2, one_rank_alone, energy)
    assert [count for count, _ in results] == [1, 1]
    assert len({fingerprint for _, fingerprint in results}) == 1


def owed_before_and_after(optimizer: str, strategy: str) -> list[tuple[float, float]]:
    """Of each parameter the norm of what ranks owe the mean gradient before a thaw, and how far it is off afterwards.

    It is e d / (1 - beta1), summed over ranks and slots by their weights.
    """
    _, _, step = started(optimizer, Strategy.parse(strategy))
    for number in range(WARM + 3):
        step(batch(number, grows=False))
    force, owners = step.in_force, step.training.owners
    before: dict[str, Tensor] = {}
    for name, pieces in force.state.residuals.slices.items():
        options, kept = owners[name].options, owners[name].state
        whole = torch.zeros(owners[name].parameter.numel())
        for piece in pieces:
            piece.add_to(whole)
        d = 1.0
        if "exp_avg_sq" in kept:
            d = (kept["exp_avg_sq"] / (1 - options["betas"][1] ** float(kept["step"]))).sqrt() + options["eps"]
        taken = 1 - options["betas"][0] if "betas" in options else 1.0
        before[name] = whole * (d.flatten() if isinstance(d, Tensor) else d) / taken
    step._schedule._freeze.thaw(WARM + 3, "a test")
    found: list[tuple[float, float]] = []
    for name, mine in before.items():
        after = force.state.owed[name] / dist.get_world_size()
        for each in (mine, after):
            dist.all_reduce(each)
        found.append((float(mine.norm()), float((after - mine).norm())))
    step(batch(WARM + 3, grows=False))
    assert not force.state.owed, "the next gradients have brought it"
    return found


ONE_SHOT = "compress(sign)@gpu > all_gather@world > decompress@gpu"


@pytest.mark.parametrize(
    ("optimizer", "strategy", "ranks"),
    [
        ("adamw", ONE_SHOT, 2),
        ("adamw", str(TWO_SHOTS), 3),
        ("adam with decay", ONE_SHOT, 3),
        ("adam with decay", str(TWO_SHOTS), 2),
        ("sgd", ONE_SHOT, 3),
        ("sgd", str(TWO_SHOTS), 2),
    ],
)
def test_what_is_owed_is_carried_over_in_the_gradients_unit(optimizer, strategy, ranks):
    for found in run_ranks(ranks, owed_before_and_after, optimizer, strategy):
        assert found
        for norm, off in found:
            assert norm > 0
            assert off < 1e-4 * norm


def kept_by(*owned: Any) -> list[Any]:
    return copy.deepcopy([each.state_dict() for each in owned])


def taken_back(saved: list[Any], *owned: Any) -> None:
    for each, state in zip(owned, saved, strict=True):
        each.load_state_dict(state)


RESTARTS = (WARM + 1, JUMP + 1, 30, 31, STEPS - 1)


def restarted_around_a_thaw() -> dict[int, str]:
    """Fingerprints of a job, and of those that go on from its states after so many steps."""
    job = started()
    saved: dict[int, list[Any]] = {}
    for number in range(STEPS):
        if number in RESTARTS:
            saved[number] = kept_by(*job)
        job[2](batch(number))
    found = {0: replica_fingerprint(job[0])}
    for steps, states in saved.items():
        other = started()
        taken_back(states, *other)
        for number in range(steps, STEPS):
            other[2](batch(number))
        assert not other[2].plan.moves_exchange
        told = [note for note in other[2].notes if "a frozen second moment has stopped fitting" in note]
        assert len(told) == (steps >= 30), "the job that goes on says that it has thawed before"
        found[steps] = replica_fingerprint(other[0])
    return found


def test_a_restart_before_and_after_a_thaw_goes_on_to_the_bit():
    results = run_ranks(2, restarted_around_a_thaw)
    assert set(results[0]) == {0, *RESTARTS}
    assert len({fingerprint for found in results for fingerprint in found.values()}) == 1, results


def rolled_back_beyond_a_thaw() -> None:
    job = started()
    saved: list[Any] = []
    for number in range(31):
        if number == JUMP:
            saved = kept_by(*job)
        job[2](batch(number))
    taken_back(saved, *job)


def test_a_state_of_momenta_is_refused_after_a_thaw():
    outcomes = try_ranks(2, rolled_back_beyond_a_thaw)
    assert all("residuals have another unit" in outcome.text for outcome in outcomes), outcomes


def restarted_by_the_saved_plan() -> list[str]:
    job = started()
    saved: dict[int, list[Any]] = {}
    for number in range(WARM + 3):
        if number in (WARM - 2, WARM, WARM + 1):
            saved[number] = copy.deepcopy([job[0].state_dict(), job[1].state_dict(), job[2].checkpoint()])
        job[2](batch(number))
    found = [replica_fingerprint(job[0])]
    for steps, states in saved.items():
        other = started(plan=fxcomp.saved_plan(states[2]))
        taken_back(states, *other)
        for number in range(steps, WARM + 3):
            other[2](batch(number))
        assert not [note for note in other[2].notes if "another plan" in note]
        assert other[2].plan.moves_exchange
        found.append(replica_fingerprint(other[0]))
    return found


def test_the_plan_that_is_saved_in_a_warm_up_is_the_one_that_it_leads_to():
    results = run_ranks(2, restarted_by_the_saved_plan)
    assert len(results[0]) == 4
    assert len({fingerprint for found in results for fingerprint in found}) == 1, results
