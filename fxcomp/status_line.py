"""Show on a terminal what is being done, in one line that the next one writes over.

No escape codes are written: who sets NO_COLOR wants none, and blanks erase a line as well. A terminal that calls itself
dumb gets no such line.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO


def takes_status_lines(stream: TextIO) -> bool:
    """Return whether a line of the stream can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def written_over(text: str) -> str:
    """Write a line over the one before; cut, because a line that wraps cannot be written over."""
    room = shutil.get_terminal_size().columns - 1
    return f"\r{' ' * room}\r{text[:room]}"


def show(text: str) -> None:
    """Show what is being done."""
    if takes_status_lines(sys.stderr):
        print(written_over(text), end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Erase the line."""
    show("")
