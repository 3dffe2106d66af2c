"""The largest value of each chunk: the bits of `fxcomp/compressors/chunkmax.py`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.chunkmax import ChunkMax
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.triton.language import constant, constexpr, jit, tl
from fxcomp.compressors.triton.tiles import (
    INFINITY,
    blocks_of,
    compensated,
    cut,
    magnitude_of,
    places,
    segment_of,
    tile_of,
)

SECTION_COLUMNS = constant(2)


@cache
def _sections(segments: tuple[int, ...], chunk: int, device: torch.device) -> Tensor:
    """For each segment: the first byte of its values and of its places, which are of one byte or two."""
    rows: list[tuple[int, int]] = []
    end = 0
    for size in segments:
        values = -(-size // chunk)
        rows.append((end, end + 4 * values))
        end += 4 * values + -(-values * (1 if chunk <= 256 else 2) // 4) * 4
    return torch.tensor(rows, dtype=torch.int64, device=device)


def encode(compressor: ChunkMax, given: EncoderInput, payload: Tensor) -> None:
    sections = _sections(given.segments, compressor.chunk, given.bucket.device)
    tiles = cut(given.segments, compressor.chunk, given.bucket.device)
    tiles.launch(_encode, given.bucket, given.residual, payload, sections)


def decode(compressor: ChunkMax, received: DecoderInput, out: Tensor) -> None:
    sections = _sections(received.segments, compressor.chunk, out.device)
    tiles = cut(received.segments, compressor.chunk, out.device)
    arguments = (received.payloads, out, sections, len(received.payloads) // received.ranks)
    tiles.launch(_decode, *arguments, RANKS=received.ranks)


@jit
def _section_of(table, sections, block, SHAPE: constexpr):
    """Look up where this tile's values and places lie in a payload, and the numbers of its chunks in the segment."""
    BLOCK: constexpr = SHAPE[0]
    segment, first = segment_of(table)
    section = sections + segment * SECTION_COLUMNS
    return tl.load(section), tl.load(section + 1), (first // BLOCK).to(tl.int32) + block


@jit
def _encode(table, bucket, residual, payload, sections, SHAPE: constexpr):
    BLOCK: constexpr = SHAPE[0]
    WIDTH: constexpr = SHAPE[1]
    start, size, _, _ = tile_of(table, SHAPE)
    place, is_there = places(size, SHAPE)
    value, old = compensated(bucket, residual, start + place, is_there)
    magnitude = magnitude_of(value)
    largest = tl.argmax(tl.where(is_there, magnitude, -1), axis=1, tie_break_left=True)
    is_sent = tl.arange(0, WIDTH)[None, :] == largest[:, None]
    sent = tl.sum(tl.where(is_sent, value.to(tl.int32, bitcast=True), 0), axis=1)

    block, is_chunk = blocks_of(size, SHAPE)
    values_at, places_at, chunk = _section_of(table, sections, block, SHAPE)
    tl.store((payload + values_at).to(tl.pointer_type(tl.int32)) + chunk, sent, is_chunk)
    if BLOCK <= 256:
        tl.store(payload + places_at + chunk, largest.to(tl.uint8), is_chunk)
        used = (places_at - values_at) // 4
    else:
        tl.store((payload + places_at).to(tl.pointer_type(tl.uint16)) + chunk, largest.to(tl.uint16), is_chunk)
        used = (places_at - values_at) // 2
    # The segment's last tile fills up with zeros.
    is_last = (places_at - values_at) // 4 == tl.max(tl.where(is_chunk, chunk, -1), axis=0) + 1
    after = tl.arange(0, 4)
    is_filling = is_last & (after < (4 - used % 4) % 4)
    tl.store(payload + places_at + used + after, tl.zeros([4], tl.uint8), is_filling)
    if residual is not None:
        left_out = tl.where(is_sent, 0.0, value)
        tl.store(residual + start + place, tl.where(magnitude < INFINITY, left_out, old), is_there)


@jit
def _decode(table, payloads, out, sections, payload_bytes, RANKS: constexpr, SHAPE: constexpr):
    BLOCK: constexpr = SHAPE[0]
    WIDTH: constexpr = SHAPE[1]
    ROWS: constexpr = SHAPE[2]
    start, size, _, _ = tile_of(table, SHAPE)
    place, is_there = places(size, SHAPE)
    block, is_chunk = blocks_of(size, SHAPE)
    values_at, places_at, chunk = _section_of(table, sections, block, SHAPE)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for _ in range(RANKS):
        value = tl.load((payloads + values_at).to(tl.pointer_type(tl.float32)) + chunk, is_chunk, other=0.0)
        if BLOCK <= 256:
            sent = tl.load(payloads + places_at + chunk, is_chunk, other=0).to(tl.int32)
        else:
            sent = tl.load((payloads + places_at).to(tl.pointer_type(tl.uint16)) + chunk, is_chunk, other=0)
        is_sent = tl.arange(0, WIDTH)[None, :] == sent.to(tl.int32)[:, None]
        total += tl.where(is_sent, value[:, None], 0.0)
        payloads += payload_bytes
    tl.store(out + start + place, total * (1.0 / RANKS), is_there)
