"""A process ends, or waits elsewhere, while others wait for its answer: they hear it soon, and what they hear is true.

No test measures time. The group's timeout is ten minutes, and ranks that wait for it are stopped after one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.ranks import Outcome, run_ranks, try_ranks
from helpers.replicas import everyone
from helpers.small_step import batch, compiled

from fxcomp import compat
from fxcomp.frontends import compile_step


def outcomes_of(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Outcome]:
    return try_ranks(ranks, work, *arguments, timeout_s=60.0, group_timeout_s=600.0)


def ends(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed_in_capture() -> None:
    with patch.object(compile_step, "capture_first", ends if dist.get_rank() == 1 else compile_step.capture_first):
        compiled()


def test_a_rank_that_is_killed_in_its_capture_is_named_by_all_others():
    first, killed, third = outcomes_of(3, is_killed_in_capture)
    assert killed.error == "RankDied"
    for outcome in (first, third):
        assert outcome.error == "PeerFailed"
        assert re.match(r"rank 1 has gone before it arrived at capturing the step[;.]", outcome.text), outcome.text


def ends_before_loading(how: str) -> None:
    step = compiled()
    step(batch(0))
    if dist.get_rank() == 1:
        ends() if how == "killed" else os._exit(0)
    step.load_state_dict(None)


@pytest.mark.parametrize("how", ["killed", pytest.param("ended", marks=pytest.mark.slow)])
def test_a_rank_that_has_gone_is_not_waited_for_where_a_state_is_loaded(how: str):
    waited, _ = outcomes_of(2, ends_before_loading, how)
    assert waited.error == "PeerFailed"
    assert "rank 1 has gone before it arrived at load_state_dict" in waited.text


def blocking_sockets(seconds: float | None) -> list[bool]:
    """Return which sockets block after the store was asked for, under a default timeout of new Python sockets."""
    pair = socket.socketpair()
    socket.setdefaulttimeout(seconds)
    store = compat.default_store()
    for number in range(20):
        store.set(str(number), "")
    found: list[bool] = []
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(os.get_blocking(int(name)))
    pair[0].close()
    pair[1].close()
    return found


def test_other_sockets_and_the_stores_own_block_as_before():
    before, after = (run_ranks(2, blocking_sockets, seconds) for seconds in (None, 20.0))
    assert before == after
    assert all(sum(rank) >= 3 for rank in after), "the store's connection and a pair"


def with_rank_0s_store(how: str) -> None:
    """Let rank 0 serve the store, and end in its capture: by an error, killed, or stopped until rank 1 ends."""
    store, rank = compat.default_store(), dist.get_rank()
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        store.set("port", str(served.port))
    else:
        served = dist.TCPStore("127.0.0.1", int(store.get("port")), 2, is_master=False)
    dist.barrier()  # one rank may still be connecting to the group that the other one leaves
    dist.destroy_process_group()
    timeout = timedelta(seconds=1 if how == "stopped" else 600)
    dist.init_process_group("gloo", store=served, rank=rank, world_size=2, timeout=timeout)
    capture, pid = compile_step.capture_first, os.getpid()
    if how == "stopped":
        pid = everyone("pid", pid)[0]

    def ends_when_both_are_here(*_: object) -> None:
        store.get("captures")
        if how == "killed":
            ends()
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        raise ValueError("no such thing")

    def captures(*arguments: Any) -> Any:
        store.set("captures", "")
        return capture(*arguments)

    try:
        with patch.object(compile_step, "capture_first", ends_when_both_are_here if rank == 0 else captures):
            compiled()
    except ValueError:
        os._exit(1)
    finally:
        if how == "stopped" and rank:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raised", r"rank 0 failed in capturing the step: ValueError: no such thing"),
        ("killed", r"the process that hosts the store has ended, while rank 1 was at capturing the step\."),
        ("stopped", r"the process that hosts the store does not answer, while rank 1 was at capturing the step\."),
    ],
    ids=["raises", "is killed", "is stopped"],
)
def test_what_is_said_is_true_where_rank_0_serves_the_store_and_ends(how: str, text: str):
    _, other = outcomes_of(2, with_rank_0s_store, how)
    assert other.error == "PeerFailed"
    assert re.match(text, other.text), other.text
    assert "did not arrive" not in other.text


def meets_alone(what: str) -> None:
    step = compiled()
    step(batch(0))
    if dist.get_rank() == 0:
        step.replan() if what == "replan" else step.load_state_dict(None)
    step(batch(1))


@pytest.mark.parametrize("what", ["replan", pytest.param("load_state_dict", marks=pytest.mark.slow)])
def test_ranks_of_which_one_steps_while_another_one_does_something_else_all_end(what: str):
    meets, steps = outcomes_of(2, meets_alone, what)
    assert meets.error == steps.error == "PeerFailed"
    for outcome in (meets, steps):
        assert f"rank 1 is in step 1, where it waits for the others, and rank 0 is at {what}" in outcome.text
    assert "Make the same calls on every rank" in meets.text
