"""A bucket in pieces takes as many launches as a whole one, and has the bits of pieces one by one."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.pretended import runs_triton
from torch import Tensor

from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.operators import decode, encode, payload_elements
from fxcomp.compressors.triton import dispatch, language
from fxcomp.testing.kernel_checks import plain_torch
from fxcomp.testing.rounds import fresh_state
from fxcomp.testing.samples import gaussian

PIECES = ((33, 5), (), (1,), (7, 0, 3000), (0,))
FLAT = tuple(size for piece in PIECES for size in piece)
QUANTISERS = (
    "int8",
    "int8(stochastic=true)",
    "int4(64)",
    "int4(64, stochastic=true)",
    "int2",
    "sign(96)",
    "sign(2048)",
)
INTERPRETS = pytest.mark.skipif(
    not dispatch.available() or os.environ.get("TRITON_INTERPRET") != "1", reason="no interpreter of Triton"
)


def counted(starts: list[str]) -> AbstractContextManager[None]:
    """Count launches on the device, and run nothing."""

    def count(kernel: Any, *_: Any) -> None:
        starts.append(getattr(kernel, "__name__", ""))

    return runs_triton(patch.object(language, "start", count))


def launches(compressor: Compressor, ranks: int) -> tuple[int, int]:
    """Count what encodes a part for each rank, and what decodes a part from each."""
    pieces = ((640, 40),) * ranks
    flat = tuple(size for piece in pieces for size in piece)
    payload = torch.zeros(payload_elements(compressor, pieces), dtype=compressor.payload_dtype)
    encodes, decodes = list[str](), list[str]()
    with counted(encodes):
        given = EncoderInput(torch.zeros(sum(flat)), None, flat, fresh_state(compressor, flat))
        encode(compressor, given, payload, pieces)
    with counted(decodes):
        decode(compressor, DecoderInput(payload, 1, flat), torch.zeros(sum(flat)), pieces)
    return len(encodes), len(decodes)


@pytest.mark.parametrize("text", [*QUANTISERS, "bf16", "topk(0.01)", "sidco(0.01)", "cmax"])
def test_launches_do_not_grow_with_ranks(text: str):
    compressor = parse_compressor(text)
    few = launches(compressor, 1)
    assert launches(compressor, 64) == few
    assert text not in (*QUANTISERS, "bf16") or few == (1, 1)


def of_all_pieces(compressor: Compressor, ranks: int) -> list[Tensor]:
    """Payloads, residuals, states and the mean of what some ranks make of pieces."""
    made: list[Tensor] = []
    payloads: list[Tensor] = []
    for rank in range(ranks):
        state, residual = fresh_state(compressor, FLAT), gaussian(sum(FLAT), seed=7) / 10
        payload = torch.full((payload_elements(compressor, PIECES),), 77, dtype=torch.uint8)
        encode(compressor, EncoderInput(gaussian(sum(FLAT), seed=rank), residual, FLAT, state), payload, PIECES)
        payloads.append(payload)
        made += [payload, residual, *([] if state is None else [state])]
    sizes = [compressor.payload_elements(piece) if piece else 0 for piece in PIECES]
    by_piece = zip(*(payload.split(sizes) for payload in payloads), strict=True)
    arrived, out = torch.cat([part for parts in by_piece for part in parts]), torch.full((sum(FLAT),), 77.0)
    decode(compressor, DecoderInput(arrived, ranks, FLAT), out, PIECES)
    return [*made, out]


@INTERPRETS
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("text", QUANTISERS)
def test_pieces_at_once_have_the_bits_of_the_references(text: str, ranks: int):
    compressor = parse_compressor(text)
    with plain_torch():
        expected = of_all_pieces(compressor, ranks)
    with runs_triton():
        found = of_all_pieces(compressor, ranks)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
