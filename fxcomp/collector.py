"""Keep Python's garbage collector from searching where there is nothing to find."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Generator[None]:
    """Do not collect meanwhile: what is made here stays, like modules and graphs, and the search for garbage among it
    takes a sixth of the time (of importing torch and of explaining, measured, 2026-11)."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
