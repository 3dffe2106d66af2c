"""Find the user's line among frames of torch, the standard library and fxcomp."""

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
"""Filename prefixes of torch, fxcomp, the standard library and generated code."""

_OF_PYTHON = (os.path.dirname(os.__file__), "<frozen")
"""Filename prefixes of the standard library, whose folder may contain installed packages."""

_INSTALLED = ("site-packages", "dist-packages")

_PASSES_ON = (*_OF_PYTHON, "<string>")
"""Filename prefixes of code that `is_asked_by_user` skips to find the caller."""

_KNOW_SYMBOLS = (_TORCH, _OURS, "<eval")
"""Filename prefixes of code that handles symbolic numbers, besides SymPy."""

_TRACES = (
    *(os.path.join(_TORCH, name) for name in ("_", "fx", "autograd", "utils", "func", "export", "distributed")),
    _OURS,
    "<",
)
"""Filename prefixes of code that behaves differently while tracing. torch.nn's layers do not."""

_PASS_TO_US = (
    *(
        os.path.join(_TORCH, name)
        for name in ("__init__.py", "_tensor.py", "storage.py", "overrides.py", os.path.join("fx", "experimental"))
    ),
    _OURS,
)
"""Filename prefixes of code between a caller of `torch._check` or `str(tensor)` and fxcomp."""


_EXACT = frozenset({"type", "dump", "dumps", "Decimal", "Fraction"})
"""Functions that depend on a number's exact type."""


def users_line(error: BaseException | None = None) -> str | None:
    """Return the user's line that runs now or that led to `error`: `train.py:41`."""
    place = _users_place(error)
    return f"{os.path.basename(place[0])}:{place[1]}" if place is not None else None


def users_source(error: BaseException) -> str | None:
    """Return the user's line of an error with its text: `train.py:41: if loss > 1:`."""
    place = _users_place(error)
    return f"{users_line(error)}: {linecache.getline(*place).strip()}" if place is not None else None


def is_raised_as_eager(error: BaseException) -> bool:
    """Return whether eager PyTorch would raise too: an IndexError, or an error from outside of tracing code."""
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    passing = _PASS_TO_US if names[:1] == [torch.__file__] else "<"  # torch._check and similar
    raised_in = next((name for name in names if not name.startswith(passing)), "<")
    return isinstance(error, IndexError) or not raised_in.startswith(_TRACES)


def is_asked_by_user() -> bool:
    """Return whether user code called this function's caller, directly or through the standard library."""
    for frame in frames(sys._getframe(2)):
        name = frame.f_code.co_filename
        if name.startswith(_PASSES_ON) and not any(part in name for part in _INSTALLED):
            continue
        return not name.startswith(_KNOW_SYMBOLS) and f"{os.sep}sympy{os.sep}" not in name
    return False


def is_called_by_user() -> bool:
    """Return whether user code, and not torch, called the current torch function."""
    names = (frame.f_code.co_filename for frame in frames(sys._getframe(2)))
    return not next(name for name in names if not name.startswith(_PASS_TO_US)).startswith(_TORCH)


def is_users_call() -> bool:
    """Return whether user code, or `Tensor.__hash__`, directly called this function's caller."""
    code = sys._getframe(2).f_code
    name = code.co_filename
    is_pythons = name.startswith(_OF_PYTHON) and not any(part in name for part in _INSTALLED)
    return code is torch.Tensor.__hash__.__code__ or not (is_pythons or name.startswith(_KNOW_SYMBOLS))


def users_code_tells_kinds() -> bool:
    """Return whether the user's running function may distinguish symbols from numbers without calling methods."""
    codes = (frame.f_code for frame in frames(sys._getframe(1)))
    users = next((code for code in codes if not code.co_filename.startswith(_NOT_THE_USERS)), None)
    return users is not None and _tells_kinds(users)


@cache
def _tells_kinds(code: CodeType) -> bool:
    """Return whether code uses exact types, `is` with a constant, or C libraries that check types."""
    lines = list(dis.get_instructions(code))
    constants = {at for at, line in enumerate(lines) if line.opname == "LOAD_CONST" and line.argval is not None}
    compares = any(line.opname == "IS_OP" and {at - 1, at - 2} & constants for at, line in enumerate(lines))
    return compares or not _EXACT.isdisjoint(code.co_names)


def users_level() -> int:
    """Return the `stacklevel` at which the caller's warning names the user's line."""
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
    return frame.f_code.co_filename.startswith(_OURS + os.sep)


def is_scripts(frame: FrameType) -> bool:
    """Return whether a frame runs the user's or a library's code, not torch's or fxcomp's."""
    return _is_scripts(frame.f_code.co_filename)


@cache
def _is_scripts(name: str) -> bool:
    return not name.startswith((_TORCH + os.sep, _OURS + os.sep, "<eval_with_key"))


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
