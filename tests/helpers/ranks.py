"""Run a function on real ranks: one process each, joined by gloo on this machine.

Ranks are forked from one warm process per test session, which has imported torch and compiled a step without autograd
(`warm_rank`). Each runs one function and ends: nothing that a test changes, hangs or kills reaches the next one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.planting import VARIABLE, plant

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["pytest", "helpers.warm_rank"])


@dataclass(frozen=True)
class Outcome:
    """Hold what the function returned on one rank, or the error's class name and text."""

    value: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""


def run_ranks(ranks: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
    """Return what `work(*arguments)` returned on each rank; fail with the rank's traceback if it raised anywhere."""
    outcomes = try_ranks(ranks, work, *arguments, timeout_s=timeout_s, grace_s=5.0)
    failed = [f"rank {rank}:\n{o.text}\n{o.trace}" for rank, o in enumerate(outcomes) if o.error]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def run_alone(work: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0) -> Any:
    """Return what `work(*arguments)` returned in a process of its own, which joins no group and may start ranks."""
    _start_server()
    mine, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_alone, args=(theirs, os.environ.get(VARIABLE), work, arguments))
    process.start()
    theirs.close()
    try:
        assert mine.poll(timeout_s), f"no result in {timeout_s:g} s"
        outcome: Outcome = mine.recv()
        assert not outcome.error, f"{outcome.text}\n{outcome.trace}"
        return outcome.value
    finally:
        process.join(0.5)
        process.kill()
        process.join()


def try_ranks(
    ranks: int,
    work: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 300.0,
    group_timeout_s: float = 120.0,
    grace_s: float | None = None,
) -> list[Outcome]:
    """Report how `work(*arguments)` went on each rank. After a failure the others get `grace_s` seconds, if given."""
    _start_server()
    # The store lives here, on a free port that the system chose, so that it outlives every rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        here = _Here(store.port, ranks, group_timeout_s, dict(os.environ), os.getcwd(), Path(folder))
        try:
            for rank in range(ranks):
                mine, theirs = _PROCESSES.Pipe(duplex=False)
                processes.append(
                    _PROCESSES.Process(target=_rank, args=(theirs, rank, here, work, arguments), daemon=True)
                )
                processes[-1].start()
                theirs.close()
                pipes.append(mine)
            outcomes = _collect(pipes, timeout_s, grace_s)
            for rank in set(range(ranks)) - outcomes.keys():
                os.kill(processes[rank].pid or 0, signal.SIGUSR1)
                outcomes[rank] = Outcome(
                    error="RankHangs", text="no result in time", trace=_written(here.place_of(rank))
                )
            return [outcomes[rank] for rank in range(ranks)]
        finally:
            for process in processes:
                process.join(0.5)
                process.kill()
                process.join()


@dataclass(frozen=True)
class _Here:
    """Tell ranks how to meet, and the test's environment and working directory, which the warm process may not have."""

    port: int
    ranks: int
    timeout_s: float
    environment: dict[str, str]
    working_directory: str
    places: Path

    def place_of(self, rank: int) -> Path:
        """Return the file to which a rank writes where it is, when it is asked."""
        return self.places / str(rank)

    def enter(self, rank: int) -> None:
        faulthandler.register(signal.SIGUSR1, self.place_of(rank).open("w"))
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.working_directory)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)

    def join(self, rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        timeout = timedelta(seconds=self.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.ranks, timeout=timeout)


def _written(path: Path) -> str:
    """Read what a rank writes of itself, if it can within some seconds."""
    until = time.monotonic() + 5
    while time.monotonic() < until and not (path.exists() and "most recent call" in path.read_text()):
        time.sleep(0.02)
    time.sleep(0.05)  # the rest of it
    return path.read_text() if path.exists() else ""


def _start_server() -> None:
    """Start the process that ranks are forked from, unless it runs. It finds modules where this process does.

    Each call is one start of ranks, which the file that FXCOMP_LAUNCHES names counts in bytes (`benchmarks/house.py`).
    """
    if counted := os.environ.get("FXCOMP_LAUNCHES"):
        with open(counted, "ab") as file:
            file.write(b".")
    # The standard library has no public way to tell a process that was forked from the server.
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None and server._forkserver_pid is None:
        # This process was forked from the server. It knows the way there, but the standard library would start another.
        server.ensure_running = lambda: None
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _collect(pipes: Sequence[Connection], timeout_s: float, grace_s: float | None) -> dict[int, Outcome]:
    """Return the outcomes of the ranks that end in time."""
    outcomes: dict[int, Outcome] = {}
    until = time.monotonic() + timeout_s
    while len(outcomes) < len(pipes) and (left := until - time.monotonic()) > 0:
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        for pipe in wait(open_pipes, left):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = Outcome(error="RankDied", text="the process ended without a result")
            if outcomes[rank].error and grace_s is not None:
                until = min(until, time.monotonic() + grace_s)
    return outcomes


def _alone(result: Connection, bug: str | None, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(torch.get_num_threads())  # torch's own threads, lost by forking, are made again by one thread
    try:
        plant(bug)
        outcome = Outcome(value=work(*arguments))
    except BaseException as error:
        outcome = Outcome(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
    result.send(outcome)


def _rank(result: Connection, rank: int, here: _Here, work: Callable[..., Any], arguments: Any) -> None:
    here.enter(rank)
    try:
        plant(os.environ.get(VARIABLE))
        here.join(rank)
        outcome = Outcome(value=work(*arguments))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:  # pytest's own failures and interrupts are told too
        outcome = Outcome(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
    result.send(outcome)
    result.close()
