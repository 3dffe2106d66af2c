"""The Triton kernels give the bits of the references: on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1.

Where Triton is installed but neither is there, one test runs this file in the interpreter, and the others compile.
"""

import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.compressor_cases import COMPRESSORS
from helpers.devices import round_on
from helpers.pretended import runs_triton
from helpers.ptx import compiled

from fxcomp.compressors import CATALOGUE, CMax, Compressor, Feedback, parse_compressor
from fxcomp.compressors.powersgd import _orthonormal as reference_basis  # pyright: ignore[reportPrivateUsage]
from fxcomp.compressors.sidco import Controller
from fxcomp.compressors.triton import dispatch, language
from fxcomp.compressors.triton.orthonormal import orthonormal
from fxcomp.plan.modes import EXACT, LADDER_COMPRESSORS, MOMENTUM_COMPRESSORS, Mode, compressors_of
from fxcomp.testing import SAMPLES
from fxcomp.testing.kernel_checks import assert_same_bits, plain_torch

FILES = sorted(path.stem for path in Path(dispatch.__file__).parent.glob("*.py"))

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
HAS_TRITON = pytest.mark.skipif(not dispatch.available(), reason="Triton is not installed")
RUNS = pytest.mark.skipif(
    not dispatch.available() or not (IS_INTERPRETED or torch.cuda.is_available()),
    reason="neither a GPU nor Triton's interpreter",
)
COMPILES = pytest.mark.skipif(IS_INTERPRETED or not dispatch.available(), reason="no compiler")
WITH_KERNELS = [compressor for compressor in COMPRESSORS if dispatch.has_kernels(type(compressor))]
SEGMENTS = [(0, 1, 513, 0, 66, 3), (2600, 3), ()]  # in the second, some tiles take vectors
FEW_SAMPLES = ("laplace", "ties", "negative zero", "huge", "one nan")

# NumPy, in which the interpreter computes, warns of infinities where hardware goes on.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.slow
def test_every_file_can_be_imported_without_triton() -> None:
    hide = "import importlib.util as u; find = u.find_spec"
    hide += "; u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)"
    load = "from importlib import import_module as load"
    files = [f"load('fxcomp.compressors.triton.{file}')" for file in FILES]
    subprocess.run([sys.executable, "-c", "; ".join([hide, load, *files])], check=True)


def test_what_a_mode_or_a_budget_offers_has_kernels() -> None:
    offered = {
        type(compressor)
        for compressor in (
            *(*compressors_of(Mode.AGGRESSIVE), *LADDER_COMPRESSORS, *MOMENTUM_COMPRESSORS),
            EXACT[torch.bfloat16],
        )
    }
    assert offered == {kind for kind in CATALOGUE.values() if dispatch.has_kernels(kind)}


def test_every_file_with_kernels_is_named_as_a_compressor() -> None:
    for file in set(FILES) - {"__init__", "dispatch"}:
        if hasattr(importlib.import_module(f"fxcomp.compressors.triton.{file}"), "encode"):
            assert file in CATALOGUE


def test_a_plug_in_has_no_kernel_by_a_chance_of_its_name() -> None:
    plug_in = type("Int8", (CATALOGUE["int8"],), {"__module__": "elsewhere.int8"})
    assert not dispatch.has_kernels(plug_in)


@RUNS
@pytest.mark.parametrize("compressor", WITH_KERNELS, ids=str)
def test_the_kernels_give_the_bits_of_the_references(compressor: Compressor) -> None:
    samples = SAMPLES if _is_first_of_its_kind(compressor) else FEW_SAMPLES  # the interpreter takes its time
    for segments in SEGMENTS:
        for name in samples if segments == SEGMENTS[0] else ["laplace"]:
            bucket = SAMPLES[name](sum(segments))
            for feedback in _with_and_without(compressor) if name == "laplace" else [_with_and_without(compressor)[-1]]:
                assert_kernels_give_the_bits(compressor, bucket, segments, feedback=feedback, where=name)


@RUNS
@pytest.mark.parametrize(
    "hidden", ["large between sampled places", "large at sampled places", "all large are sampled", "few"]
)
def test_topk_kernels_give_the_bits_whatever_their_sample_shows(hidden: str) -> None:
    size = 40_000  # sampled at every second place
    bucket = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-3
    if hidden == "large between sampled places":
        bucket[1::64] = 5.0
    elif hidden == "large at sampled places":
        bucket[::4] = 5.0
    elif hidden == "all large are sampled":  # 300 of 20,000, and 300 of 40,000, where 400 are to be sent
        bucket[:600:2] = 5.0
    else:
        bucket[:] = 0.0
        bucket[1::8192] = 1.0
    for text in ("topk(0.01)", "topk(0.0001)"):
        assert_kernels_give_the_bits(parse_compressor(text), bucket, (size,), feedback=True, where=hidden)


@RUNS
@pytest.mark.parametrize("chunk", [2, 8, 16, 64, 128])
def test_cmax_kernels_give_the_bits_around_chunks_and_runs_and_beside_chunks_of_zeros(chunk: int) -> None:
    """Sizes about a chunk and more than a run of 1024 chunks; chunks of zeros that stay so with their residual."""
    compressor = CMax(chunk)
    segments = (0, 1, 2, chunk - 1, chunk, chunk + 1, 0, 1024 * chunk + 2049, 3 * chunk, 5 * chunk)
    bucket, residual = SAMPLES["laplace"](sum(segments)), 0.1 * SAMPLES["gaussian"](sum(segments))
    pieces = list(zip(bucket.split(list(segments)), residual.split(list(segments)), strict=True))
    for each in pieces[7]:
        each[chunk : 9 * chunk] = -0.0
        each[100 * chunk : 101 * chunk] = 1.0  # of equal ones the lower place goes
    pieces[8][0][chunk] = torch.inf
    for each in pieces[9]:
        each.zero_()
    results: list[list[torch.Tensor]] = []
    for device, mode in ((torch.device("cpu"), plain_torch()), (DEVICE, _on_device(compressor))):
        left_out, out = residual.to(device, copy=True), torch.full((sum(segments),), 77.0, device=device)
        payload = torch.full((compressor.payload_elements(segments),), 77, dtype=torch.uint8, device=device)
        with mode:
            compressor.encode(bucket.to(device), left_out, payload, segments)
            compressor.decode(payload, 1, segments, out)
        results.append([payload.cpu(), left_out.cpu(), out.cpu()])
    for what, actual, expected in zip(("payload", "residual", "mean"), *reversed(results), strict=True):
        assert_same_bits(actual, expected, what)


def assert_kernels_give_the_bits(
    compressor: Compressor, bucket: torch.Tensor, segments: tuple[int, ...], *, feedback: bool, where: str = ""
) -> None:
    with plain_torch():
        expected = round_on(torch.device("cpu"), compressor, bucket, segments, feedback=feedback)
    with _on_device(compressor):
        actual = round_on(DEVICE, compressor, bucket, segments, feedback=feedback)
    for what, tensor in expected.items():
        assert_same_bits(actual[what], tensor, f"{where}, {segments}, feedback {feedback}, {what}")


@RUNS
@pytest.mark.parametrize("text", ["sidco(0.01)", "sidco(0.01, fit=gamma)"])
def test_sidco_goes_on_from_any_state(text: str) -> None:
    """Samples with a stride, three stages, the end of a window, a restart, a sample taken again, a damaged state."""
    segments, compressor = (70_000, 66_000, 300, 66_000), parse_compressor(text)
    controllers = [
        Controller(
            stages=3.0, direction=-1.0, calls_in_window=4.0, fitted=3.1, reached=90.0, bad_windows=1.0, calls=7.0
        ),
        Controller(stages=2.0, calls_in_window=4.0, fitted=9.0, deviation=0.1, resamples=1.0, calls=float(2**20 - 1)),
        Controller(stages=4.0, calls_in_window=2.0, fitted=2.0, reached=2.0, calls=1.0),
        Controller(stages=1e9, calls=math.nan),
    ]
    state = torch.tensor([list(astuple(controller)) for controller in controllers]).flatten()
    bucket = SAMPLES["heavy"](sum(segments))
    results: list[list[torch.Tensor]] = []
    for device, mode in ((torch.device("cpu"), plain_torch()), (DEVICE, _on_device(compressor))):
        new_state, residual = state.clone().to(device), torch.zeros(sum(segments), device=device)
        payload = torch.empty(compressor.payload_elements(segments), dtype=torch.uint8, device=device)
        with mode:
            compressor.encode(bucket.to(device), residual, payload, segments, new_state)
        results.append([payload.cpu(), residual.cpu(), new_state.cpu()])
    for what, actual, expected in zip(("payload", "residual", "state"), *reversed(results), strict=True):
        assert_same_bits(actual, expected, what)


@RUNS
def test_powersgd_folds_long_vectors_in_halves() -> None:
    segments, compressor = (32 * 2053, 32 * 2053), parse_compressor("powersgd(3)")  # as matrices of 2053 columns
    bucket = SAMPLES["gaussian"](sum(segments))
    bucket[: segments[0]] = 1.0  # of rank 1, so that two random vectors are needed
    assert_kernels_give_the_bits(compressor, bucket, segments, feedback=True)


@RUNS
@pytest.mark.parametrize("length", [1, 2, 1023, 1025, 40_000, 300_000])
def test_powersgd_kernels_give_the_bits_of_bases_of_any_length(length: int) -> None:
    """The last of three vectors lies in what the others span, so a random one takes its place."""
    factors = torch.randn(3, length, generator=torch.Generator().manual_seed(0))
    factors[2] = factors[0] - factors[1]
    matrices = torch.tensor([[0, length, 0, 0, 0, 0, 3]], device=DEVICE)
    basis = orthonormal(factors.flatten().to(DEVICE), matrices, length, is_start=False)
    assert_same_bits(basis.cpu().view(3, length), reference_basis(factors), f"{length} values")


def _is_first_of_its_kind(compressor: Compressor) -> bool:
    return compressor == next(other for other in WITH_KERNELS if type(other) is type(compressor))


def _with_and_without(compressor: Compressor) -> list[bool]:
    return [False] if compressor.feedback is Feedback.FORBIDDEN else [False, True]


@COMPILES
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here")
def test_the_interpreter_gives_the_bits_of_the_references() -> None:
    files = [__file__, str(Path(__file__).with_name("test_triton_pieces.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "kernels_give or at_once"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@COMPILES
@pytest.mark.parametrize("compressor", WITH_KERNELS, ids=str)
def test_the_kernels_compile_and_keep_multiplication_and_addition_apart(compressor: Compressor) -> None:
    """For compute capability 9.0, which needs no GPU; a fused or flushed operation would give other bits."""
    programs: list[str] = []

    def compile_only(
        kernel: Any, _: tuple[int, int], arguments: tuple[Any, ...], warps: int, constants: dict[str, Any]
    ) -> None:
        programs.append(_compile(kernel, arguments, constants, warps))

    with patch.object(language, "start", compile_only), _on_device(compressor):
        for feedback in _with_and_without(compressor):
            round_on(torch.device("cpu"), compressor, torch.zeros(4096), (4096,), feedback=feedback)
    assert programs
    for text in programs:
        assert not re.findall(r"\b(?:fma\.rn|\w+\.approx|\w+[\w.]*\.ftz)[\w.]*", text)


def _compile(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int) -> str:
    made = compiled(kernel, arguments, constants, warps)
    # A logarithm of 64 bits is many operations: fused ones, and one that looks at the upper half.
    return re.sub(r"\S+\.f64|abs\.ftz\.f32", "", made["ptx"]) if "math.log" in made["ttir"] else made["ptx"]


def _on_device(compressor: Compressor) -> AbstractContextManager[None]:
    """Fail where a compressor with kernels runs its reference."""
    reason = AssertionError(f"{compressor} did not run its kernels")
    kind: Callable[..., Any] = type(compressor)
    return runs_triton(patch.object(kind, "compress_reference", side_effect=reason))
