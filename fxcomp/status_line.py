"""A terminal line that the next one overwrites.

Blanks erase it, because NO_COLOR forbids escape codes. Dumb terminals get no line.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO


def takes_status_lines(stream: TextIO) -> bool:
    """Return True if a line of the stream can be overwritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def written_over(text: str) -> str:
    """Return text that overwrites the line, cut because wrapped lines cannot be overwritten."""
    room = shutil.get_terminal_size().columns - 1
    return f"\r{' ' * room}\r{text[:room]}"


def show(text: str) -> None:
    if takes_status_lines(sys.stderr):
        print(written_over(text), end="", file=sys.stderr, flush=True)


def clear() -> None:
    show("")
