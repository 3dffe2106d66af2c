"""Start ranks one by one from a warm process, let a fault strike one of them, and watch how each ends."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import ranks as helper

from fxcomp.commands.demo.shaped_hosts import ShapedHosts
from killing.faults import give_memory_back, handle_signals
from killing.life import Life, lived
from killing.points import BLINK, CUT, LINK, STOP

TIMEOUT_S = 5.0
"""Timeout of the process group."""

STOPPED_S = TIMEOUT_S + 4.0
"""Time that a stopped rank stands still."""

HANGS_S = 30.0
"""Time after the fault, or after a stopped rank continues, within which every rank must have ended."""

DOWN_S = {BLINK: 2.0, CUT: HANGS_S}
"""Time that a link is down."""

SLOW_S = 240.0
"""Time that a job may take without a fault."""

_PORT = 29511  # in a namespace of its own
_CLONE_NEWNET = 0x40000000

helper._PROCESSES.set_forkserver_preload(["pytest", "helpers.warm_rank", "killing.start"])


@dataclass
class Ending:
    """End of a rank: `finished`, `error`, `died` or `hangs`."""

    how: str = "hangs"
    error: str = ""
    text: str = ""
    trace: str = ""
    at: float = 0.0
    value: Any = None
    exits_s: float | None = None
    """Seconds until the process had ended; None if it did not end within 15 s."""


@dataclass
class Course:
    """Course of a job with a fault: the time of the fault, if it struck, and the end of each rank."""

    hit: float | None = None
    went_on: float | None = None
    """Time at which a stopped rank continued, or the link was up again."""
    ends: list[Ending] = field(default_factory=list[Ending])


@dataclass(frozen=True)
class _Place:
    """Meeting place of ranks, and folder of their output."""

    address: str
    port: int
    world: int
    is_hosted: bool
    """True if rank 0 hosts the store."""
    namespaces: Sequence[int]
    """Process that holds each rank's network namespace; empty without."""
    environment: dict[str, str]
    logs: Path
    timeout_s: float


@dataclass
class Job:
    """Ranks of one life."""

    life: Life
    world: int
    store_at: str = "parent"
    hosts: ShapedHosts | None = None
    logs: Path = Path("logs")
    timeout_s: float = TIMEOUT_S
    _processes: list[BaseProcess] = field(default_factory=list[BaseProcess])
    _pipes: list[Connection] = field(default_factory=list[Connection])
    _undo: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def run(self) -> Course:
        helper._start_server()
        self.logs.mkdir(parents=True, exist_ok=True)
        course, store = Course(ends=[Ending() for _ in range(self.world)]), None
        is_hosted = self.hosts is not None or self.store_at == "rank 0"
        address, port = ("127.0.0.1", _free_port()) if self.hosts is None else (self.hosts.address(0), _PORT)
        if not is_hosted:
            store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            port = store.port
        pids = [] if self.hosts is None else [holder.pid for holder in self.hosts._holders[1:]]
        interface = "lo" if self.hosts is None else "eth0"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        place = _Place(address, port, self.world, is_hosted, pids, environment, self.logs, self.timeout_s)
        try:
            for rank in range(self.world):
                mine, theirs = helper._PROCESSES.Pipe()
                process = helper._PROCESSES.Process(target=_rank, args=(theirs, rank, place, self.life), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(mine)
            self._watch(course)
        finally:
            self._end()
        return course

    def _watch(self, course: Course) -> None:
        until, ended = time.monotonic() + SLOW_S, set[int]()
        while len(ended) < self.world and time.monotonic() < until:
            self._undo_due(course)
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in ended]
            for pipe in wait(waiting, 0.1):
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    what, at, *told = pipe.recv()
                except EOFError:
                    course.ends[rank] = Ending("died", at=time.monotonic())
                    ended.add(rank)
                    continue
                if what == "hit":
                    course.hit, until = at, time.monotonic() + HANGS_S
                    until += self._struck(rank, pipe)
                else:
                    course.ends[rank] = Ending(what, *told[:3], at, told[3])
                    ended.add(rank)
        for rank in set(range(self.world)) - ended:
            course.ends[rank].trace = self._where(rank)
        for rank in ended:
            self._dismiss(rank, course.ends[rank])

    def _struck(self, rank: int, pipe: Connection) -> float:
        """Help the fault; return how much longer ranks may take."""
        aim = self.life.aim
        assert aim is not None, "a fault has an aim"
        if aim.fault == STOP:
            self._undo.append((time.monotonic() + STOPPED_S, f"kill -CONT {self._processes[rank].pid}"))
            return STOPPED_S
        if aim.fault in LINK:
            self._link(rank, "down")
            self._undo.append((time.monotonic() + DOWN_S[aim.fault], f"link {rank}"))
            pipe.send("down")
        return SLOW_S / 2 if aim.fault == BLINK else 0.0

    def _undo_due(self, course: Course) -> None:
        for due, what in [each for each in self._undo if each[0] <= time.monotonic()]:
            self._undo.remove((due, what))
            course.went_on = time.monotonic()
            kind, *_, number = what.split()
            if kind == "link":
                self._link(int(number), "up")
            else:
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGCONT)

    def _link(self, rank: int, way: str) -> None:
        assert self.hosts is not None, "a link is between hosts"
        subprocess.run([*self.hosts._inside(rank + 1), "ip", "link", "set", "eth0", way], check=True)

    def _where(self, rank: int) -> str:
        """Return the traceback of a rank that does not end."""
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
            time.sleep(1.0)
        path = self.logs / f"where-{rank}"
        return path.read_text() if path.exists() else ""

    def _dismiss(self, rank: int, ending: Ending) -> None:
        begin = time.monotonic()
        with suppress(OSError):
            self._pipes[rank].send("bye")
        self._processes[rank].join(15.0)
        ending.exits_s = None if self._processes[rank].is_alive() else time.monotonic() - begin

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(pipe: Connection, rank: int, place: _Place, life: Life) -> None:
    """Live as a rank: in its network, with its output in a file."""
    place_in(place, rank)
    os.environ.clear()
    os.environ.update(place.environment)
    handle_signals(life.aim.fault if life.aim is not None and life.aim.victim == rank else "")
    try:
        store = dist.TCPStore(
            place.address,
            place.port,
            is_master=place.is_hosted and rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        timeout = timedelta(seconds=place.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=place.world, timeout=timeout)
        value = lived(life, pipe)
        pipe.send(("finished", value.pop("at"), "", "", "", value))
        pipe.recv()  # the store lives until all have ended
    except BaseException as error:
        at = time.monotonic()
        give_memory_back()
        pipe.send(("error", at, type(error).__name__, str(error), traceback.format_exc(), None))


def place_in(place: _Place, rank: int) -> None:
    if place.namespaces:
        descriptor = os.open(f"/proc/{place.namespaces[rank]}/ns/net", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(descriptor)
    output = os.open(place.logs / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, (place.logs / f"where-{rank}").open("w"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)


def why_no_links() -> str:
    """Return the reason why links cannot be cut here; empty if they can."""
    try:
        with ShapedHosts(1) as hosts:
            return "namespaces need root here" if hosts._user else ""
    except Exception as error:
        return str(error)


class SmallDisk:
    """A file system of 1 MB, mounted on a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(self._folder)], check=True)

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self._folder)], check=True)


def why_no_disk(folder: Path) -> str:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "mounting a tmpfs needs root"
    try:
        with SmallDisk(folder):
            return ""
    except subprocess.CalledProcessError as error:
        return str(error)
