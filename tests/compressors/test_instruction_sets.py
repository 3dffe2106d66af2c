"""Each instruction set that the kernels are compiled for gives the same bits: replicas may run on unlike processors."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compressor_cases import COMPRESSORS

from fxcomp.compressors import kernels
from fxcomp.testing import CHECKS

ROOT = Path(__file__).parent.parent.parent

LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
"""What gcc calls a level, and a flag in /proc/cpuinfo that comes with it."""


def _flags() -> set[str]:
    cpu = Path("/proc/cpuinfo")
    return set(cpu.read_text().split()) if platform.machine() == "x86_64" and cpu.exists() else set()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for other instruction sets")
@pytest.mark.parametrize("level", LEVELS)
def test_an_instruction_set_changes_no_bit(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if LEVELS[level] not in _flags():
        pytest.skip(f"this processor has no {LEVELS[level]}")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "o"]
    only = {"CFLAGS": f"-DFXCOMP_ONE_INSTRUCTION_SET -march={level}", "CC": "g++", "CXX": "g++"}
    built = subprocess.run(command, cwd=ROOT, env=os.environ | only, capture_output=True, text=True, check=False)
    [library] = [ctypes.CDLL(str(path)) for path in (tmp_path / "fxcomp").glob("_kernels*")] or pytest.fail(
        built.stderr
    )
    assert library.fxcomp_abi_version() == kernels.ABI_VERSION
    monkeypatch.setattr(kernels, "_library", lambda: library)
    for compressor in COMPRESSORS:
        CHECKS["kernels_give_the_bits_of_the_reference"](compressor)
        CHECKS["threads_change_no_bit"](compressor)
