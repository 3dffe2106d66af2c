"""Find and call the C++ kernels of csrc/. Without them, the references run.

Kernels take raw pointers, and ctypes releases the GIL during a call.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PACKAGE = Path(__file__).parent.parent

ABI_VERSION = 16  # the same number as in csrc/module.cpp


def kernel_path() -> Path | None:
    """Return the path of the library of kernels, or None if it was not built."""
    spec = find_spec("fxcomp._kernels")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def available() -> bool:
    """Return True if the library is built, current, and loads."""
    return _library() is not None


def can_run_on(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and available()


@cache
def fingerprint() -> str:
    path = kernel_path()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8] if path is not None else ""


def describe() -> str:
    """Return a report line: the kernels in use, or the reason for their absence."""
    path, failure = kernel_path(), build_failure()
    if available():
        of_old = f", but not of the last build: {failure}" if failure else ""
        return f"compression on the CPU: C++ kernels ({path.name if path else ''}{of_old})"
    if failure:
        why = f"no kernels: {failure}; mend that and install fxcomp again"
    elif path is None:
        why = "no kernels; install fxcomp where a C++ compiler is found"
    else:
        why = f"{path.name} {_open(path)[1]}; install fxcomp again"
    return f"compression on the CPU: plain torch ({why})"


def build_failure() -> str:
    """Return the error that setup.py recorded if the build failed, else an empty string."""
    notice = _PACKAGE / "_kernels_not_built.txt"
    return notice.read_text().strip() if notice.exists() else ""


def run(name: str, *arguments: Tensor | tuple[int, ...] | float | None) -> int:
    """Call a kernel, with tensors as pointers and tuples as int64 arrays. The caller has checked sizes and dtypes."""
    library = _library()
    assert library is not None, f"{name} was called, but no kernels are built"
    return _calls(library).run(name, arguments)


def has(name: str) -> bool:
    library = _library()
    return library is not None and hasattr(library, name)


class _Calls:
    """Cache of kernels, because a lookup takes longer than a call."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._kernels: dict[str, Any] = {}
        self._threads = 0

    def run(self, name: str, arguments: tuple[Tensor | tuple[int, ...] | float | None, ...]) -> int:
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._library.fxcomp_set_threads(ctypes.c_int64(threads))
            self._threads = threads
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._library[name]
            kernel.argtypes = list(map(_type_of, arguments))
            self._kernels[name] = kernel  # last: from here on, other threads may call the kernel
        return kernel(*map(_to_c, arguments))


_calls = cache(_Calls)


@cache
def function(name: str, result: Any) -> Any:
    """Return a kernel that takes ctypes values and no tensors."""
    library = _library()
    assert library is not None, f"{name} was asked for, but no kernels are built"
    found = library[name]
    found.restype = result
    return found


@cache
def _library() -> ctypes.CDLL | None:
    path = kernel_path()
    return None if path is None else _open(path)[0]


@cache
def _open(path: Path) -> tuple[ctypes.CDLL | None, str]:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"does not load: {error}"
    if library.fxcomp_abi_version() != ABI_VERSION:
        return None, "is from another version"
    return library, ""


def _type_of(argument: Tensor | tuple[int, ...] | float | None) -> Any:
    if isinstance(argument, int):
        return ctypes.c_int64
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_void_p


def _to_c(argument: Tensor | tuple[int, ...] | float | None) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return _array(argument) if isinstance(argument, tuple) else argument


@lru_cache(maxsize=4096)
def _array(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
