"""Ranks start warm and alike, tell what went wrong in them, and leave nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_alone, run_ranks, try_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from fxcomp import compat


def changing_everything() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BEHIND"] = "1"
    compat.host_name = lambda: "another host"
    dist.new_group([0])


def state() -> list[Any]:
    flags = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    return [*flags, os.environ.get("LEFT_BEHIND"), compat.host_name(), torch.rand(1).item(), os.getcwd()]


def test_nothing_that_a_rank_changes_reaches_the_next_one():
    before = run_ranks(2, state)
    run_ranks(2, changing_everything)
    assert run_ranks(2, state) == before == [before[0]] * 2


def test_ranks_see_the_environment_and_the_folder_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LEFT_BEHIND", "here")
    monkeypatch.chdir(tmp_path)
    (found,) = run_ranks(1, state)
    assert (found[3], found[-1]) == ("here", str(tmp_path))


def imported() -> tuple[bool, bool]:
    return "fxcomp.step.compiled_step" in sys.modules, "torch._dynamo" in sys.modules


def test_ranks_start_with_everything_imported_and_no_thread_lost():
    assert run_ranks(2, imported) == [(True, True)] * 2


def differentiated() -> list[float]:
    value = torch.ones(2, requires_grad=True)
    with FakeTensorMode():  # knows of accelerators where the build does
        seen = torch.ones(2, requires_grad=True)
        seen.sum().backward()
    (3 * value).sum().backward()
    assert value.grad is not None
    return value.grad.tolist()


def differentiated_alone_and_on_ranks() -> list[list[float]]:
    return [differentiated(), *run_ranks(2, differentiated), differentiated()]


def test_every_build_of_torch_differentiates_on_ranks_and_on_ranks_of_a_forked_process():
    assert run_ranks(2, differentiated) == [[3.0, 3.0]] * 2
    assert run_alone(differentiated_alone_and_on_ranks) == [[3.0, 3.0]] * 4


def failing_on_one() -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("a mistake of ours")


def test_an_error_in_a_rank_shows_its_traceback_in_the_test():
    with pytest.raises(AssertionError, match=r"(?s)rank 1:\na mistake of ours\nTraceback.*in failing_on_one"):
        run_ranks(2, failing_on_one)


def interrupted() -> None:
    pytest.fail("said by pytest")


def test_what_is_no_exception_is_told_too():
    (outcome,) = try_ranks(1, interrupted)
    assert (outcome.error, outcome.text) == ("Failed", "said by pytest")


def dying_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_told_and_the_next_test_has_its_own():
    _, died = try_ranks(2, dying_on_one, grace_s=5.0)  # its socket may close before its pipe
    assert (died.error, died.text) == ("RankDied", "the process ended without a result")
    assert run_ranks(2, os.getppid)[0] != os.getpid()


def hanging_on_one(folder: Path) -> None:
    process = folder / "process of rank 1"
    if dist.get_rank() == 1:
        process.write_text(str(os.getpid()))
        time.sleep(1000)
    while not process.exists() or not process.read_text():
        time.sleep(0.01)
    raise ZeroDivisionError("the other one hangs")


def test_a_rank_that_hangs_is_ended_and_says_where_it_was(tmp_path: Path):
    failed, hung = try_ranks(2, hanging_on_one, tmp_path, grace_s=0.0)
    assert (failed.error, hung.error) == ("ZeroDivisionError", "RankHangs")
    assert "in hanging_on_one" in hung.trace
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process of rank 1").read_text()), 0)


def waiting_forever() -> None:
    time.sleep(1000)


def test_ranks_that_do_not_end_in_time_are_ended():
    outcomes = try_ranks(2, waiting_forever, timeout_s=0.5)
    assert [(outcome.error, outcome.text) for outcome in outcomes] == [("RankHangs", "no result in time")] * 2
