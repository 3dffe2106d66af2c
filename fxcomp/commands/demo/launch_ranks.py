"""Start one process for each rank, on shaped hosts or on this machine, and end all when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

import torch.distributed as dist

from fxcomp.commands.demo.shaped_hosts import INTERFACE, ShapedHosts
from fxcomp.errors import PeerFailed

_PORT = 29511  # in a namespace of our own every port is free


def run_ranks(
    command: Sequence[str],
    *,
    hosts: ShapedHosts | None = None,
    ranks_per_host: int = 1,
    timeout_s: float = 600.0,
    on_line: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Run `python <command>` once a rank and return what each printed.

    Ranks fill the hosts one after the other; without `hosts` there is one host, this one. Each finds RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. When one fails, or time is up, all are ended and
    `PeerFailed` carries the end of its error output. `on_line(rank, line)` hears every line as it is printed, in a
    thread of that rank.
    """
    world_size = (hosts.count if hosts else 1) * ranks_per_host
    address, port = (hosts.address(0), _PORT) if hosts else ("127.0.0.1", _free_port())
    ranks: list[_Rank] = []
    deadline = time.monotonic() + timeout_s
    try:
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % ranks_per_host),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo",
                "OMP_NUM_THREADS": "1",
            }
            prefix = hosts.command_on(rank // ranks_per_host) if hosts else []
            ranks.append(_Rank(rank, [*prefix, sys.executable, *command], environment, on_line))
        failed = _wait(ranks, deadline)
        if failed is not None:
            late = failed.process.poll() is None
            _end(ranks)  # first, so that the failed rank's error output is complete
            how = f"did not finish within {timeout_s:g} s" if late else _ending(failed.process.returncode)
            raise PeerFailed(f"rank {failed.number} {how}.\n{failed.error_tail()}".rstrip())
        return [rank.output() for rank in ranks]
    finally:
        _end(ranks)


def of_module(module: str, *arguments: str) -> list[str]:
    """Write the command of `run_ranks` that runs a module with what this process can import.

    Python's own switch for modules looks into the current folder first, where a `glob.py` would hide the library's.
    """
    run = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_module({module!r}, run_name='__main__')"
    return ["-c", run, *arguments]


def join() -> None:
    """Join the process group, and end when the parent does. A rank started by `run_ranks` calls this first."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    dist.init_process_group("gloo")  # pyright: ignore[reportUnknownMemberType]  # untyped


def exit_with_parent() -> None:
    # The parent holds the other end of our standard input and never writes: the end of it is the end of the parent.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


class _Rank:
    """A running rank, and two threads that keep what it prints."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: dict[str, str],
        on_line: Callable[[int, str], None] | None,
    ) -> None:
        self.number = number
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own: ended as a whole, and deaf to Ctrl-C in the terminal
        )
        assert self.process.stdout is not None, "asked for a pipe"
        assert self.process.stderr is not None, "asked for a pipe"
        self._out: list[str] = []
        self._errors: deque[str] = deque(maxlen=40)

        def heard(line: str) -> None:
            self._out.append(line)
            if on_line:
                on_line(number, line.rstrip("\n"))

        self._readers = [
            _start_reader(self.process.stdout, heard),
            _start_reader(self.process.stderr, self._errors.append),
        ]

    def output(self) -> str:
        self._drain()
        return "".join(self._out)

    def error_tail(self) -> str:
        self._drain()
        return "".join(self._errors).rstrip()

    def close(self) -> None:
        self._drain()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()

    def _drain(self) -> None:
        for reader in self._readers:
            reader.join(timeout=2)


def _start_reader(pipe: IO[str], hear: Callable[[str], object]) -> threading.Thread:
    def read() -> None:
        for line in pipe:
            hear(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader


def _wait(ranks: Sequence[_Rank], deadline: float) -> _Rank | None:
    """Wait for all ranks. Return the first that failed, or one that still runs at the deadline."""
    while True:
        codes = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            return failed[0]
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return ranks[codes.index(None)]
        time.sleep(0.02)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"


def _end(ranks: Sequence[_Rank]) -> None:
    """End what still runs: ask, wait two seconds, then insist."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        running = [rank for rank in ranks if rank.process.poll() is None]
        for rank in running:
            os.killpg(rank.process.pid, sign)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(rank.process.poll() is None for rank in running):
            time.sleep(0.02)
    for rank in ranks:
        rank.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
