"""Write files atomically, and check them when they are read.

    save_json ──► data + checksum ──► write_atomically: temporary file, fsync, rename, fsync of the folder
    read_json ◄── data without it ◄── refused if the checksum is another

A file without a checksum, such as one written by hand, is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

CHECKSUM = "checksum"
"""Key of a file's checksum."""

_SUFFIX = ".fxcomp.tmp"
"""End of the name of a folder with an unfinished file."""

_ABANDONED_S = 86400.0
"""Age, in s, of the folders that are deleted. Their writers were killed."""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fxcomp"


@contextmanager
def alone_on_this_machine(path: Path | None) -> Generator[None]:
    """Hold an exclusive file lock; do nothing without a path or if locking fails.

    The system releases the lock of a process that dies.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # forked processes share the open file
        yield


# Data with a checksum


def checksum(data: Any) -> str:
    """Return a checksum of JSON data, against damage and not against attacks. Formatting and order do not matter."""
    text = json.dumps(json.loads(json.dumps(data)), sort_keys=True)  # keys become texts, and then are sorted
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with a checksum."""
    return {**data, CHECKSUM: checksum(data)}


def save_json(path: str | Path, data: Mapping[str, Any], *, makes_folder: bool = True) -> None:
    """Write data with a checksum. The file before it is kept as `path~`."""
    text = json.dumps(sealed(data), indent=1) + "\n"
    write_atomically(Path(path), text, makes_folder=makes_folder, keeps_previous=True)


def read_json(path: str | Path) -> Any:
    """Return a file's data. Raise ValueError if it is not JSON or its checksum is wrong, and OSError."""
    previous = f"{os.path.realpath(path)}~"
    offer = f"\n  The file before it is {previous}" if os.path.exists(previous) else ""
    try:
        data: Any = json.loads(Path(path).read_text())
        json.dumps(data, ensure_ascii=False).encode()  # raises for halves of characters, which no terminal prints
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}{offer}") from None
    if not isinstance(data, dict):
        return data
    content = cast("dict[str, Any]", data)
    known = content.pop(CHECKSUM, None)
    if known is not None and known != checksum(content):
        raise ValueError(
            "it is damaged, or was edited: its checksum is wrong.\n"
            f'  If you edited it, remove "{CHECKSUM}" from it{offer}'
        )
    return content


# Atomic writes


def write_atomically(
    path: Path, content: str | Callable[[Path], object], *, makes_folder: bool = True, keeps_previous: bool = False
) -> None:
    """Replace a file atomically, also with concurrent writers. Links are followed, and the file keeps its mode.

    `content` is text, or a function that writes a file. Pipes and devices are written directly, and so is a file that
    cannot be replaced, such as a mounted one. `keeps_previous` renames the file before it to `path~`, where the file
    system has hard links.
    """
    write: Callable[[Path], object] = content if callable(content) else lambda place: place.write_text(content)
    if (path.exists() and not path.is_file()) or str(path.absolute()).startswith(_DESCRIPTORS):
        write(path)
        return
    place = Path(os.path.realpath(path))
    if makes_folder:
        place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    try:
        _replace(place, write, keeps_previous)
    except OSError as error:
        # otherwise `write` failed
        if error.errno not in _NOT_REPLACED or not (error.filename2 or str(error.filename).endswith(_SUFFIX)):
            raise
        write(place)


_DESCRIPTORS = ("/dev/std", "/dev/fd/", "/proc/")
"""Names of open files, which others write too."""

_NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
"""Errors of a folder that forbids new files, and of mounted files."""


def _replace(place: Path, write: Callable[[Path], object], keeps_previous: bool) -> None:
    prefix = f".{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:8]}."
    for left in place.parent.glob(f"{prefix}*{_SUFFIX}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(_SUFFIX, prefix, place.parent, ignore_cleanup_errors=True) as beside:
        new, previous = Path(beside, "new"), Path(beside, "previous")
        write(new)
        _sync(new)  # otherwise a crash of the machine may leave an empty file under the new name
        with suppress(OSError):  # there is none, or the file system has no modes
            new.chmod(stat.S_IMODE(place.stat().st_mode))
        with suppress(OSError):  # there is none, or no hard links
            if keeps_previous:
                os.link(place, previous)
                if previous.read_bytes() != new.read_bytes():  # every rank may save the same
                    previous.replace(f"{place}~")
        new.replace(place)
    with suppress(OSError):  # some file systems have no fsync of folders
        _sync(place.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
