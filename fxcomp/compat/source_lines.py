"""Find the user's line among frames of torch, of Python's library and of ours."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import dis
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__)

_NOT_THE_USERS = (_TORCH, str(Path(__file__).parents[1]), os.path.dirname(os.__file__), "<")
"""Beginnings of the names of files of torch, of fxcomp, of Python's library, and of made-up ones."""

_PASSES_ON = (os.path.dirname(os.__file__), "<frozen", "<string>")
"""Beginnings of the names of files of Python's library, whose callers ask."""

_INSTALLED = ("site-packages", "dist-packages")

_KNOW_SYMBOLS = (_TORCH, str(Path(__file__).parents[1]), "<eval")
"""Beginnings of the names of files that work on symbols, beside SymPy's."""

_PASS_TO_US = (
    *(
        os.path.join(_TORCH, name)
        for name in ("__init__.py", "_tensor.py", "overrides.py", os.path.join("fx", "experimental"))
    ),
    str(Path(__file__).parents[1]),
)
"""Beginnings of the names of files between a caller of `torch._check` or `str(tensor)` and us."""


def users_line(error: BaseException | None = None) -> str | None:
    """Name the user's line that runs now, or that ran when an error came up: `train.py:41`."""
    place = _users_place(error)
    return f"{os.path.basename(place[0])}:{place[1]}" if place is not None else None


def users_source(error: BaseException) -> str | None:
    """Name the user's line where an error came up, with its text: `train.py:41: if loss > 1:`."""
    place = _users_place(error)
    return f"{users_line(error)}: {linecache.getline(*place).strip()}" if place is not None else None


def is_raised_by_user(error: BaseException) -> bool:
    """Ask if a `raise` or an `assert` of the user's own code raised an error."""
    last = _last(error)
    if last is None or not is_raised_in_users_code(error):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def is_raised_in_users_code(error: BaseException) -> bool:
    """Ask if a line of the user's own code raised an error, and nothing that it called in Python."""
    last = _last(error)
    return last is not None and not last.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def _last(error: BaseException) -> TracebackType | None:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last


def is_asked_by_user() -> bool:
    """Ask if the user's Python calls the caller of this, by itself or through Python's library."""
    for frame in frames(sys._getframe(2)):
        name = frame.f_code.co_filename
        if name.startswith(_PASSES_ON) and not any(part in name for part in _INSTALLED):
            continue
        return not name.startswith(_KNOW_SYMBOLS) and f"{os.sep}sympy{os.sep}" not in name
    return False


def is_called_by_user() -> bool:
    """Ask if the user's Python called the function of torch that the caller of this works for."""
    names = (frame.f_code.co_filename for frame in frames(sys._getframe(2)))
    return not next(name for name in names if not name.startswith(_PASS_TO_US)).startswith(_TORCH)


def is_users_call() -> bool:
    """Ask if a line of the user's own code calls the caller of this."""
    return not sys._getframe(2).f_code.co_filename.startswith(_NOT_THE_USERS)


def users_code_names(name: str) -> bool:
    """Ask if the user's function that runs now uses a global or an attribute of this name."""
    codes = (frame.f_code for frame in frames(sys._getframe(1)))
    users = next((code for code in codes if not code.co_filename.startswith(_NOT_THE_USERS)), None)
    return users is not None and name in users.co_names


def users_level() -> int:
    """Find the `stacklevel` with which a warning of the caller names the user's line."""
    files = (frame.f_code.co_filename for frame in frames(sys._getframe(1)))
    return next((level for level, name in enumerate(files, 1) if not name.startswith(_NOT_THE_USERS)), 1)


def _users_place(error: BaseException | None) -> tuple[str, int] | None:
    if error is None:
        stack = [(frame, frame.f_lineno) for frame in frames(sys._getframe(2))]
    else:
        stack = list(traceback.walk_tb(error.__traceback__))[::-1]
    lines = ((frame.f_code.co_filename, line) for frame, line in stack)
    return next(((name, line) for name, line in lines if not name.startswith(_NOT_THE_USERS)), None)


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Go from a frame to those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
