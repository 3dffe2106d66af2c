"""A line on the terminal that says what is being done, until the next line or the result replaces it."""

from __future__ import annotations

import sys


def show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def clear() -> None:
    show("")
