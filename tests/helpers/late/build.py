"""Build what torch asks of a device in C++, once for each version of torch and of the source."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("guard.cpp")


def library() -> ctypes.CDLL:
    """Load the guard, built if it is not there."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"fxcomp_late_{os.getuid()}_{key}.so"
    if not path.exists():
        root = Path(torch.__file__).parent
        made = path.with_suffix(f".{os.getpid()}")
        abi = int(torch.compiled_with_cxx11_abi())
        subprocess.run(
            [
                *("g++", "-shared", "-fPIC", "-O0", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
                *("-I", str(root / "include"), str(SOURCE), "-o", str(made)),
                *("-L", str(root / "lib"), "-ltorch_cpu", "-lc10"),
            ],
            check=True,
        )
        made.replace(path)
    return ctypes.CDLL(str(path))
