"""Codes race at the momentum once the warm-up is over, bf16 beside them; restarts, thaws and ways back end it well."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor

import fxcomp
from fxcomp.cluster.link import Link
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.state.momenta import Momenta
from fxcomp.step.race import LONGEST, WARM_STEPS
from fxcomp.step.step_times import StepTimes

JOB = JOBS["mlp"]
SLOW = fxcomp.Cluster.parse("3x1", intra=Link(5.0, 12.0), inter=Link.parse("20mbit"))
WARM = 4
FIRST = WARM + WARM_STEPS
"""The first step of the race."""

Job = tuple[torch.nn.Module, torch.optim.Optimizer, fxcomp.CompiledStep]


def started(plan: Plan | None = None, *, replan: Any = "off") -> Job:
    """Compile what `aggressive` chooses, or what a saved plan says."""
    model = JOB.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    how: dict[str, Any] = {"within": "aggressive"} if plan is None else {"plan": plan}
    compress = fxcomp.Compress(**how, steps=3000, warmup=fxcomp.Warmup(int4_steps=WARM))
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        optimizer,
        JOB.batch(0, dist.get_rank()),
        compress=compress,
        cluster=SLOW,
        costs=fxcomp.CostTable(),
        checks=fxcomp.Checks(verify=5, replan=replan),
    )
    return model, optimizer, step


def sends_bf16(step: fxcomp.CompiledStep) -> bool:
    """Ask if momenta go by bf16 now."""
    moved = (bucket for bucket in step.plan.buckets if bucket.at is ExchangePoint.MOMENTUM)
    return any(str(each) == "bf16" for bucket in moved for each in bucket.strategy.compressors)


def taking(step: fxcomp.CompiledStep, bf16_ms: float) -> Any:
    """Let steps by bf16 take so long, and others 10 ms."""

    def slowest(_: StepTimes, numbers: Sequence[int], __: Any) -> list[float]:
        return [bf16_ms if sends_bf16(step) else 10.0] * len(numbers)

    return patch.object(StepTimes, "slowest", slowest)


def train(job: Job, first: int, end: int) -> None:
    for number in range(first, end):
        job[2](JOB.batch(number, dist.get_rank()))


def kept_by(job: Job) -> list[Any]:
    return copy.deepcopy([job[0].state_dict(), job[1].state_dict(), job[2].checkpoint()])


def take_back(saved: list[Any], job: Job) -> None:
    for each, state in zip(job, copy.deepcopy(saved), strict=True):  # an optimizer goes on in the tensors it is given
        each.load_state_dict(state)


def owed(step: fxcomp.CompiledStep) -> Tensor:
    """Add up what all ranks owe the mean of momenta under all plans that take turns."""
    follower, ranks = step.in_force._follower, dist.get_world_size()
    states = [each.state for each in follower.racing or (follower.now,) if each.state is not None]
    found: list[Tensor] = []
    for name, owner in step.training.owners.items():
        whole = torch.zeros(owner.parameter.numel())
        for state in states:
            whole += state.owed.get(name, torch.zeros_like(whole)) / ranks
            for piece in state.residuals.slices.get(name, ()):
                piece.add_to(whole)
        dist.all_reduce(whole)
        found.append(whole)
    return torch.cat(found)


def raced(bf16_ms: float) -> dict[str, Any]:
    job = started()
    step, plans, lost = job[2], list[tuple[str, bool]](), [0.0]
    settle = step.in_force.settle_on

    def settled(number: int) -> None:
        before = owed(step)
        settle(number)
        lost.append(float((owed(step) - before).norm() / before.norm()))

    with taking(step, bf16_ms), patch.object(step.in_force, "settle_on", settled):
        before = step.explain()
        for number in range(FIRST + LONGEST):
            train(job, number, number + 1)
            plans.append((step.plan.digest, step.plan.moves_exchange))
            if step.raced is not None and number >= step.raced.last_step + 3:
                break
    assert step.raced is not None
    return {
        "plans": plans,
        "names": {runner.name: runner.plan.moved for runner in step.raced.runners},
        "when": (step.raced.first_step, step.raced.last_step),
        "winner": step.raced.stays.name,
        "is bf16": sends_bf16(step),
        "lost": max(lost),
        "notes": [note for note in step.notes if note.startswith("raced 2 plans at the momentum in steps")],
        "report": step.explain(),
        "before": before,
        "fingerprint": replica_fingerprint(job[0]),
    }


@pytest.mark.parametrize(("bf16_ms", "winner"), [(5.0, "bf16"), (15.0, "predicted best"), (10.0, "bf16")])
def test_after_the_warm_up_the_chosen_code_races_with_bf16(bf16_ms: float, winner: str):
    results = run_ranks(3, raced, bf16_ms)
    first = results[0]
    assert all(each["plans"] == first["plans"] for each in results)
    assert len({each["fingerprint"] for each in results}) == 1
    assert first["winner"] == winner, "a tie goes to bf16, which loses less"
    assert first["is bf16"] is (winner == "bf16")
    assert first["when"][0] == FIRST
    assert [moves for _, moves in first["plans"]] == [number >= WARM for number in range(len(first["plans"]))]
    assert len({digest for digest, moves in first["plans"] if moves}) == 2
    assert set(first["names"]) == {"predicted best", "bf16"}
    assert first["names"]["predicted best"] == first["names"]["bf16"] != ()
    assert first["lost"] < 1e-5
    assert len(first["notes"]) == 1
    assert f"plans will race from step {FIRST} on" in first["before"]
    assert "race of 2 plans at the momentum" in " ".join(first["report"].split())


def restarted() -> dict[int, dict[str, Any]]:
    """Save in a race and after it, and go on by the saved plan; and by the mode."""
    job, saved = started(), dict[int, tuple[list[Any], Tensor]]()
    with taking(job[2], 15.0):
        for number in range(FIRST + 64):
            if number in (FIRST, FIRST + 3, FIRST + 60):
                saved[number] = kept_by(job), owed(job[2])
            train(job, number, number + 1)
    assert job[2].raced is not None
    assert FIRST + 3 < job[2].raced.last_step <= FIRST + 60
    found: dict[int, dict[str, Any]] = {}
    for steps, (states, before) in saved.items():
        restarted = list[str]()
        for _ in range(2 if steps == FIRST else 1):
            other = started(fxcomp.saved_plan(states[2]))
            take_back(states, other)
            lost = float((owed(other[2]) - before).norm() / before.norm())
            assert not sends_bf16(other[2])
            train(other, steps, job[2].steps)
            assert not other[2].is_racing
            assert other[2].raced is None
            restarted.append(replica_fingerprint(other[0]))
        by_mode = started()
        take_back(states, by_mode)
        races_again = by_mode[2].is_racing
        train(by_mode, steps, steps + 12)
        found[steps] = {
            "original": replica_fingerprint(job[0]),
            "restarted": restarted,
            "lost": lost,
            "races again": races_again,
            "by mode": replica_fingerprint(by_mode[0]),
        }
    return found


def test_a_job_that_goes_on_by_its_saved_plan_does_not_race_again():
    results = run_ranks(3, restarted)
    assert len(results[0]) == 3
    for steps in results[0]:
        of_ranks = [each[steps] for each in results]
        assert len({fingerprint for each in of_ranks for fingerprint in each["restarted"]}) == 1
        assert len({each["by mode"] for each in of_ranks}) == 1
        for each in of_ranks:
            assert each["lost"] < 1e-5
            assert each["races again"], "by the mode it does, as at gradients"
            if steps == FIRST + 60:
                assert each["original"] == each["restarted"][0], "once the race is over it goes on to the bit"


def rolled_back() -> list[str]:
    """Go back to the warm-up from beyond the race, twice, in the same process."""
    job, found = started(), list[str]()
    with taking(job[2], 5.0):
        train(job, 0, WARM - 1)
        saved = kept_by(job)
        for number in range(WARM - 1, FIRST + LONGEST):
            train(job, number, number + 1)
            if job[2].raced is not None:
                break
        for _ in range(2):
            take_back(saved, job)
            assert not job[2].plan.moves_exchange
            train(job, WARM - 1, WARM)
            assert not job[2].plan.moves_exchange
            train(job, WARM, WARM + 4)
            assert sends_bf16(job[2]), "the race has been decided"
            found.append(replica_fingerprint(job[0]))
    return found


def test_a_job_goes_back_to_the_warm_up_from_beyond_the_race():
    assert len({fingerprint for each in run_ranks(3, rolled_back) for fingerprint in each}) == 1


def thawed_in_the_race() -> dict[str, Any]:
    job, own = started(), Momenta.energies

    def grown(momenta: Momenta, plan: Any) -> dict[str, float]:
        return {name: 100.0 if job[2].steps >= 10 else energy for name, energy in own(momenta, plan).items()}

    step = job[2]
    with taking(step, 15.0), patch.object(Momenta, "energies", grown):
        train(job, 0, 9)
        was_racing = step.is_racing
        train(job, 9, 14)
        other = started()
        assert other[2].is_racing
        take_back(kept_by(job), other)
        train(job, 14, 24)
        train(other, 14, 24)
    assert not other[2].is_racing, "a job that goes on after a thaw holds no race"
    assert replica_fingerprint(other[0]) == replica_fingerprint(job[0])
    return {
        "was racing": was_racing,
        "racing": step.is_racing,
        "moves": step.plan.moves_exchange,
        "bf16": sends_bf16(step),
        "notes": [note for note in step.notes if "exchange gradients again" in note],
        "fingerprint": replica_fingerprint(job[0]),
    }


def test_a_thaw_ends_the_race():
    results = run_ranks(3, thawed_in_the_race)
    for each in results:
        assert each["was racing"]
        assert not each["racing"]
        assert not each["moves"]
        assert len(each["notes"]) == 1
    assert len({each["fingerprint"] for each in results}) == 1
