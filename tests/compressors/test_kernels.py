"""Finding the kernels, and the scaled copy."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.compressor_cases import WITH_KERNELS

from fxcomp.compressors import kernels


@WITH_KERNELS
def test_built_kernels_are_described() -> None:
    path = kernels.kernel_path()
    assert path is not None
    assert kernels.describe() == f"compression on the CPU: C++ kernels ({path.name})"


def test_missing_kernels_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_path", lambda: None)
    monkeypatch.setattr(kernels, "_library", lambda: None)
    assert kernels.describe() == (
        "compression on the CPU: plain torch (no kernels; install fxcomp where a C++ compiler is found)"
    )


def test_a_build_that_failed_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failure = "a compiler was found, the build failed: csrc/bf16.cpp:1:2: error: no"
    (tmp_path / "_kernels_not_built.txt").write_text(failure + "\n")
    monkeypatch.setattr(kernels, "_PACKAGE", tmp_path)
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert kernels.describe() == (
        f"compression on the CPU: plain torch (no kernels: {failure}; mend that and install fxcomp again)"
    )
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "kernel_path", lambda: Path("_kernels.abi3.so"))
    assert kernels.describe() == (
        f"compression on the CPU: C++ kernels (_kernels.abi3.so, but not of the last build: {failure})"
    )


@WITH_KERNELS
def test_kernels_of_another_version_are_not_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = kernels.kernel_path()
    assert built is not None
    other = tmp_path / "_kernels.abi3.so"  # under a path of its own, as what was opened is remembered
    shutil.copyfile(built, other)
    monkeypatch.setattr(kernels, "kernel_path", lambda: other)
    monkeypatch.setattr(kernels, "ABI_VERSION", -1)
    kernels._library.cache_clear()
    try:
        assert not kernels.can_run_on(torch.zeros(1))
        assert kernels.describe() == (
            "compression on the CPU: plain torch (_kernels.abi3.so is from another version; install fxcomp again)"
        )
    finally:
        kernels._library.cache_clear()


def test_kernels_that_do_not_load_are_not_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of another processor, or for a newer C library: the references run, as if there were none."""
    other = tmp_path / "_kernels.abi3.so"
    other.write_text("no library")
    monkeypatch.setattr(kernels, "kernel_path", lambda: other)
    kernels._library.cache_clear()
    try:
        assert not kernels.can_run_on(torch.zeros(1))
        assert kernels.describe().startswith("compression on the CPU: plain torch (_kernels.abi3.so does not load: ")
    finally:
        kernels._library.cache_clear()


def test_a_kernel_is_known_to_other_threads_once_it_can_be_called():
    """Two threads call it for the first time at once: the second one must not find it half made."""

    class Kernel:
        def __setattr__(self, name: str, value: object) -> None:
            assert "encode" not in calls._kernels, f"{name} comes too late"

        def __call__(self, *arguments: object) -> int:
            return len(arguments)

    class Built:
        def __getitem__(self, name: str) -> Kernel:
            return Kernel()

        def fxcomp_set_threads(self, count: object) -> None:
            del count

    calls = kernels._Calls(Built())
    assert calls.run("encode", (1, 2.0)) == 2
    assert "encode" in calls._kernels
