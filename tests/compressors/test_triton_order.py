"""A Triton kernel that reads values again, by other threads than write them, has a barrier in between."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.ptx import accesses, compiled

from fxcomp.compressors import parse_compressor
from fxcomp.compressors.block_codes import BlockCompressor
from fxcomp.compressors.inputs import EncoderInput
from fxcomp.compressors.triton import blocks, dispatch, language, orthonormal
from fxcomp.compressors.triton.language import constexpr, jit, tl
from fxcomp.compressors.triton.tiles import compensated, places

COMPILES = pytest.mark.skipif(
    not dispatch.available() or "interpreter" in type(language.mix).__module__, reason="Triton's compiler is not there"
)
IN_ORDER = ["read", "barrier", "write"]


def in_short(ptx: str, parameter: int) -> list[str]:
    """Take equal accesses in a row for one."""
    return [what for what, _ in groupby(accesses(ptx, parameter))]


def of_residual(text: str) -> list[str]:
    """Compile the kernel that encodes a bucket of two blocks with a residual."""
    compressor, found = parse_compressor(text), list[list[str]]()
    assert isinstance(compressor, BlockCompressor)

    def compile_only(kernel: Any, _: Any, arguments: Any, warps: int, constants: dict[str, Any]) -> None:
        found.append(in_short(compiled(kernel, arguments, constants, warps)["ptx"], 2))

    segments = (2 * compressor.block,)
    bucket, payload = torch.zeros(segments), torch.zeros(compressor.payload_elements(segments), dtype=torch.uint8)
    with patch.object(language, "start", compile_only):
        dispatch.encode(compressor, EncoderInput(bucket, torch.zeros(segments), segments, None, None), payload)
    return found[0]


@COMPILES
@pytest.mark.parametrize("block", [64, 1000, 2048, 8192])
@pytest.mark.parametrize("name", ["sign", "int2"])
def test_no_residual_is_written_while_other_threads_read_it(name: str, block: int):
    assert of_residual(f"{name}({block})") == IN_ORDER


@jit
def _leave_out_the_opposite(bucket, residual, size, HAS_BARRIER: constexpr, SHAPE: constexpr):
    place, is_there = places(size, SHAPE)
    value, _ = compensated(bucket, residual, place, is_there)
    other, _ = compensated(bucket, residual, SHAPE[1] - 1 - place, is_there)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(residual + place, value - other, is_there)


@COMPILES
@pytest.mark.parametrize(("barrier", "expected"), [(False, ["read", "write"]), (True, IN_ORDER)])
def test_a_missing_barrier_is_found(barrier: bool, expected: list[str]):
    constants = {"HAS_BARRIER": barrier, "SHAPE": (2048, 2048, 1)}
    values = [torch.zeros(2049)[1:] for _ in range(2)]  # read one by one: vectors are handed over after barriers
    ptx = compiled(_leave_out_the_opposite, (*values, 2048), constants, 4)["ptx"]
    assert in_short(ptx, 1) == expected


@COMPILES
@pytest.mark.parametrize("block", [64, 2048, 8192])
def test_a_mean_has_been_read_by_all_threads(block: int):
    """Not only because the compiler hands sums from thread to thread: the text of the step says so."""
    value = torch.zeros(block)
    constants: dict[str, Any] = {"SHAPE": (block, block, max(2048 // block, 1))}
    made = compiled(_mean_alone, (value, value.clone(), block), constants, 4)
    assert "barrier" in made["ttir"]


@jit
def _mean_alone(bucket, residual, size, SHAPE: constexpr):
    mean = blocks.mean_magnitude(bucket, residual, size, SHAPE)
    tl.store(residual + tl.arange(0, SHAPE[2]), mean)


@COMPILES
@pytest.mark.parametrize("longest", [3000, 70_000])
def test_what_threads_of_a_basis_hand_over_is_read_after_a_barrier(longest: int):
    """Vectors, and terms of their products: in parts of a sum, and in parts of these parts."""
    programs: list[str] = []

    def compile_only(
        kernel: Any, _: tuple[int, int], arguments: tuple[Any, ...], warps: int, constants: dict[str, Any]
    ) -> None:
        programs.append(compiled(kernel, arguments, constants, warps)["ptx"])

    matrices = torch.tensor([[0, longest, 0, 0, 0, 0, 2]])
    with patch.object(language, "start", compile_only):
        orthonormal.orthonormal(torch.zeros(2 * longest), matrices, longest, is_start=False)
    [ptx] = programs
    for parameter in (WORK, SCRATCH):
        found = in_short(ptx, parameter)
        assert {"read", "write", "barrier"} <= set(found)
        assert ("write", "read") not in pairwise(found)


WORK, SCRATCH = 2, 3  # parameters of the kernel
