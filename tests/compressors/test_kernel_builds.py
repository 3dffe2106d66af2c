"""The kernels are built by every compiler that is found, or setup.py says why not; all builds give the same bits."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.compressor_cases import COMPRESSORS, WITH_KERNELS
from helpers.instruction_sets import LEVELS, at_level, steps

from fxcomp.compressors import kernels
from fxcomp.testing.kernel_checks import assert_same_bits

ROOT = Path(__file__).parent.parent.parent
OTHER_COMPILERS = [name for name in ("g++-11", "clang++") if shutil.which(name) is not None]


def _build(compiler: str | Path, folder: Path) -> str:
    """Build, and return what that prints. An install goes on without kernels, so it succeeds either way."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder / "objects"]
    environment = os.environ | {"CC": str(compiler), "CXX": str(compiler)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def _notice(folder: Path) -> str:
    return (folder / "fxcomp" / "_kernels_not_built.txt").read_text()


def test_a_build_that_fails_says_so_and_leaves_its_first_error(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'a.cpp:1:1: warning: hm' >&2\necho 'a.cpp:2:3: error: no' >&2\nexit 1\n")
    compiler.chmod(0o755)
    printed = _build(compiler, tmp_path)
    expected = "a compiler was found, the build failed: a.cpp:2:3: error: no"
    assert expected in printed
    assert "a.cpp:1:1: warning: hm" in printed
    assert _notice(tmp_path) == f"{expected}\n"


def test_a_build_without_a_compiler_says_so(tmp_path: Path) -> None:
    missing = tmp_path / "no-compiler"
    printed = _build(missing, tmp_path)
    assert f"no C++ compiler was found (there is no {missing})" in printed
    assert _notice(tmp_path) == f"no C++ compiler was found (there is no {missing})\n"


@pytest.mark.slow
@WITH_KERNELS
@pytest.mark.parametrize("compiler", OTHER_COMPILERS)
def test_every_compiler_makes_kernels_of_the_same_bits(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = _build(compiler, tmp_path)
    paths = list((tmp_path / "fxcomp").glob("_kernels*.so"))
    assert len(paths) == 1, printed
    library = ctypes.CDLL(str(paths[0]))
    assert library.fxcomp_abi_version() == kernels.ABI_VERSION
    for compressor in COMPRESSORS:
        shipped = steps(compressor)
        for level in LEVELS:
            with monkeypatch.context() as patch, at_level(library, level):
                patch.setattr(kernels, "_library", lambda: library)
                for where, results in steps(compressor).items():
                    for one, two in zip(results, shipped[where], strict=True):
                        assert_same_bits(one, two, f"{compressor}, {compiler}, {level}, {where}")
