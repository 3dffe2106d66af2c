"""In pieces: each is compressed as if it were alone, with its own residual and state, and decoded so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.compressor_cases import COMPRESSORS, WITH_KERNELS
from torch import Tensor

from fxcomp.compressors import Compressor, kernels, parse_compressor
from fxcomp.compressors.block_codes import BlockCompressor
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.operators import as_pieces, decode, encode, in_pieces, payload_elements
from fxcomp.plan.interpret import travels_whole
from fxcomp.testing.rounds import fresh_state
from fxcomp.testing.samples import gaussian

PIECES = ((33, 5), (), (1,), (7, 7, 64), ())
"""Of sizes that leave the next payload anywhere; one in the middle and the last are empty."""
FLAT = tuple(size for piece in PIECES for size in piece)
CUT = [compressor for compressor in COMPRESSORS if not travels_whole(compressor)]


def kept(compressor: Compressor) -> tuple[Tensor, Tensor | None]:
    """A residual and a state, as earlier steps may have left them."""
    return gaussian(sum(FLAT), seed=7) / 10, fresh_state(compressor, FLAT)


def one_by_one(
    compressor: Compressor, bucket: Tensor, residual: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Payload, residual and state of pieces that know nothing of each other."""
    payloads = [torch.empty(0, dtype=compressor.payload_dtype)]
    lefts, states = [torch.empty(0)], []
    values, start = zip(bucket.split([*map(sum, PIECES)]), residual.split([*map(sum, PIECES)]), strict=True), 0
    for piece, (value, left) in zip(PIECES, values, strict=True):
        if not piece:
            continue
        size = compressor.all_state_elements(piece)
        own = None if state is None else state[start : start + size].clone()
        start += size
        payload = torch.zeros(compressor.payload_elements(piece), dtype=compressor.payload_dtype)
        left = left.clone()
        compressor.encode(value.clone(), left, payload, piece, own)
        payloads.append(payload)
        lefts.append(left)
        states += [] if own is None else [own]
    return torch.cat(payloads), torch.cat(lefts), torch.cat(states) if states else state


def together(compressor: Compressor, bucket: Tensor, residual: Tensor, state: Tensor | None) -> Tensor:
    payload = torch.zeros(payload_elements(compressor, PIECES), dtype=compressor.payload_dtype)
    encode(compressor, EncoderInput(bucket, residual, FLAT, state), payload, PIECES)
    return payload


@pytest.fixture(params=[pytest.param(True, marks=WITH_KERNELS), False], ids=["kernels", "references"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(kernels, "can_run_on", lambda _: False)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("compressor", CUT, ids=str)
def test_pieces_together_are_what_each_is_alone(compressor: Compressor):
    bucket = gaussian(sum(FLAT), seed=3)
    residual, state = kept(compressor)
    expected = one_by_one(compressor, bucket, residual, state)
    payload = together(compressor, bucket, residual, state)
    assert torch.equal(payload, expected[0])
    assert torch.equal(residual, expected[1])
    assert (state is None) == (expected[2] is None)
    assert state is None or torch.equal(state, expected[2])


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("compressor", CUT, ids=str)
def test_the_mean_of_pieces_is_the_mean_of_each(compressor: Compressor, ranks: int):
    """Payloads of all ranks for a piece lie one after the other, then those of the next piece."""
    payloads = []
    for rank in range(ranks):
        residual, state = kept(compressor)
        payloads.append(together(compressor, gaussian(sum(FLAT), seed=rank), residual, state))
    sizes = [compressor.payload_elements(piece) if piece else 0 for piece in PIECES]
    by_piece = list(zip(*(payload.split(sizes) for payload in payloads), strict=True))
    arrived = torch.cat([part for parts in by_piece for part in parts])
    out = torch.full((sum(FLAT),), 77.0)
    decode(compressor, DecoderInput(arrived, ranks, FLAT), out, PIECES)
    expected = [torch.empty(0)]
    for piece, parts in zip(PIECES, by_piece, strict=True):
        if piece:
            mean = torch.empty(sum(piece))
            compressor.decode(torch.cat(parts), ranks, piece, mean)
            expected.append(mean)
    assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize("compressor", CUT, ids=str)
def test_payloads_that_are_joined_are_those_of_segments_one_after_the_other(compressor: Compressor):
    bucket = gaussian(sum(FLAT), seed=3)
    residual, state = kept(compressor)
    whole = torch.zeros(compressor.payload_elements(FLAT), dtype=compressor.payload_dtype)
    compressor.encode(bucket, residual.clone(), whole, FLAT, None if state is None else state.clone())
    is_same = whole.equal(one_by_one(compressor, bucket, residual, state)[0])
    assert compressor.facts.is_joined == is_same
    assert compressor.facts.is_joined != isinstance(compressor, BlockCompressor)


@pytest.mark.parametrize("compressor", CUT, ids=str)
def test_the_operators_take_pieces_and_give_the_same_bits(compressor: Compressor):
    bucket = gaussian(sum(FLAT), seed=3)
    residual, state = kept(compressor)
    expected = one_by_one(compressor, bucket, residual, state)
    numbers = {"pieces": [len(piece) for piece in PIECES]}
    given = {} if state is None else {"state": state}
    payload, left, following = compressor.compress_op(
        bucket, residual, list(FLAT), *compressor.parameters, **given, **numbers
    )
    assert torch.equal(payload, expected[0])
    assert torch.equal(left, expected[1])
    assert state is None or torch.equal(following, expected[2])
    mean = compressor.decompress_op(payload, 1, list(FLAT), *compressor.parameters, **numbers)
    out = torch.empty(sum(FLAT))
    decode(compressor, DecoderInput(payload, 1, FLAT), out, PIECES)
    assert torch.equal(mean, out)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("compressor", CUT, ids=str)
def test_a_payload_may_begin_at_any_place_of_a_buffer(compressor: Compressor):
    bucket = gaussian(38, seed=3)
    elements = compressor.payload_elements((33, 5))
    payloads: list[Tensor] = []
    means: list[Tensor] = []
    for offset in (0, 1, 2, 3, 5):
        buffer = torch.zeros(offset + elements, dtype=compressor.payload_dtype)
        compressor.encode(bucket, None, buffer[offset:], (33, 5), fresh_state(compressor, (33, 5)))
        payloads.append(buffer[offset:].clone())
        room = torch.zeros(offset + 38)
        compressor.decode(buffer[offset:], 1, (33, 5), room[offset:])
        means.append(room[offset:].clone())
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)
    assert all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("compressor", CUT, ids=str)
def test_a_rank_may_have_nothing_to_compress(compressor: Compressor):
    """The shard of a bucket smaller than its ranks, and every rank of a host but the root."""
    state = fresh_state(compressor, ())
    payload = torch.zeros(0, dtype=compressor.payload_dtype)
    out = torch.zeros(0)
    for pieces in ((), ((),), ((), (), ())):
        encode(compressor, EncoderInput(torch.zeros(0), torch.zeros(0), (), state), payload, pieces or ((),))
        decode(compressor, DecoderInput(payload, 2, ()), out, pieces or ((),))
    assert payload_elements(compressor, ((), ())) == 0


def test_what_only_travels_whole_is_never_cut():
    whole = {compressor.name for compressor in COMPRESSORS if travels_whole(compressor)}
    assert whole == {"powersgd"}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [(None, ((4, 8, 3),)), ([2, 1], ((4, 8), (3,))), ([0, 3, 0], ((), (4, 8, 3), ())), ([1, 1, 1], ((4,), (8,), (3,)))],
)
def test_segments_are_grouped_by_their_numbers(numbers: Sequence[int] | None, expected: tuple[tuple[int, ...], ...]):
    assert in_pieces((4, 8, 3), numbers) == expected
    assert as_pieces(expected if len(expected) > 1 else expected[0]) == expected


def test_chunks_lie_in_one_shard():
    assert parse_compressor("cmax(64)").grain == 64
    assert parse_compressor("int8(block=96)").grain == 96
    assert parse_compressor("topk(0.1)").grain == 1


def test_whatever_has_blocks_says_so():
    """A field of that name alone says nothing: another package may call it as it likes."""
    with_blocks = [c for c in COMPRESSORS if any(parameter.name == "block" for parameter in c.facts.parameters)]
    assert with_blocks
    assert all(compressor.facts.grain == "block" and compressor.grain > 1 for compressor in with_blocks)
