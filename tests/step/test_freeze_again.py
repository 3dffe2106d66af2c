"""After a thaw second moments go on for longer than before, and freeze again; restarts anywhere go on to the bit."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn

import fxcomp
from fxcomp.plan.compress import LEAST_WARM
from fxcomp.plan.strategy import Strategy
from fxcomp.state.momenta import Momenta, steps_to_forget
from fxcomp.step.freeze import LOOK_EVERY

JOB = JOBS["mlp"]
WARM = 5
TWO_SHOTS = Strategy.parse(
    "compress(sign)@gpu > all_to_all@world > decompress@gpu > compress(sign)@gpu > all_gather@world > decompress@gpu"
)
THAW = LOOK_EVERY
FIRST = THAW + 2 * LEAST_WARM
"""The first step after a second freeze, where little is to be forgotten."""
ENERGY = 16.0

Job = tuple[nn.Module, torch.optim.Optimizer, fxcomp.CompiledStep]


def started(beta2: float = 0.9) -> Job:
    model = JOB.build()
    made = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, beta2), weight_decay=0.1)
    plan = plan_in_turns(model, [TWO_SHOTS], 2).at_momenta()
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        made,
        JOB.batch(0, dist.get_rank()),
        compress=fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(int8_steps=WARM)),
        checks=fxcomp.Checks(verify=3),
        costs=fxcomp.CostTable(),
    )
    return model, made, step


def breaking_at(*steps: int, energy: float = ENERGY) -> Any:
    """Let second moments stop fitting in the looks after so many steps."""
    own = Momenta.energies

    def energies(momenta: Momenta, plan: Any) -> dict[str, float]:
        found = own(momenta, plan)
        taken = {int(owner.state["step"]) for owner in momenta._owners.values()}
        return dict.fromkeys(found, energy) if taken & set(steps) else found

    return patch.object(Momenta, "energies", energies)


def train(job: Job, first: int, end: int) -> None:
    for number in range(first, end):
        job[2](JOB.batch(number, dist.get_rank()))


def kept_by(job: Job) -> list[Any]:
    return copy.deepcopy([each.state_dict() for each in job])


def take_back(saved: list[Any], job: Job) -> None:
    for each, state in zip(job, copy.deepcopy(saved), strict=True):  # an optimizer goes on in the tensors it is given
        each.load_state_dict(state)


def frozen(job: Job) -> list[Tensor]:
    """Work out the number that each value of a mean is divided by."""
    found: list[Tensor] = []
    for owner in job[2].training.owned:
        beta2, kept = owner.options["betas"][1], owner.state
        found.append((kept["exp_avg_sq"] / (1 - beta2 ** float(kept["step"]))).sqrt())
    return found


def twice() -> dict[str, Any]:
    """Thaw after 10 steps, freeze after 50, thaw after 60, and freeze after 140."""
    job, second, stays = started(), FIRST + LOOK_EVERY, list[bool]()
    with breaking_at(THAW, second):
        for number in range(second + 4 * LEAST_WARM + 5):
            before = frozen(job) if job[2].steps > 0 else []
            job[2](JOB.batch(number, dist.get_rank()))
            if before:
                pairs = zip(before, frozen(job), strict=True)
                stays.append(all(torch.allclose(a, b, rtol=1e-4) for a, b in pairs))
    return {
        "stays": stays,
        "notes": [note for note in job[2].notes if "exchange" in note],
        "fingerprint": replica_fingerprint(job[0]),
        "finite": all(bool(p.isfinite().all()) for p in job[0].parameters()),
    }


def test_momenta_are_exchanged_again_each_time_later():
    results = run_ranks(2, twice)
    first = results[0]
    assert all(each["stays"] == first["stays"] for each in results)
    assert len({each["fingerprint"] for each in results}) == 1
    assert first["finite"]
    second, third = FIRST + LOOK_EVERY, FIRST + LOOK_EVERY + 4 * LEAST_WARM
    froze = [WARM <= n < THAW or FIRST <= n < second or third <= n for n in range(third + 5)]
    assert first["notes"][0].startswith(f"step {THAW}: ranks exchange gradients again")
    assert first["notes"][0].endswith(f"Momenta are exchanged again from step {FIRST} on")
    assert [note.partition(":")[0] for note in first["notes"]] == [f"step {n}" for n in (THAW, FIRST, second, third)]
    assert "ranks exchange momenta again" in first["notes"][1]
    for number, (is_frozen, stayed) in enumerate(zip(froze[1:], first["stays"], strict=True), 1):
        if number not in (WARM, FIRST, third, THAW - 1, second - 1):  # there a freeze or a thaw changes them
            assert stayed is is_frozen, f"what means are divided by, in step {number}"


RESTARTS = (WARM + 1, THAW, THAW + 1, FIRST - 1, FIRST, FIRST + 1)
IN_PLACE = (THAW, FIRST - 1, FIRST + 1)


def restarted() -> dict[str, tuple[str, int | None]]:
    """Fingerprints of a job, and of those that go on from its states, and when each froze last."""
    job, saved, end = started(), dict[int, list[Any]](), FIRST + 4
    found: dict[str, tuple[str, int | None]] = {}
    with breaking_at(THAW):
        for number in range(end):
            if number in RESTARTS:
                saved[number] = kept_by(job)
            train(job, number, number + 1)
        found["whole"] = replica_fingerprint(job[0]), job[2].in_force.momenta.freezes_at
        for in_place, places in ((False, RESTARTS), (True, IN_PLACE)):
            for steps in places:
                other = job if in_place else started()
                take_back(saved[steps], other)
                train(other, steps, end)
                assert other[2].plan.moves_exchange
                ends = replica_fingerprint(other[0]), other[2].in_force.momenta.freezes_at
                found[f"from {steps}, {in_place=}"] = ends
    return found


def test_a_restart_goes_on_to_the_bit():
    results = run_ranks(2, restarted)
    assert len(results[0]) == 1 + len(RESTARTS) + len(IN_PLACE)
    assert len({fingerprint for found in results for fingerprint, _ in found.values()}) == 1, results
    assert {freezes_at for found in results for _, freezes_at in found.values()} == {FIRST}


def after(energy: float, beta2: float) -> int | None:
    job = started(beta2)
    with breaking_at(THAW, energy=energy):
        train(job, 0, THAW + 2)
    assert not job[2].plan.moves_exchange
    return job[2].in_force.momenta.freezes_at


@pytest.mark.parametrize(
    ("energy", "beta2", "expected"),
    [
        (ENERGY, 0.9, FIRST),
        (1e4, 0.999, THAW + 9206),  # 0.999 ** 9206 is 1e-4
        (math.nan, 0.9, None),
        (math.inf, 0.9, None),
    ],
)
def test_a_freeze_waits_until_what_the_thaw_added_has_worn_off(energy: float, beta2: float, expected: int | None):
    assert run_ranks(2, after, energy, beta2) == [expected, expected]


def test_steps_to_forget():
    assert steps_to_forget(100.0, 0.9) == 44
    assert 100.0 * 0.9**44 <= 1 < 100.0 * 0.9**43
    assert steps_to_forget(100.0, 0.0) == 0
