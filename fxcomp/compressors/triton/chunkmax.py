"""The largest value of each chunk: the bits of `fxcomp/compressors/chunkmax.py`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.chunkmax import ChunkMax
from fxcomp.compressors.triton.blocks import COLUMNS, INFINITY, Tiles, compensated, cut, is_aligned, places, tile_of
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl

SECTION_COLUMNS = constant(2)


@cache
def _sections(segments: tuple[int, ...], chunk: int, device: torch.device) -> Tensor:
    """For each segment: the first byte of its values and of its places."""
    rows: list[tuple[int, int]] = []
    end = 0
    for size in segments:
        values = -(-size // chunk)
        rows.append((end, end + 4 * values))
        end += 4 * values + -(-values * _bytes_of_place(chunk) // 4) * 4
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _bytes_of_place(chunk: int) -> int:
    return 1 if chunk <= 256 else 2


@jit
def _section_of(table: Value, sections: Value, BLOCK: constexpr, ROWS: constexpr):
    """Where this tile's values and places lie in a payload, and which chunks of the segment they are of."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    section = sections + tl.load(entry + 4) * SECTION_COLUMNS
    chunk = (tl.load(entry + 5) // BLOCK).to(tl.int32) + tl.arange(0, ROWS)
    return tl.load(section), tl.load(section + 1), chunk


@jit
def _encode(
    bucket: Value,
    residual: Value,
    payload: Value,
    sections: Value,
    table: Value,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
):
    start, size, _, _ = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    value, old = compensated(bucket, residual, start + place, is_there)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    largest = tl.argmax(tl.where(is_there, magnitude, -1), axis=1, tie_break_left=True)
    is_sent = tl.arange(0, WIDTH)[None, :] == largest[:, None]
    sent = tl.sum(tl.where(is_sent, bits, 0), axis=1)

    values_at, places_at, chunk = _section_of(table, sections, BLOCK, ROWS)
    is_chunk = tl.arange(0, ROWS) * BLOCK < size
    tl.store((payload + values_at).to(tl.pointer_type(tl.int32)) + chunk, sent, is_chunk)
    # Behind the last chunk the places' section is filled up with zeros.
    is_last = (places_at - values_at) // 4 == tl.max(tl.where(is_chunk, chunk, -1), axis=0) + 1
    filling = tl.arange(0, 4)
    if BLOCK <= 256:
        tl.store(payload + places_at + chunk, largest.to(tl.uint8), is_chunk)
        used = (places_at - values_at) // 4
    else:
        tl.store((payload + places_at).to(tl.pointer_type(tl.uint16)) + chunk, largest.to(tl.uint16), is_chunk)
        used = (places_at - values_at) // 2
    is_filling = is_last & (filling < (4 - used % 4) % 4)
    tl.store(payload + places_at + used + filling, tl.zeros([4], tl.uint8), is_filling)
    if residual is not None:
        left_out = tl.where(is_sent, 0.0, value)
        tl.store(residual + start + place, tl.where(magnitude < INFINITY, left_out, old), is_there)


@jit
def _decode(
    payloads: Value,
    out: Value,
    sections: Value,
    table: Value,
    payload_bytes: Value,
    factor: Value,
    RANKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    ALIGNMENT: constexpr,
):
    start, size, _, _ = tile_of(table, ALIGNMENT)
    place, is_there = places(size, BLOCK, WIDTH, ROWS)
    values_at, places_at, chunk = _section_of(table, sections, BLOCK, ROWS)
    is_chunk = tl.arange(0, ROWS) * BLOCK < size
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
    tl.store(out + start + place, total * factor, is_there)


def _cut(segments: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Tiles, Tensor]:
    return cut(segments, chunk, 1, device), _sections(segments, chunk, device)


def encode(
    compressor: ChunkMax,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    if not is_aligned(payload):
        return False
    tiles, sections = _cut(segments, compressor.chunk, bucket.device)
    arguments = (bucket, residual, payload, sections, tiles.table)
    launch(_encode, len(tiles), *arguments, warps=tiles.warps, **tiles.constants)
    return True


def decode(
    compressor: ChunkMax,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    if not is_aligned(payloads):
        return False
    tiles, sections = _cut(segments, compressor.chunk, out.device)
    arguments = (payloads, out, sections, tiles.table, len(payloads) // ranks, 1.0 / ranks)
    launch(_decode, len(tiles), *arguments, RANKS=ranks, warps=tiles.warps, **tiles.constants)
    return True
