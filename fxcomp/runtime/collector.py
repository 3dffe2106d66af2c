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
            if not gc.get_freeze_count():  # else the caller's own would thaw
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, or the next collection would be of all that was made
            gc.enable()
