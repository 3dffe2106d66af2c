"""Report progress and decisions: the logger `fxcomp`, and a terminal.

    logging.getLogger("fxcomp").setLevel(logging.INFO)       # phases with seconds, choices, changes

If a compilation takes more than two seconds, rank 0 shows the current phase on standard error; without a terminal,
rank 0 prints a summary at the end. FXCOMP_PROGRESS=0 shows nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from fxcomp.status_line import takes_status_lines, written_over

log = logging.getLogger("fxcomp")

QUIET_S = 2.0
"""Delay before the first output, in seconds."""


class _Compilation:
    """Phases of a compilation, with durations in s."""

    def __init__(self, what: str, shows: bool) -> None:
        self.what, self.seconds = what, dict[str, float]()
        self._shows = shows
        self._begun = time.perf_counter()
        self._lock = threading.Lock()
        self._phase = ""
        self._timer = threading.Timer(QUIET_S, self._show)
        self._timer.daemon = True
        self._is_shown = False
        if shows and _is_terminal():
            self._timer.start()

    def enter(self, phase: str) -> None:
        with self._lock:
            self._phase = phase
            if self._is_shown:
                self._write()

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._is_shown:
                _write(written_over(""))
        took = time.perf_counter() - self._begun
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items() if seconds >= 0.05)
        log.info("%s took %.1f s: %s", self.what, took, parts)
        if self._shows and took > QUIET_S and not _is_terminal():
            _write(f"fxcomp: {self.what} took {took:.1f} s: {parts}\n")

    def _show(self) -> None:
        with self._lock:
            self._is_shown = True
            self._write()

    def _write(self) -> None:
        _write(written_over(f"fxcomp: {self.what}, {self._phase}"))


def _is_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and takes_status_lines(sys.stderr)


def _write(text: str) -> None:
    """Write to standard error. Ignore failures, because an error would stop only this rank."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr, flush=True)


_under_way: ContextVar[_Compilation | None] = ContextVar("under_way", default=None)


@contextmanager
def compiling(what: str) -> Generator[None]:
    """Show the phases of a compilation. A nested call adds its phases to the outer compilation."""
    if _under_way.get() is not None:
        yield
        return
    leads = os.environ.get("RANK", "0") == "0" and os.environ.get("FXCOMP_PROGRESS") != "0"
    made = _Compilation(what, leads)
    token = _under_way.set(made)
    try:
        yield
    finally:
        _under_way.reset(token)
        made.end()


@contextmanager
def phase(name: str) -> Generator[None]:
    made, begun = _under_way.get(), time.perf_counter()
    if made is not None:
        made.enter(name)
    try:
        yield
    finally:
        seconds = time.perf_counter() - begun
        log.info("%s: %.2f s", name, seconds)
        if made is not None:
            made.seconds[name] = made.seconds.get(name, 0.0) + seconds


class Notes(list[str]):
    """Notes of a step's report. Added notes are logged."""

    def append(self, note: str) -> None:
        log.info("%s", note)
        super().append(note)

    def extend(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.append(note)

    def __iadd__(self, notes: Iterable[str]) -> Notes:
        self.extend(notes)
        return self
