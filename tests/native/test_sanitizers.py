"""Kernels with mutated payloads, states and problems under sanitizers, called by C++ programs without Python.

A payload comes from another rank, and a state from a file: neither may make a kernel read or write outside its buffers.
`pytest -s` prints the figures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fxcomp.compressors.kernels import ABI_VERSION

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"

# As in setup.py, where they change bits.
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-pthread", f"-I{CSRC}"),
)

UNDEFINED = "undefined,float-cast-overflow"
MEMORY = f"address,{UNDEFINED}"
OPTIONS = {"ASAN_OPTIONS": "quarantine_size_mb=32:detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}

COMPILERS = pytest.mark.parametrize("compiler", ["g++", "clang++"])
SEED, MUTATIONS, ROUNDS = 52, 5000, 1000


def checked(sanitizers: str) -> list[str]:
    return [*FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | OPTIONS | environment, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[:6000]}"
    return done.stdout


def skip_without(compiler: str, sanitizers: str, folder: Path) -> None:
    """Skip the test where the compiler, or the library of a sanitizer, is missing."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    (folder / "empty.cpp").write_text("int main() {}\n")
    command = [compiler, *checked(sanitizers), str(folder / "empty.cpp"), "-o", str(folder / "empty")]
    for step in (command, [str(folder / "empty")]):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"{compiler} -fsanitize={sanitizers} does not work here: {done.stderr.strip()[-200:]}")


def compiled(compiler: str, sanitizers: str, sources: list[Path], folder: Path) -> list[Path]:
    include = sysconfig.get_paths()["include"]

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        run(compiler, *checked(sanitizers), f"-I{include}", "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def test_the_programs_declare_the_kernels_of_this_version():
    text = (HERE / "abi.h").read_text()
    assert f"constexpr int32_t kAbi = {ABI_VERSION};" in text, "update the declarations in abi.h"


@pytest.mark.slow
@COMPILERS
def test_mutated_payloads_states_and_problems_stay_inside_their_buffers(compiler: str, tmp_path: Path):
    skip_without(compiler, MEMORY, tmp_path)
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("module.cpp needs Python.h")
    objects = compiled(compiler, MEMORY, sorted(CSRC.glob("*.cpp")), tmp_path)
    library, program = tmp_path / "libkernels.so", tmp_path / "mutated"
    run(compiler, "-shared", "-pthread", f"-fsanitize={MEMORY}", *objects, "-o", library)
    # Nobody calls what module.cpp wants of Python.
    link = [library, f"-Wl,-rpath,{tmp_path}", "-Wl,--unresolved-symbols=ignore-in-shared-libs", "-Wl,-z,lazy"]
    run(compiler, *checked(MEMORY), HERE / "mutated.cpp", "-o", program, *link)
    printed = run(program, str(SEED), str(MUTATIONS))
    print(f"\n{printed}")
    exported = re.findall(r" T (fxcomp_\w+)", run("nm", "-D", "--defined-only", library))
    called = re.findall(r"^calls (fxcomp_\w+) [1-9]\d*$", printed, re.MULTILINE)
    assert sorted(called) == sorted(exported), "give each kernel a case in mutated.cpp"
    [mutations] = re.findall(r"^mutations (\d+)$", printed, re.MULTILINE)
    assert int(mutations) >= 100_000


SHARED = [CSRC / f"{name}.cpp" for name in ("threads", "levels", "stream", "finite", "int8", "sparse", "topk")]


@pytest.mark.slow
@COMPILERS
@pytest.mark.parametrize(("sanitizers", "forks"), [("thread", ()), (UNDEFINED, ("forks",))], ids=["races", "children"])
def test_the_pool_of_threads(compiler: str, sanitizers: str, forks: tuple[str, ...], tmp_path: Path):
    skip_without(compiler, sanitizers, tmp_path)
    program = tmp_path / "pool"
    objects = compiled(compiler, sanitizers, [HERE / "pool.cpp", *SHARED], tmp_path)
    run(compiler, "-pthread", f"-fsanitize={sanitizers}", *objects, "-o", program)
    print(f"\n{run(program, str(SEED), str(ROUNDS), *forks)}")
