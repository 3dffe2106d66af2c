"""Find the user's line among frames of torch, of Python's library and of ours."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import dis
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__)
_OURS = str(Path(__file__).parents[1])

_NOT_THE_USERS = (_TORCH, _OURS, os.path.dirname(os.__file__), "<")
"""Beginnings of the names of files of torch, of fxcomp, of Python's library, and of made-up ones."""

_OF_PYTHON = (os.path.dirname(os.__file__), "<frozen")
"""Beginnings of the names of files of Python's library, below which packages may be installed."""

_INSTALLED = ("site-packages", "dist-packages")

_PASSES_ON = (*_OF_PYTHON, "<string>")
"""Beginnings of the names of files of Python's library, whose callers ask."""

_KNOW_SYMBOLS = (_TORCH, _OURS, "<eval")
"""Beginnings of the names of files that work on symbols, beside SymPy's."""

_TRACES = (
    *(os.path.join(_TORCH, name) for name in ("_", "fx", "autograd", "utils", "func", "export", "distributed")),
    _OURS,
    "<",
)
"""Beginnings of the names of files that do otherwise while a step is traced; torch's layers do not."""

_PASS_TO_US = (
    *(
        os.path.join(_TORCH, name)
        for name in ("__init__.py", "_tensor.py", "storage.py", "overrides.py", os.path.join("fx", "experimental"))
    ),
    _OURS,
)
"""Beginnings of the names of files between a caller of `torch._check` or `str(tensor)` and us."""


_EXACT = frozenset({"type", "dump", "dumps", "Decimal", "Fraction"})
"""Names of what looks at the exact type of a number."""


def users_line(error: BaseException | None = None) -> str | None:
    """Name the user's line that runs now, or that ran when an error came up: `train.py:41`."""
    place = _users_place(error)
    return f"{os.path.basename(place[0])}:{place[1]}" if place is not None else None


def users_source(error: BaseException) -> str | None:
    """Name the user's line where an error came up, with its text: `train.py:41: if loss > 1:`."""
    place = _users_place(error)
    return f"{users_line(error)}: {linecache.getline(*place).strip()}" if place is not None else None


def is_raised_as_eager(error: BaseException) -> bool:
    """Ask if code raised an error that does the same in eager PyTorch: the user's, Python's, that of modules."""
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    passing = _PASS_TO_US if names[:1] == [torch.__file__] else "<"  # torch._check and the like
    raised_in = next((name for name in names if not name.startswith(passing)), "<")
    return isinstance(error, IndexError) or not raised_in.startswith(_TRACES)


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
    """Ask if a line of the user's own code calls the caller of this, or a dict that hashes a tensor does."""
    code = sys._getframe(2).f_code
    name = code.co_filename
    is_pythons = name.startswith(_OF_PYTHON) and not any(part in name for part in _INSTALLED)
    return code is torch.Tensor.__hash__.__code__ or not (is_pythons or name.startswith(_KNOW_SYMBOLS))


def users_code_tells_kinds() -> bool:
    """Ask if the user's function that runs now may tell a symbol from a number, in a way that no method sees."""
    codes = (frame.f_code for frame in frames(sys._getframe(1)))
    users = next((code for code in codes if not code.co_filename.startswith(_NOT_THE_USERS)), None)
    return users is not None and _tells_kinds(users)


@cache
def _tells_kinds(code: CodeType) -> bool:
    """Look for exact types, `is` beside a constant, and what libraries in C take by its exact type."""
    lines = list(dis.get_instructions(code))
    constants = {at for at, line in enumerate(lines) if line.opname == "LOAD_CONST" and line.argval is not None}
    compares = any(line.opname == "IS_OP" and {at - 1, at - 2} & constants for at, line in enumerate(lines))
    return compares or not _EXACT.isdisjoint(code.co_names)


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


def is_ours(frame: FrameType) -> bool:
    """Return whether fxcomp's code runs in a frame."""
    return frame.f_code.co_filename.startswith(_OURS + os.sep)


def is_scripts(frame: FrameType) -> bool:
    """Return whether code of the user or of a library runs in a frame, and not torch's or ours."""
    return _is_scripts(frame.f_code.co_filename)


@cache
def _is_scripts(name: str) -> bool:
    return not name.startswith((_TORCH + os.sep, _OURS + os.sep, "<eval_with_key"))


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Go from a frame to those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
