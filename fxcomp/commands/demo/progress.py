"""Say what is being done and for how long: in place on a terminal, else as a line every few seconds."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

EVERY_S = 4.0  # between lines
_LOOK_S = 0.5


class Progress:
    """The latest of what `say` was told, with the seconds since the `with` block began."""

    def __init__(self, out: TextIO, *, in_place: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._in_place = in_place
        self._clock = clock
        self._began = clock()
        self._shown_at: float | None = None
        self._text = ""
        self._lock = threading.Lock()  # ranks are heard in threads of their own
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._ticker.join()
        if self._in_place:
            print("\r\x1b[K", end="", file=self._out, flush=True)

    def say(self, text: str) -> None:
        """Show this now if a line is due, and until something else is said."""
        with self._lock:
            self._text = text
        self.show_if_due()

    def show_if_due(self) -> None:
        """Show the latest text if it is time for a line."""
        with self._lock:
            now = self._clock()
            pause = _LOOK_S if self._in_place else EVERY_S
            if not self._text or (self._shown_at is not None and now - self._shown_at < pause):
                return
            self._shown_at = now
            line = f"{now - self._began:4.0f} s  {self._text}"
            if self._in_place:  # cut, because a line that wraps cannot be written over
                cut = line[: shutil.get_terminal_size().columns - 1]
                print(f"\r\x1b[K{cut}", end="", file=self._out, flush=True)
            else:
                print(line, file=self._out, flush=True)

    def _tick(self) -> None:
        while not self._done.wait(_LOOK_S):
            self.show_if_due()
