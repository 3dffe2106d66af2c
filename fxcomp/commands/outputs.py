"""Checks of output files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fxcomp.errors import BadOption
from fxcomp.plan.plan import Plan


def check_outputs(written: Mapping[str, str | None], read: Iterable[str | None]) -> None:
    """Raise BadOption if an output file is also read, or is written by two options. `written` maps options to files."""
    known = {path: "which is read" for path in map(_file, read) if path is not None}
    for option, text in written.items():
        path = _file(text)
        if path is None:
            continue
        for other, reason in known.items():
            if path == other or (path.exists() and other.exists() and path.samefile(other)):
                raise BadOption(f"{option} {text} would overwrite {other}, {reason}: name another file")
        known[path] = f"which {option} writes"


def check_page(option: str, text: str) -> None:
    """Raise BadOption if an HTML page would overwrite a file of another kind."""
    path = Path(text)
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            begin = file.read(len(_PAGE))
    except OSError as error:
        raise BadOption(f"cannot read {text}, which {option} would replace: {error.strerror}") from None
    if begin and begin.lower() != _PAGE:
        raise BadOption(f"{option} {text} would overwrite a file that is no page: name another one, or delete it")


def save_plan(plan: Plan, path: str) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise BadOption(f"cannot save the plan to {path}: {error.strerror}") from None


_PAGE = b"<!doctype html>"


def _file(text: str | None) -> Path | None:
    """Return the resolved path; None for no path or for a device, such as a terminal."""
    if not text:
        return None
    path = Path(text).expanduser()
    return None if path.exists() and not path.is_file() else path.resolve()
