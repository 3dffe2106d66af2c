"""Start one process per rank, directly on this machine or on hosts emulated by it (`shaped_hosts.py`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch.distributed as dist

from fxcomp.commands.demo.shaped_hosts import INTERFACE, ShapedHosts
from fxcomp.errors import PeerFailed

_PORT = 29511  # free, because the namespace is new
_TAIL = 40  # lines of a failed rank's error output
_END_S = 2.0


def run_ranks(
    command: Sequence[str],
    *,
    hosts: ShapedHosts | None = None,
    ranks_per_host: int = 1,
    timeout_s: float = 600.0,
    on_line: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Run `python <command>` once per rank, and return the output of each.

    Ranks fill the hosts in order; without `hosts`, all run on this machine. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
    and MASTER_PORT are set. If a rank fails or `timeout_s` has passed, all ranks are stopped. Then PeerFailed is raised
    with the end of a rank's error output. `on_line(rank, line)` is called for each printed line, in a thread per rank.
    """
    world_size = (hosts.count if hosts else 1) * ranks_per_host
    address, port = (hosts.address(0), _PORT) if hosts else ("127.0.0.1", _free_port())
    meeting = {"WORLD_SIZE": f"{world_size}", "MASTER_ADDR": address, "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    lines: list[list[str]] = [[] for _ in range(world_size)]

    def read(rank: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            lines[rank].append(line)
            if on_line:
                on_line(rank, line.rstrip("\n"))

    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(world_size)]
        processes: list[subprocess.Popen[str]] = []
        with ExitStack() as stack:
            for rank in range(world_size):
                own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank % ranks_per_host}"}
                process = subprocess.Popen(
                    [*(hosts.command_on(rank // ranks_per_host) if hosts else ()), sys.executable, *command],
                    env={**os.environ, **meeting, **own, "GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors[rank],
                    text=True,
                    start_new_session=True,  # own process group: stopped as a whole, and not by Ctrl-C
                )
                processes.append(stack.enter_context(process))
                reader = threading.Thread(target=read, args=(rank, process), daemon=True)
                reader.start()
                stack.callback(reader.join, _END_S)
                stack.callback(_end, process)
            codes = _wait(processes, time.monotonic() + timeout_s)
        for rank, code in enumerate(codes):
            if code or (code is None and not any(codes)):
                errors[rank].seek(0)
                tail = "".join(errors[rank].readlines()[-_TAIL:])
                raise PeerFailed(f"rank {rank} {_ending(code, timeout_s)}.\n{tail}".rstrip())
    return ["".join(each) for each in lines]


def of_module(module: str, *arguments: str) -> list[str]:
    """Return a command that runs a module with this process's sys.path.

    Python's option `-m` searches the current folder first, where a `glob.py` would shadow the standard library's.
    """
    run = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_module({module!r}, run_name='__main__')"
    return ["-c", run, *arguments]


def join() -> None:
    """Join the process group, and exit when the parent exits. Ranks of `run_ranks` call this first."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    dist.init_process_group("gloo")  # pyright: ignore[reportUnknownMemberType]  # untyped


def exit_with_parent() -> None:
    # The parent holds the other end of stdin and never writes: end of file means that it has exited.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _wait(processes: Sequence[subprocess.Popen[str]], deadline: float) -> list[int | None]:
    """Wait until all processes have ended, one has failed, or the deadline is past. Return the exit codes."""
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.02)


def _ending(code: int | None, timeout_s: float) -> str:
    if code is None:
        return f"did not finish within {timeout_s:g} s"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"


def _end(process: subprocess.Popen[str]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
