"""A rank that is killed, or stalls, between the two shots of a reduction: the others say which rank, in what."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks, try_ranks

from fxcomp import compat
from fxcomp.errors import LostTouch
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import Groups

CUT = (5, 3, 4)
STALL_S = 5.0


def groups(level: str = "world", *, direct: bool = True) -> Groups:
    return Groups.create({level: [list(range(len(CUT)))]}, ["main"], [level] if direct else [])


def all_caught(topic: str, rank: int) -> None:
    """Wait until the ranks but this one have raised: the first to close its connections would be missed, too."""
    store, others = compat.default_store(), [k for k in range(len(CUT)) if k != rank]
    if dist.get_rank() != rank:
        store.set(f"{topic}/{dist.get_rank()}", "raised")
    while not store.check([f"{topic}/{k}" for k in others]):  # not wait: it would keep other threads from the store
        time.sleep(0.01)


def first_shot(rt: Runtime) -> None:
    rt.wait(rt.launch("all_to_all_3_int4", "all_to_all", torch.ones(sum(CUT)), CUT, "world"))


def second_shot(rt: Runtime) -> None:
    rt.wait(rt.launch("all_gather_3_int8", "all_gather", torch.ones(CUT[dist.get_rank()]), CUT, "world"))


def one_is_killed(victim: int) -> None:
    network = groups()
    rt = Runtime(network, torch.device("cpu"))
    for _ in range(2):
        first_shot(rt)
        second_shot(rt)
    first_shot(rt)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        second_shot(rt)
    finally:
        all_caught("killed", victim)
        assert not network.is_idle
        network.give_up()
        assert network.is_idle


@pytest.mark.one_in(2)
@pytest.mark.parametrize("victim", range(len(CUT)))
def test_all_others_name_a_rank_that_is_killed_between_two_shots(victim: int):
    outcomes = try_ranks(len(CUT), one_is_killed, victim)
    assert outcomes[victim].error == "RankDied"
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert outcome.error == "LostTouch", outcome
        expected = rf"all_gather@world of bucket 3 did not end \(line all_gather_3_int8\): rank {victim} left"
        assert re.match(expected, outcome.text)


def one_is_killed_before_another_begins(victim: int, late: int) -> None:
    network, store, me = groups(), compat.default_store(), dist.get_rank()
    rt = Runtime(network, torch.device("cpu"))
    first_shot(rt)
    if me == victim:
        store.wait(["begun"])
        os.kill(os.getpid(), signal.SIGKILL)
    if me == late:
        store.wait(["begun"])
        time.sleep(0.5)  # by then its connection to the victim has failed
    try:
        flight = rt.launch("all_gather_3_int8", "all_gather", torch.ones(CUT[me]), CUT, "world")
        store.set("begun", "")
        rt.wait(flight)
    finally:
        all_caught("killed", victim)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("victim", range(len(CUT)))
def test_a_rank_that_cannot_begin_does_not_let_the_others_wait_for_it(victim: int):
    late = (victim + 2) % len(CUT)
    outcomes = try_ranks(len(CUT), one_is_killed_before_another_begins, victim, late)
    assert [o.error for o in outcomes] == ["RankDied" if k == victim else "LostTouch" for k in range(len(CUT))]
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert f"rank {victim} left" in outcome.text


def each_stalls_in_turn() -> list[str]:
    """Every rank stalls in a group of its own; how the other two fare. In threads, because each waits that long."""
    me, found = dist.get_rank(), [""] * len(CUT)
    dist.barrier()
    with patch.object(compat, "group_timeout", lambda: timedelta(seconds=STALL_S)):
        networks = [groups() for _ in CUT]

    def run(victim: int) -> None:
        rt = Runtime(networks[victim], torch.device("cpu"))
        first_shot(rt)
        if me != victim:
            try:
                second_shot(rt)
            except LostTouch as lost:
                found[victim] = str(lost)
            with pytest.raises(LostTouch, match=f"^rank {victim} left"):
                networks[victim].settle()
        all_caught(f"stalled/{victim}", victim)
        networks[victim].give_up()

    threads = [threading.Thread(target=run, args=(victim,)) for victim in range(len(CUT))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_others_name_a_rank_that_stalls_between_two_shots():
    found = run_ranks(len(CUT), each_stalls_in_turn)
    for rank, texts in enumerate(found):
        for victim, text in enumerate(texts):
            if rank == victim:
                assert text == ""
            else:
                expected = rf"all_gather@world of bucket 3 did not end \(line all_gather_3_int8\): rank {victim} left"
                assert re.match(expected, text), texts


def nobody_joins_rank_0() -> str:
    dist.barrier()
    with patch.object(compat, "group_timeout", lambda: timedelta(seconds=2)):
        network = groups("inter", direct=False)
    rt, text = Runtime(network, torch.device("cpu")), ""
    if dist.get_rank() == 0:
        with pytest.raises(LostTouch) as lost:
            rt.wait(rt.launch("all_gather_buffers", "all_gather", torch.ones(2), len(CUT), "inter"))
        text = str(lost.value)
        network.give_up()
        with pytest.raises(LostTouch, match=r"all_reduce@inter of bucket 0 .* has been given up"):
            rt.launch("all_reduce_0", "all_reduce", torch.ones(2), 1, "inter")
    dist.barrier()
    return text


def test_a_collective_of_the_backends_own_names_the_group():
    text = run_ranks(len(CUT), nobody_joins_rank_0)[0]
    assert re.match(r"all_gather@inter did not end \(line all_gather_buffers\): one of ranks 1, 2 left", text)
