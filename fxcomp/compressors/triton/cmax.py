"""Index and sign of the largest value of each chunk, bit-identical to `fxcomp/compressors/cmax.py`.

    find      one pass over the bucket, a program per run of 1024 chunks: 16-bit codes, and a partial sum of the scale
    settle    a program per segment: the scale, which determines the zero code, and the payload's padding
    send      a second pass: pack codes into the payload, and subtract their values from the residual

Decoding is one pass, in which each value reads its chunk's code.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.block_codes import count_blocks
from fxcomp.compressors.cmax import RUN, CMax
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.triton.blocks import LANES
from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, sum_of, tl
from fxcomp.compressors.triton.tiles import (
    INFINITY,
    blocks_of,
    compensated,
    cut,
    is_finite,
    lies_well,
    magnitude_of,
    places,
    segment_of,
    tile_of,
)

RUN_CHUNKS = constant(RUN)
ZERO = constant(256)  # temporary code of a chunk of zeros; sent codes have at most eight bits
NO_CODE = constant(512)
SECTION_COLUMNS = constant(5)  # first chunk, chunks, first run, runs, first byte in the payload
FACTOR = constant(2654435769)  # the same number as in cmax.py
SIGN = constant(-2147483648)  # sign bit of an fp32
NAN = constant(0x7FC00000)


def encode(compressor: CMax, given: EncoderInput, payload: Tensor) -> None:
    segments, chunk, device = given.segments, compressor.chunk, given.bucket.device
    runs, sections = cut(segments, RUN * chunk, device), _sections(compressor, segments, device)
    codes = torch.empty(count_blocks(segments, chunk), dtype=torch.int16, device=device)
    sums = torch.empty(len(runs), device=device)
    counts = torch.empty(len(runs), dtype=torch.int32, device=device)
    values, bits = (given.bucket, given.residual), compressor.bits
    warps = min(max(chunk // 8, 1), 16)  # 16 values per thread, for 64 chunks at once
    found = (codes, sums, counts)
    launch(_find, len(runs), runs.table, *values, sections, *found, warps=warps, BITS=bits, SHAPE=runs.shape)
    launch(_settle, len(segments), sections, sums, counts, payload, BITS=bits)
    cut(segments, chunk, device).launch(_send, *values, sections, codes, payload, BITS=bits)


def decode(compressor: CMax, received: DecoderInput, out: Tensor) -> None:
    sections = _sections(compressor, received.segments, out.device)
    arguments = (received.payloads, out, sections, len(received.payloads) // received.ranks)
    tiles = cut(received.segments, compressor.chunk, out.device)
    tiles.launch(_decode, *arguments, BITS=compressor.bits, RANKS=received.ranks)


@cache
def _sections(compressor: CMax, segments: tuple[int, ...], device: torch.device) -> Tensor:
    rows: list[tuple[int, ...]] = []
    first_chunk = first_run = at = 0
    for n in segments:
        chunks = count_blocks((n,), compressor.chunk)
        runs = count_blocks((chunks,), RUN)
        rows.append((first_chunk, chunks, first_run, runs, at))
        first_chunk, first_run, at = first_chunk + chunks, first_run + runs, at + compressor.payload_elements((n,))
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 5)


# Encoding


@jit
def _find(table, bucket, residual, sections, codes, sums, counts, BITS: constexpr, SHAPE: constexpr):
    if lies_well(table, SHAPE):
        _find_in_run(table, bucket, residual, sections, codes, sums, counts, SHAPE[4], BITS, SHAPE)
    else:
        _find_in_run(table, bucket, residual, sections, codes, sums, counts, SHAPE[3], BITS, SHAPE)


@jit
def _find_in_run(
    table, bucket, residual, sections, codes, sums, counts, ALIGNMENT: constexpr, BITS: constexpr, SHAPE: constexpr
):
    CHUNK: constexpr = SHAPE[0] // RUN_CHUNKS
    start, size, run, _ = tile_of(table, ALIGNMENT)
    segment, in_segment = segment_of(table)
    bucket += start
    if residual is not None:
        residual += start
    codes += tl.load(sections + segment * SECTION_COLUMNS) + in_segment // CHUNK
    lane = tl.arange(0, LANES)
    column = tl.arange(0, CHUNK)[None, :]
    lanes = tl.zeros([LANES], tl.float32)
    sent = tl.zeros([LANES], tl.int32)
    for first in range(0, RUN_CHUNKS, LANES):
        place = (first + lane[:, None]) * CHUNK + column
        value, _old = compensated(bucket, residual, place, place < size)
        magnitude = magnitude_of(value)
        largest, at = tl.max(magnitude, axis=1, return_indices=True)  # of equal magnitudes, the lowest index
        is_negative = (value.to(tl.int32, bitcast=True) < 0) & (column == at[:, None])
        code = at | (tl.max(is_negative.to(tl.int32), axis=1) << (BITS - 1))
        code = tl.where(largest == 0, ZERO, code)
        tl.store(codes + first + lane, code.to(tl.int16), (first + lane) * CHUNK < size)
        lanes += largest.to(tl.float32, bitcast=True)
        sent += (largest != 0).to(tl.int32)
    tl.store(sums + run, sum_of(lanes, LANES))
    tl.store(counts + run, tl.sum(sent, axis=0))


@jit
def _settle(sections, sums, counts, payload, BITS: constexpr):
    section = sections + tl.program_id(0) * SECTION_COLUMNS
    chunks = tl.load(section + 1)
    runs = tl.load(section + 3)
    sums += tl.load(section + 2)
    counts += tl.load(section + 2)
    lanes = tl.zeros([LANES], tl.float32)
    sent = tl.zeros([LANES], tl.int64)
    first = runs * 0
    while first < runs:
        run = first + tl.arange(0, LANES)
        lanes += tl.load(sums + run, run < runs, other=0.0)
        sent += tl.load(counts + run, run < runs, other=0)
        first += LANES
    count = tl.sum(sent, axis=0)
    bits = magnitude_of(tl.div_rn(sum_of(lanes, LANES), tl.maximum(count, 1).to(tl.float32)))
    bits = tl.where(count < chunks, bits | SIGN, bits)
    bits = tl.where((bits & ~SIGN) < INFINITY, bits, NAN)
    part = payload + tl.load(section + 4)
    tl.store(part.to(tl.pointer_type(tl.int32)), bits, chunks > 0)
    end = 4 + _bytes_of_codes(chunks, BITS)
    after = tl.arange(0, 4)
    tl.store(part + end + after, tl.zeros([4], tl.uint8), (after < (4 - end % 4) % 4) & (chunks > 0))


@jit
def _nothing(scale, BITS: constexpr):
    """Return the code of a chunk of zeros; NO_CODE if the sign bit of `scale` is 0, because then no chunk is zero."""
    drawn = (magnitude_of(scale).to(tl.uint32) * FACTOR) >> (32 - BITS)
    return tl.where(scale.to(tl.int32, bitcast=True) < 0, drawn.to(tl.int32), NO_CODE)


@jit
def _bytes_of_codes(chunks, BITS: constexpr):
    total = chunks * 0
    for step in tl.static_range(4):
        total += _plane_bytes(chunks, BITS, 8 >> step)
    return total


@jit
def _plane_bytes(chunks, BITS: constexpr, WIDTH: constexpr):
    if BITS & WIDTH:
        return (chunks * WIDTH + 7) // 8
    else:  # noqa: RET505  Triton compiles one branch only
        return chunks * 0


@jit
def _send(table, bucket, residual, sections, codes, payload, BITS: constexpr, SHAPE: constexpr):
    if lies_well(table, SHAPE):
        _send_tile(table, bucket, residual, sections, codes, payload, SHAPE[4], BITS, SHAPE)
    else:
        _send_tile(table, bucket, residual, sections, codes, payload, SHAPE[3], BITS, SHAPE)


@jit
def _send_tile(
    table, bucket, residual, sections, codes, payload, ALIGNMENT: constexpr, BITS: constexpr, SHAPE: constexpr
):
    CHUNK: constexpr = SHAPE[0]
    ROWS: constexpr = SHAPE[2]
    start, size, _, _ = tile_of(table, ALIGNMENT)
    segment, in_segment = segment_of(table)
    section = sections + segment * SECTION_COLUMNS
    row, is_row = blocks_of(size, SHAPE)
    first = in_segment // CHUNK
    found = tl.load(codes + tl.load(section) + first + row, is_row, other=0).to(tl.int32)
    part = payload + tl.load(section + 4)
    scale = tl.load(part.to(tl.pointer_type(tl.float32)))
    nothing, is_sent = _nothing(scale, BITS), is_finite(scale)
    code = tl.where(found == ZERO, nothing, found)
    code = tl.where(is_row & is_sent, code, 0)
    chunks = tl.load(section + 1)
    planes = part + 4
    left = code
    for step in tl.static_range(4):
        left = _store_plane(planes, left, first, row, size, BITS, 8 >> step, ROWS, CHUNK)
        planes += _plane_bytes(chunks, BITS, 8 >> step)
    if residual is not None:
        place, is_there = places(size, SHAPE)
        value, old = compensated(bucket + start, residual + start, place, is_there)
        sent = _values(code, scale, nothing, BITS, SHAPE)
        tl.store(residual + start + place, tl.where(is_sent, value - sent, old), is_there)


@jit
def _store_plane(plane, code, first, row, size, BITS: constexpr, WIDTH: constexpr, ROWS: constexpr, CHUNK: constexpr):
    if BITS & WIDTH:
        IN_A_BYTE: constexpr = 8 // WIDTH
        bits = tl.reshape(code & ((1 << WIDTH) - 1), [ROWS // IN_A_BYTE, IN_A_BYTE])
        byte = tl.sum(bits << (WIDTH * tl.arange(0, IN_A_BYTE))[None, :], axis=1)
        number = tl.arange(0, ROWS // IN_A_BYTE)
        at = plane + first * WIDTH // 8 + number
        tl.store(at, byte.to(tl.uint8), number * (IN_A_BYTE * CHUNK) < size)
        return code >> WIDTH
    else:  # noqa: RET505
        return code


@jit
def _values(code, scale, nothing, BITS: constexpr, SHAPE: constexpr):
    CHUNK: constexpr = SHAPE[0]
    sign = (code >> (BITS - 1)) << 31
    value = (magnitude_of(scale) | sign).to(tl.float32, bitcast=True)
    column = tl.arange(0, CHUNK)[None, :]
    is_it = (column == (code & (CHUNK - 1))[:, None]) & (code != nothing)[:, None]
    return tl.where(is_it, value[:, None], 0.0)


# Decoding


@jit
def _decode(table, payloads, out, sections, payload_bytes, BITS: constexpr, RANKS: constexpr, SHAPE: constexpr):
    if lies_well(table, SHAPE):
        _decode_tile(table, payloads, out, sections, payload_bytes, SHAPE[4], BITS, RANKS, SHAPE)
    else:
        _decode_tile(table, payloads, out, sections, payload_bytes, SHAPE[3], BITS, RANKS, SHAPE)


@jit
def _decode_tile(
    table,
    payloads,
    out,
    sections,
    payload_bytes,
    ALIGNMENT: constexpr,
    BITS: constexpr,
    RANKS: constexpr,
    SHAPE: constexpr,
):
    CHUNK: constexpr = SHAPE[0]
    ROWS: constexpr = SHAPE[2]
    start, size, _, _ = tile_of(table, ALIGNMENT)
    segment, in_segment = segment_of(table)
    section = sections + segment * SECTION_COLUMNS
    row, is_row = blocks_of(size, SHAPE)
    chunk = in_segment // CHUNK + row
    chunks = tl.load(section + 1)
    part = payloads + tl.load(section + 4)
    total = tl.zeros([ROWS, CHUNK], tl.float32)
    for _ in range(RANKS):
        scale = tl.load(part.to(tl.pointer_type(tl.float32)))
        code = row * 0
        planes = part + 4
        for step in tl.static_range(4):
            code |= _load_plane(planes, chunk, is_row, BITS, 8 >> step)
            planes += _plane_bytes(chunks, BITS, 8 >> step)
        value = _values(code, scale, _nothing(scale, BITS), BITS, SHAPE)
        total += tl.where(is_finite(scale), value, float("nan"))
        part += payload_bytes
    place, is_there = places(size, SHAPE)
    tl.store(out + start + place, total * (1.0 / RANKS), is_there)


@jit
def _load_plane(plane, chunk, is_row, BITS: constexpr, WIDTH: constexpr):
    if BITS & WIDTH:
        BELOW: constexpr = BITS & ~(2 * WIDTH - 1)
        at = chunk * WIDTH
        byte = tl.load(plane + at // 8, is_row, other=0).to(tl.int32)
        return ((byte >> (at % 8).to(tl.int32)) & ((1 << WIDTH) - 1)) << BELOW
    else:  # noqa: RET505
        return chunk.to(tl.int32) * 0
