"""A rank is killed or stalls, in a step or while plans race: all others say what did not end, and who is missing."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.drifting import JOB, table
from helpers.drifting import compiled as racing
from helpers.ranks import try_ranks
from helpers.small_step import batch, compiled
from helpers.virtual_time import VirtualTime, virtual_time

import fxcomp
from fxcomp import compat
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.transport import Launch
from fxcomp.site import Site

RANKS = 3
STALL_S = 3.0

TWO_SHOTS = (
    "compress(int4(block=32))@gpu > all_to_all@world > decompress@gpu > "
    "compress(int8(block=32))@gpu > all_gather@world > decompress@gpu"
)
"""Blocks so small that every rank owns some of the weight."""


def two_buckets(device: str) -> fxcomp.CompiledStep:
    strategy = Strategy.parse(TWO_SHOTS.replace("@gpu", f"@{device}"))
    sizes = {"bias": 10, "weight": 200}
    return compiled(plan=Plan(tuple(Bucket((name,), (size,), strategy) for name, size in sizes.items())))


def is_second_shot(launch: Launch) -> bool:
    return launch.name.startswith("all_gather_1")


def one_is_killed(rank: int, device: str) -> None:
    step = two_buckets(device)
    step(batch(0))
    start = Launch.start

    def killed(self: Launch, *arguments: Any) -> Any:
        if is_second_shot(self):
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, *arguments)

    if dist.get_rank() == rank:
        with patch.object(Launch, "start", killed):
            step(batch(1))
    step(batch(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("victim", "device"), [(0, "gpu"), (1, "cpu"), (2, "gpu")])
def test_all_others_name_a_rank_that_is_killed_and_the_bucket(victim: int, device: str):
    outcomes = try_ranks(RANKS, one_is_killed, victim, device)
    assert outcomes[victim].error == "RankDied"
    for rank in {*range(RANKS)} - {victim}:
        assert outcomes[rank].error == "PeerFailed"
        # Some of what it sent before may be lost with it.
        cause = rf"(all_gather|all_to_all)@world of bucket (0|1) did not end \(line \1_\2_int\d\): rank {victim} left"
        assert re.match(f"step 1 did not end: {cause}", outcomes[rank].text)


def one_stalls(rank: int, device: str) -> None:
    """Stop one rank before its second shot, until the others have given it up."""
    store, start = compat.default_store(), Launch.start
    others = [f"raised/{k}" for k in range(RANKS) if k != rank]
    with patch.object(compat, "group_timeout", lambda: timedelta(seconds=STALL_S)):
        step = two_buckets(device)
    step(batch(0))

    def stalled(self: Launch, *arguments: Any) -> Any:
        while is_second_shot(self) and not store.check(others):  # not wait: it would keep other threads from the store
            time.sleep(0.01)
        return start(self, *arguments)

    try:
        with patch.object(Launch, "start", stalled) if dist.get_rank() == rank else nullcontext():
            step(batch(1))
    finally:
        store.set(f"raised/{dist.get_rank()}", "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("victim", "device"), [(0, "gpu"), (2, "cpu")])
def test_all_others_name_a_rank_that_stalls_and_the_bucket(victim: int, device: str):
    outcomes = try_ranks(RANKS, one_stalls, victim, device, timeout_s=60)
    assert outcomes[victim].error == "PeerFailed"
    for rank in {*range(RANKS)} - {victim}:
        assert outcomes[rank].error == "PeerFailed"
        cause = rf"all_gather@world of bucket 1 did not end \(line all_gather_1_int8\): rank {victim} left"
        assert re.match(f"step 1 did not end: {cause}", outcomes[rank].text)


# While plans race

A_COLLECTIVE = r"step 4 did not end: \w+@world of bucket 0 did not end \(line \w+_0_?\w*\): .*rank.* left"
A_TURN = r"step 5 did not end: all_gather@world of the times of a turn's steps did not end: .*rank.* left"


def one_is_killed_in_a_race(rank: int, killer: tuple[type, str]) -> None:
    """Kill one rank in the second turn of a race, when it calls a method."""

    def killed(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with virtual_time(VirtualTime()):
        step = racing(table(0.8), optimizer="plain", race="auto", verify=0)
        first = step.plan
        while step.plan == first:
            step(JOB.batch(0, dist.get_rank()))
        with patch.object(*killer, killed) if dist.get_rank() == rank else nullcontext():
            while step.raced is None:
                step(JOB.batch(0, dist.get_rank()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("victim", "killer", "cause"),
    [
        (0, (Launch, "start"), A_COLLECTIVE),
        (1, (Site, "gather_numbers"), A_TURN),
    ],
    ids=["in a step", "at the end of a turn"],
)
def test_all_others_name_what_is_left_by_a_rank_that_is_killed_in_a_race(
    victim: int, killer: tuple[type, str], cause: str
):
    outcomes = try_ranks(RANKS, one_is_killed_in_a_race, victim, killer)
    assert outcomes[victim].error == "RankDied"
    for rank in {*range(RANKS)} - {victim}:
        assert outcomes[rank].error == "PeerFailed"
        assert re.match(cause, outcomes[rank].text)
