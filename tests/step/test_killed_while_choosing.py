"""A rank is killed, or comes late, while first steps are timed, a plan is chosen or its programs are made."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks, try_ranks

import fxcomp
from fxcomp import compat
from fxcomp.planning.decide import Planner
from fxcomp.planning.timed_steps import HeldCollectives, OneByOne
from fxcomp.site import Site
from fxcomp.step.plan_in_force import PlanInForce

RANKS = 3

PLACES: dict[str, tuple[type, str]] = {
    "collectives are held": (HeldCollectives, "wait"),
    "operators run one by one": (OneByOne, "_run"),
    "ranks compare first steps": (Site, "gather_numbers"),
    "the machine is measured": (Planner, "_gathered"),
    "the plan is chosen": (Planner, "choose"),
    "programs of the race are made": (PlanInForce, "line_up"),
}
"""Places of the first steps and the choice, by what happens there; the plan is chosen on rank 0 alone."""


def begun() -> fxcomp.CompiledStep:
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)
    dist.barrier()
    model = JOBS["mlp"].build()
    batch = JOBS["mlp"].batch(0, dist.get_rank())
    return fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["sgd"](model.parameters()), batch)


def one_is_killed(victim: int, place: str) -> None:
    step = begun()

    def killed(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    step(JOBS["mlp"].batch(0, dist.get_rank()))
    if dist.get_rank() == victim:
        patch.object(*PLACES[place], killed).start()
    for number in range(1, 12):
        step(JOBS["mlp"].batch(number, dist.get_rank()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("place", "victim"), list(zip(PLACES, (1, 0, 2, 0, 0, 1), strict=True)))
def test_all_others_end_where_a_rank_is_killed(place: str, victim: int):
    outcomes = try_ranks(RANKS, one_is_killed, victim, place)
    assert outcomes[victim].error == "RankDied"
    for rank in {*range(RANKS)} - {victim}:
        assert outcomes[rank].error == "PeerFailed", outcomes[rank].text
        assert re.search(rf"rank {victim} left|rank {victim} has|rank.* left", outcomes[rank].text)


def one_comes_late(victim: int, place: str) -> tuple[list[str], list[bytes], int]:
    step, waits = begun(), [0]
    place_of, name = PLACES[place]
    method = getattr(place_of, name)

    def late(*arguments: Any, **options: Any) -> Any:
        if not waits[0]:
            time.sleep(1.0)
        waits[0] += 1
        return method(*arguments, **options)

    if dist.get_rank() == victim:
        patch.object(place_of, name, late).start()
    digests: list[str] = []
    for number in range(14):
        step(JOBS["mlp"].batch(number, dist.get_rank()))
        digests.append(step.plan.digest)
    bits = [parameter.detach().numpy().tobytes() for parameter in step.training.model.parameters()]
    step.close()
    return digests, bits, waits[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("place", "victim"), list(zip(PLACES, (0, 1, 1, 1, 0, 0), strict=True)))
def test_a_rank_that_comes_late_delays_the_others_and_nothing_else(place: str, victim: int):
    found = run_ranks(2, one_comes_late, victim, place)
    assert found[victim][2] > 0, "the place was reached"
    assert found[0][:2] == found[1][:2], "all follow the same plans, to the same bits"
