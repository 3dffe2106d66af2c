"""Strike at a call of fxcomp within a phase of a job, and count the calls of each phase for the draw."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fxcomp
from killing.points import ALLOCATION, DISK, EXIT, KILL, LIMIT, LINK, STOP, TERM

ROOT = str(Path(fxcomp.__file__).parent)

ALLOCATING = frozenset(("empty", "zeros", "ones", "full", "empty_like", "new_empty", "new_zeros", "clone", "cat"))
"""Names of torch's functions that allocate memory."""

Counts = dict[str, dict[str, int]]
"""Number of calls by phase and by function."""


@dataclass(frozen=True)
class Aim:
    """Call at which a fault strikes."""

    fault: str
    victim: int
    phase: str
    function: str
    """Function, as `runtime/group.py:Group.start`, or ALLOCATION for any call that allocates."""
    call: int
    """Number of the call in the phase, from 0."""
    room: float
    """Share of the fault's own size: bytes left on the disk, or of the smallest block left in memory."""


class Watch:
    """Counts the calls of fxcomp's functions in each phase; calls `strike` at the call of an aim."""

    def __init__(self, aim: Aim | None = None, strike: Callable[[], object] = lambda: None, *, counts: bool = False):
        self._aim, self._strike, self._counts_all = aim, strike, counts
        self.counts: dict[str, Counter[str]] = {}
        self._left = -1 if aim is None else aim.call
        self._names: dict[CodeType, str] = {}
        self.is_off = False
        """Set in the last steps, whose end no other rank would notice."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        if self.is_off or not (self._counts_all or (self._aim is not None and self._aim.phase == name)):
            yield
            return
        sys.setprofile(self._counting(name) if self._counts_all else self._aiming)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _counting(self, phase: str) -> Callable[[FrameType, str, Any], None]:
        found = self.counts.setdefault(phase, Counter())

        def count(frame: FrameType, event: str, argument: Any) -> None:
            if name := self._name(frame, event, argument):
                found[name] += 1

        return count

    def _aiming(self, frame: FrameType, event: str, argument: Any) -> None:
        assert self._aim is not None, "there is an aim"
        if self._name(frame, event, argument) == self._aim.function:
            if self._left == 0:
                sys.setprofile(None)
                self._left = -1
                self._strike()
            self._left -= 1

    def _name(self, frame: FrameType, event: str, argument: Any) -> str:
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            path = code.co_filename
            is_ours = path.startswith(ROOT)
            name = self._names[code] = f"{path[len(ROOT) + 1 :]}:{code.co_qualname}" if is_ours else ""
        if event == "call":
            return name
        if event == "c_call" and name and getattr(argument, "__name__", "") in ALLOCATING:
            return ALLOCATION
        return ""


_ballast: list[bytearray | None] = []


def strike(aim: Aim, pipe: Connection, folder: Path) -> None:
    """Do what the fault does to this process."""
    pipe.send(("hit", time.monotonic()))
    match aim.fault:
        case _ if aim.fault in (KILL, ALLOCATION):
            os.kill(os.getpid(), signal.SIGKILL)
        case _ if aim.fault in (TERM, EXIT):
            os.kill(os.getpid(), signal.SIGTERM)
        case _ if aim.fault == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case _ if aim.fault == LIMIT:
            _fill_memory(int(2 ** (9 + 7 * aim.room)))
        case _ if aim.fault == DISK:
            _fill_disk(folder, int(40_000 * aim.room))
        case _ if aim.fault in LINK:
            pipe.recv()  # until the link is down
        case _:
            raise AssertionError(aim.fault)


def handle_signals(fault: str) -> None:
    """Set the default handler of SIGTERM, or a handler that raises SystemExit."""
    signal.signal(signal.SIGTERM, (lambda *_: sys.exit(143)) if fault == EXIT else signal.SIG_DFL)


def _fill_memory(smallest: int) -> None:
    """Limit the address space to what is mapped, and take what is free, so that the next larger block is refused."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    _ballast.extend([None] * 20_000)
    free, size = 0, 1 << 22
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    while size >= smallest and free < len(_ballast):
        try:
            _ballast[free] = bytearray(size)
            free += 1
        except MemoryError:
            size //= 2


def give_memory_back() -> None:
    """Lift the limit, to report how the rank ended."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    _ballast.clear()


FILLER = "filler"


def _fill_disk(folder: Path, room: int) -> None:
    free = os.statvfs(folder)
    size = max(0, free.f_bavail * free.f_frsize - room)
    with suppress(OSError), (folder / FILLER).open("wb") as file:
        file.write(bytes(size))
