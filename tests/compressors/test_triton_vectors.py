"""One odd size in a bucket leaves vector loads to all tiles that lie at multiples of four."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.devices import round_on
from helpers.pretended import runs_triton
from helpers.ptx import compiled, vectors

from fxcomp.compressors import parse_compressor
from fxcomp.compressors.triton import dispatch, language
from fxcomp.compressors.triton.tiles import rows_of, tiles_of

COMPILES = pytest.mark.skipif(
    not dispatch.available() or "interpreter" in type(language.mix).__module__, reason="Triton's compiler is not there"
)
BLOCKS = (1, 7, 64, 100, 512, 1000, 2048, 4096)
SIZES = (0, 1, 2, 15, 16, 17, 2047, 2048, 2049)


def compiled_for(segments: tuple[int, ...], block: int) -> list[tuple[int, int, int]]:
    """For each tile: first value, values, and the power of two for which its program is compiled."""
    tiles = tiles_of(block, list(rows_of(segments, block, 1)), torch.device("cpu"))
    *_, least, best = tiles.shape
    places = [(start, size) for start, size, *_ in tiles.table.tolist()]
    return [(start, size, best if (start | size) % best == 0 else least) for start, size in places]


@pytest.mark.parametrize(
    ("segments", "block", "expected"),
    [
        ((4096, 4096), 2048, [4, 4, 4, 4]),
        ((4096, 1000), 2048, [4, 4, 4]),
        ((4096, 4096, 1), 2048, [4, 4, 4, 4, 1]),
        ((4096, 1, 4096), 2048, [4, 4, 1, 1, 1]),
        ((1, 4096), 2048, [1, 1, 1]),
        ((1,), 2048, [1]),
        ((10, 2), 2048, [2, 2]),
        ((4096, 10, 6, 8), 2048, [4, 4, 2, 2, 4]),
        ((4096, 10, 1), 2048, [4, 4, 1, 1]),
        ((2049,), 2048, [4, 1]),
        ((2047, 2048), 512, [1, 1]),
        ((4096, 15), 64, [4, 4, 1]),
        ((4096, 1), 7, [1, 1, 1, 1]),
        ((4096, 1), 1000, [4, 4, 4, 1]),
        ((), 2048, []),
        ((0, 0), 2048, []),
    ],
)
def test_a_tile_is_compiled_for_where_it_lies(segments: tuple[int, ...], block: int, expected: list[int]):
    assert [alignment for *_, alignment in compiled_for(segments, block)] == expected


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("odd", SIZES)
def test_every_value_is_in_one_tile_and_no_tile_is_compiled_for_more_than_it_has(odd: int, block: int):
    for segments in ((odd,), (odd, 4096, 64), (4096, odd, 64), (4096, 64, odd), SIZES):
        tiles = compiled_for(segments, block)
        assert [value for start, size, _ in tiles for value in range(start, start + size)] == [*range(sum(segments))]
        assert all(start % alignment == size % alignment == 0 for start, size, alignment in tiles)


def vectors_of(text: str, segments: tuple[int, ...]) -> dict[str, set[str]]:
    """Compile all that encodes and decodes a bucket with a residual; return each kernel's accesses to vectors."""
    compressor, found = parse_compressor(text), dict[str, set[str]]()

    def compile_only(kernel: Any, _: Any, arguments: Any, warps: int, constants: dict[str, Any]) -> None:
        made = vectors(compiled(kernel, arguments, constants, warps)["ptx"])
        found.setdefault(kernel.__name__, set()).update(made)

    with patch.object(language, "start", compile_only), runs_triton():
        round_on(torch.device("cpu"), compressor, torch.zeros(sum(segments)), segments, feedback=True)
    return found


@COMPILES
@pytest.mark.parametrize(
    ("text", "reading", "writing"),
    [
        ("int8", "_encode", "_decode"),
        ("int4(64)", "_encode", "_decode"),
        ("sign(64)", "_encode", "_decode"),
        ("int2", "_encode", "_decode"),
        ("bf16", "_encode", "_decode"),
        ("cmax", "_find", "_decode"),
        ("topk(0.01)", "_gather", "_decode"),
    ],
)
def test_one_odd_size_leaves_vectors_to_the_others(text: str, reading: str, writing: str):
    found, expected = vectors_of(text, (4096, 1)), vectors_of(text, (4096,))
    assert found == expected
    assert "ld.global.v4" in found[reading]
    assert "st.global.v4" in found[writing]
