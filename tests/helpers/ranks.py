"""Run a function on real ranks: one process each, joined by gloo on this machine, ended when one hangs or fails."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported torch already: a rank starts in a tenth of a second instead of several.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fxcomp.pipeline", "pytest"])


@dataclass(frozen=True)
class Outcome:
    """How it went on one rank: what the function returned, or the error's class name and text."""

    value: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""


def run_ranks(ranks: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """What `work(*arguments)` returned on each rank; fails with the rank's traceback if it raised anywhere."""
    outcomes = try_ranks(ranks, work, *arguments, timeout_s=timeout_s, grace_s=2.0)
    failed = [f"rank {rank}:\n{o.trace or o.text}" for rank, o in enumerate(outcomes) if o.error]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def try_ranks(
    ranks: int,
    work: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
    grace_s: float | None = None,
) -> list[Outcome]:
    """How `work(*arguments)` went on each rank. After a failure the others get `grace_s` seconds, if given."""
    # The store lives here, on a free port that the system chose, so that it outlives every rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(ranks):
        mine, theirs = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(
            target=_rank, args=(theirs, store.port, rank, ranks, group_timeout_s, work, arguments), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        return _collect(pipes, timeout_s, grace_s)
    finally:
        for process in processes:
            process.join(0.5)
            process.kill()
            process.join()


def _collect(pipes: Sequence[Connection], timeout_s: float, grace_s: float | None) -> list[Outcome]:
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
    late = Outcome(error="RankHangs", text="no result in time; the rank was ended")
    return [outcomes.get(rank, late) for rank in range(len(pipes))]


def _rank(
    result: Connection, port: int, rank: int, ranks: int, timeout_s: float, work: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
        outcome = Outcome(value=work(*arguments))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        trace = traceback.format_exc()
        outcome = Outcome(error=type(error).__name__, text=str(error), trace=trace)
    result.send(outcome)
    result.close()
