"""Lay out and decode the sparse payload of topk and sidco, without synchronising with the device.

A section is a segment's part of the payload. First the places (indices in a segment) of all ranks are read from the
sections' bit strings into lists. Then each tile of the bucket finds its part of each list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from fxcomp.compressors.inputs import DecoderInput
from fxcomp.compressors.places import bytes_of, form_of
from fxcomp.compressors.sidco import Sidco
from fxcomp.compressors.survivors import capacities
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.tiles import TILE, Tiles, cut, lies_well, segment_of, tile_of

SECTION_COLUMNS = constant(9)
K, SLOTS, FIRST_TILE, LAST_TILE, VALUES_AT, PLACES_AT, BITS_AT, FORM, LIST_AT = map(constant, range(9))
"""Columns of the table of sections: k, slots, first and last tile, first payload byte of values, of low bits of places
and of the bit string, number of low bits per place, index of the first place in a rank's list.
"""


@dataclass(frozen=True)
class Layout:
    """Device layout of a bucket and its payload."""

    sections: Tensor
    tiles: Tiles
    slots: tuple[int, ...]
    """Maximum number of sent values, by segment."""
    has_counts: bool
    """True if a count precedes each section's values."""


@cache
def layout_of_largest(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    return _layout(segments, ratio, counts(segments, ratio), device, has_counts=False)


@cache
def layout_of_survivors(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    return _layout(segments, ratio, capacities(segments, ratio), device, has_counts=True)


def _layout(
    segments: tuple[int, ...], ratio: float, slots: tuple[int, ...], device: torch.device, *, has_counts: bool
) -> Layout:
    rows: list[tuple[int, ...]] = []
    end = list_at = 0
    tile_ends = [*accumulate((-(-size // TILE) for size in segments), initial=0)]
    for segment, (size, k, room) in enumerate(zip(segments, counts(segments, ratio), slots, strict=True)):
        form = form_of(size, room)
        values_at = end + 4 * (has_counts and room > 0)
        places_at = values_at + 4 * room
        bits_at = places_at + room * form // 8
        first_tile, last_tile = tile_ends[segment], tile_ends[segment + 1] - 1
        rows.append((k, room, first_tile, last_tile, values_at, places_at, bits_at, form, list_at))
        list_at += room
        end = places_at + -(-bytes_of(size, room) // 4) * 4
    sections = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 9)
    return Layout(sections, cut(segments, TILE, device), slots, has_counts)


_BIT_BYTES = 512  # bytes per program: 4096 bits, 32 per thread  # assumed
BYTES = constant(_BIT_BYTES)
CHUNK = constant(256)  # list entries added at once  # assumed
PIVOTS = constant(128)  # places compared at once in a list search

BIT_COLUMNS = constant(3)


def decode_survivors(compressor: Sidco, received: DecoderInput, out: Tensor) -> None:
    decode_sparse(received, out, layout_of_survivors(received.segments, compressor.ratio, out.device))


def decode_sparse(received: DecoderInput, out: Tensor, layout: Layout) -> None:
    ranks, all_slots, payload_bytes = received.ranks, sum(layout.slots), len(received.payloads) // received.ranks
    table, first_rows = _bit_strings(received.segments, layout.slots, out.device)
    counts = torch.empty(ranks, len(table), dtype=torch.int32, device=out.device)
    lists = torch.empty(ranks * all_slots, dtype=torch.int32, device=out.device)
    strings = (received.payloads, layout.sections, table, counts, payload_bytes)
    launch(_count_ones, len(table), *strings, rows=ranks)
    ends = counts.cumsum(dim=1)
    launch(_read_places, len(table), *strings, first_rows, ends, lists, all_slots, rows=ranks)
    arguments = (received.payloads.view(torch.float32), lists, out, layout.sections, payload_bytes // 4, all_slots)
    layout.tiles.launch(_decode, *arguments, HAS_COUNTS=layout.has_counts, RANKS=ranks)


@cache
def _bit_strings(segments: tuple[int, ...], slots: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Divide bit strings into parts of at most 512 bytes. Return a table and the index of each segment's first part.

    Table columns: segment, first byte, number of bytes.
    """
    rows: list[tuple[int, int, int]] = []
    first_rows: list[int] = []
    for segment, (n, room) in enumerate(zip(segments, slots, strict=True)):
        first_rows.append(len(rows))
        in_string = bytes_of(n, room) - room * form_of(n, room) // 8
        rows += [(segment, at, min(in_string - at, _BIT_BYTES)) for at in range(0, in_string, _BIT_BYTES)]
    table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 3)
    return table, torch.tensor(first_rows, device=device)


@jit
def _ones(payload, sections, table):
    """Return the bits of a part of a bit string, the segment, the section, and the first bit's index."""
    entry = table + tl.program_id(0).to(tl.int64) * BIT_COLUMNS
    segment = tl.load(entry)
    section = sections + segment * SECTION_COLUMNS
    first = tl.load(entry + 1)
    at = tl.arange(0, BYTES)
    is_there = at < tl.load(entry + 2)
    byte = tl.load(payload + tl.load(section + BITS_AT) + first + at, is_there, other=0).to(tl.int32)
    ones = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BYTES * 8])
    return ones, segment, section, 8 * first


@jit
def _count_ones(payloads, sections, table, counts, payload_bytes):
    rank = tl.program_id(1).to(tl.int64)
    ones, _, _, _ = _ones(payloads + rank * payload_bytes, sections, table)
    tl.store(counts + rank * tl.num_programs(0) + tl.program_id(0), tl.sum(ones, axis=0))


@jit
def _read_places(payloads, sections, table, counts, payload_bytes, first_rows, ends, lists, list_elements):
    rank = tl.program_id(1).to(tl.int64)
    payload = payloads + rank * payload_bytes
    ones, segment, section, first_bit = _ones(payload, sections, table)
    row = rank * tl.num_programs(0)
    this = row + tl.program_id(0)
    base = row + tl.load(first_rows + segment)
    before = tl.load(ends + this) - tl.load(counts + this) - (tl.load(ends + base) - tl.load(counts + base))
    number = before + tl.cumsum(ones, axis=0) - 1
    form = tl.load(section + FORM)
    bit = first_bit + tl.arange(0, BYTES * 8)
    is_one = (ones > 0) & (number < tl.load(section + SLOTS))
    low_at = payload + tl.load(section + PLACES_AT) + number * (form // 8)
    low = tl.load(low_at, is_one & (form > 0), other=0).to(tl.int64)
    low += tl.load(low_at + 1, is_one & (form > 8), other=0).to(tl.int64) << 8
    place = tl.where(form > 0, ((bit - number) << form) + low, bit)
    at = lists + rank * list_elements + tl.load(section + LIST_AT)
    tl.store(at + number, place.to(tl.int32), is_one)


@jit
def _first_from(places, length, bound):
    """Count the places below a bound in an ascending list, comparing 128 at once."""
    below = length * 0
    left = length
    while left > 0:
        step = (left + PIVOTS - 1) // PIVOTS
        last = below + (tl.arange(0, PIVOTS) + 1) * step - 1
        is_there = last < below + left
        is_below = is_there & (tl.load(places + last, is_there, other=0) < bound)
        parts = tl.sum(is_below.to(tl.int32), axis=0)
        left = tl.minimum(step - 1, left - parts * step)
        below += parts * step
    return below


@jit
def _decode(
    table,
    payloads,
    lists,
    out,
    sections,
    payload_words,
    list_elements,
    HAS_COUNTS: constexpr,
    RANKS: constexpr,
    SHAPE: constexpr,
):
    """Compute a tile's mean over ranks."""
    if lies_well(table, SHAPE):
        _decode_tile(
            table, payloads, lists, out, sections, payload_words, list_elements, SHAPE[4], HAS_COUNTS, RANKS, SHAPE
        )
    else:
        _decode_tile(
            table, payloads, lists, out, sections, payload_words, list_elements, SHAPE[3], HAS_COUNTS, RANKS, SHAPE
        )


@jit
def _decode_tile(
    table,
    payloads,
    lists,
    out,
    sections,
    payload_words,
    list_elements,
    ALIGNMENT: constexpr,
    HAS_COUNTS: constexpr,
    RANKS: constexpr,
    SHAPE: constexpr,
):
    TILE: constexpr = SHAPE[1]
    start, size, _, _ = tile_of(table, ALIGNMENT)
    segment, in_segment = segment_of(table)
    section = sections + segment * SECTION_COLUMNS
    slots = tl.load(section + SLOTS).to(tl.int32)
    values = payloads + tl.load(section + VALUES_AT) // 4
    places = lists + tl.load(section + LIST_AT)
    first = in_segment.to(tl.int32)
    number = tl.arange(0, TILE)
    tl.store(out + start + number, tl.zeros([TILE], tl.float32), number < size)
    for _ in range(RANKS):
        length = slots
        if HAS_COUNTS:
            length = tl.minimum(slots, tl.load((values - 1).to(tl.pointer_type(tl.int32))))
        begin = _first_from(places, length, first)
        end = _first_from(places, length, first + size)
        tl.debug_barrier()  # other threads wrote these values
        while begin < end:
            entry = begin + tl.arange(0, CHUNK)
            place = tl.load(places + entry, entry < end, other=-1) - first
            is_ours = (place >= 0) & (place < size)
            total = tl.load(out + start + place, is_ours, other=0.0)
            total += tl.load(values + entry, is_ours, other=0.0)
            tl.store(out + start + place, total, is_ours)
            begin += CHUNK
        values += payload_words
        places += list_elements
    if RANKS > 1:
        tl.debug_barrier()
        total = tl.load(out + start + number, number < size, other=0.0)
        tl.store(out + start + number, total * (1.0 / RANKS), number < size)
