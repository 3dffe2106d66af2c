"""Status line: a terminal line that the next status overwrites.

Blanks erase it, because NO_COLOR forbids escape codes. Dumb terminals get no line.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO


def takes_status_lines(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def written_over(text: str) -> str:
    """Return output that overwrites the status line with `text`, cut to one row: longer text would wrap."""
    room = shutil.get_terminal_size().columns - 1
    return f"\r{' ' * room}\r{text[:room]}"


def show(text: str) -> None:
    if takes_status_lines(sys.stderr):
        print(written_over(text), end="", file=sys.stderr, flush=True)


def clear() -> None:
    show("")
