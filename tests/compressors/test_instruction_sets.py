"""Each instruction set that the kernels are compiled for gives the same bits: replicas may run on unlike processors.

The kernels as shipped take the highest level that the processor has; `test_conformance.py` holds that one against the
references, and here the lower ones are held against it.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compressor_cases import COMPRESSORS
from torch import Tensor

from fxcomp.compressors import Compressor, Feedback, kernels
from fxcomp.testing import CHECKS, SAMPLES
from fxcomp.testing.checks import assert_same_bits, second_step, segments_to_try

ROOT = Path(__file__).parent.parent.parent

LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
"""What gcc calls a level, and a flag in /proc/cpuinfo that comes with it."""


def _flags() -> set[str]:
    cpu = Path("/proc/cpuinfo")
    return set(cpu.read_text().split()) if platform.machine() == "x86_64" and cpu.exists() else set()


def _built_for(levels: list[str], folder: Path) -> dict[str, ctypes.CDLL]:
    """All at once: a minute of a compiler's work each."""
    running: dict[str, subprocess.Popen[str]] = {}
    for level in levels:
        here = folder / level
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", here, "--build-temp", here / "objects"]
        only = {"CFLAGS": f"-DFXCOMP_ONE_INSTRUCTION_SET -march={level}", "CC": "g++", "CXX": "g++"}
        running[level] = subprocess.Popen(command, cwd=ROOT, env=os.environ | only, stderr=subprocess.PIPE, text=True)
    libraries: dict[str, ctypes.CDLL] = {}
    for level, build in running.items():
        _, errors = build.communicate()
        paths = list((folder / level / "fxcomp").glob("_kernels*"))
        assert len(paths) == 1, errors
        libraries[level] = ctypes.CDLL(str(paths[0]))
        assert libraries[level].fxcomp_abi_version() == kernels.ABI_VERSION
    return libraries


def _steps(compressor: Compressor) -> dict[str, list[Tensor]]:
    """What one step makes of every sample, at every length and both with and without a residual."""
    bound = compressor.bound_to((), 1)
    return {
        f"{name}, {segments}, feedback {feedback}": second_step(
            bound, sample(sum(segments)), segments, feedback=feedback
        )
        for segments in segments_to_try(compressor)
        for name, sample in SAMPLES.items()
        for feedback in {False, compressor.feedback is not Feedback.FORBIDDEN}
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for other instruction sets")
@pytest.mark.skipif(not kernels.available(), reason="no kernels are built")
def test_an_instruction_set_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *lower, _ = [level for level, flag in LEVELS.items() if flag in _flags()] or [""]
    if not lower:
        pytest.skip("this processor has no second instruction set")
    libraries = _built_for(lower, tmp_path)
    for compressor in COMPRESSORS:
        shipped = _steps(compressor)
        for level, library in libraries.items():
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "_library", lambda library=library: library)
                for where, results in _steps(compressor).items():
                    for one, two in zip(results, shipped[where], strict=True):
                        assert_same_bits(one, two, f"{compressor}, {level}, {where}")
                CHECKS["threads_change_no_bit"](compressor)
