"""Find and send the largest values of each segment, for topk, threshold, dgc and sidco; nothing waits for the device.

    cuts       a magnitude a segment, as bits, that what may be sent reaches
    gather     one pass over the bucket: the residual of what stays below, and a list of the rest, tile by tile
    decide     where more values reach the cut than may be sent, three digits of the last magnitude to send are found,
               11, 10 and 10 bits, each from a histogram of the lists alone
    count      what each tile sends; their sums tell where in the payload a tile begins
    scatter    values and places into the payload, and the residual of what was listed

Only `gather` touches memory for each value; the lists are as long as what reaches the cut. All decisions stay on the
device: every launch happens whatever the data, and returns at once where there is nothing to do.

A segment's decision is a magnitude and a number: sent is what is larger, and of what is equal the first so many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fxcomp.compressors.places import bytes_of, form_of
from fxcomp.compressors.triton.blocks import COLUMNS, INFINITY, compensated, cut
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl

TILE = 2048  # values of a program: 16 a thread of 4 warps  # assumed
BINS = 2048
_DIGITS = ((20, 31), (10, 20), (0, 10))  # the bits of a magnitude, and what lies above them

SEGMENT_COLUMNS = constant(10)
TALLY_COLUMNS = constant(3)
DECISION_COLUMNS = constant(4)


class Section(NamedTuple):
    """Where a segment lies, and what of it is sent."""

    size: int
    k: int
    slots: int
    """At most so many values are sent."""
    first_tile: int
    last_tile: int
    values_at: int
    """Byte of the payload."""
    places_at: int
    list_at: int
    """The element of the list of places that decoding reads."""
    form: int
    """Low bits of a place that are written down: see fxcomp/compressors/places.py."""
    bits_at: int
    """The byte where the bit string begins."""


@dataclass(frozen=True)
class Layout:
    """Of a bucket and its payload, on the device."""

    sections: Tensor
    tiles: Tensor
    has_counts: bool
    """The number of values comes before the values."""


def tiles_of(segments: tuple[int, ...], device: torch.device) -> Tensor:
    return cut(segments, TILE, 1, device).table


@cache
def first_and_last_tiles(segments: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The tiles of each segment."""
    ends = accumulate((-(-size // TILE) for size in segments), initial=0)
    return tuple((first, last - 1) for first, last in pairwise(ends))


@cache
def layout_of(
    segments: tuple[int, ...], ks: tuple[int, ...], slots: tuple[int, ...], device: torch.device, *, has_counts: bool
) -> Layout:
    """Sections of counts, if there are some, values and places, as topk.py and survivors.py say."""
    sections: list[Section] = []
    end = list_at = 0
    tiles = first_and_last_tiles(segments)
    for size, k, room, (first, last) in zip(segments, ks, slots, tiles, strict=True):
        values_at = end + 4 * (has_counts and room > 0)
        form, places_at = form_of(size, room), values_at + 4 * room
        bits_at = places_at + room * form // 8
        sections.append(Section(size, k, room, first, last, values_at, places_at, list_at, form, bits_at))
        list_at += room
        end = places_at + -(-bytes_of(size, room) // 4) * 4
    table = torch.tensor(sections, dtype=torch.int64, device=device).view(-1, 10)
    return Layout(table, tiles_of(segments, device), has_counts)


@jit
def tile_of(table: Value):
    """This program's first value, values, segment, and first value in the segment."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    return tl.load(entry), tl.load(entry + 1).to(tl.int32), tl.load(entry + 4), tl.load(entry + 5)


@jit
def magnitude_of(value: Value):
    """As bits, of the same order; what is not finite is largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# The largest of many: decisions are rows of (is it open, bits known so far, rank among what has these bits, a cut)


@jit
def pick(decisions: Value, histograms: Value, SHIFT: constexpr, BINS: constexpr):
    """The next digit of each open decision: the last bin, from the largest on, that holds the rank."""
    decision = decisions + tl.program_id(0) * DECISION_COLUMNS
    is_open = tl.load(decision) != 0
    known = tl.load(decision + 1)
    rank = tl.load(decision + 2)
    digit = tl.arange(0, BINS)
    found = tl.load(histograms + tl.program_id(0) * BINS + digit)
    up_to = tl.cumsum(found, axis=0)
    above = tl.sum(found, axis=0) - up_to
    is_it = (above < rank) & (rank <= above + found)
    tl.store(decision + 1, known | (tl.sum(tl.where(is_it, digit, 0), axis=0) << SHIFT), is_open)
    tl.store(decision + 2, rank - tl.sum(tl.where(is_it, above, 0), axis=0), is_open)


@jit
def _add_to_histogram(
    histograms: Value,
    which: Value,
    magnitude: Value,
    is_there: Value,
    known: Value,
    SHIFT: constexpr,
    ABOVE: constexpr,
    BINS: constexpr,
):
    """Count the digits of magnitudes that begin with what is known."""
    is_ours = is_there & ((magnitude >> ABOVE) == (known >> ABOVE))
    digit = (magnitude >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
    found = tl.histogram(tl.where(is_ours, digit, 0), BINS, mask=is_ours)
    tl.atomic_add(histograms + which * BINS + tl.arange(0, BINS), found, mask=found > 0)


@jit
def _histogram_of_samples(
    sample: Value,
    decisions: Value,
    histograms: Value,
    table: Value,
    tiles: Value,
    segments: Value,
    SHIFT: constexpr,
    ABOVE: constexpr,
    BINS: constexpr,
    TILE: constexpr,
):
    """Of magnitudes that lie one behind the other; -1 stands for none. Programs go over the table for each rank."""
    entry = table + (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS
    which = tl.load(entry + 4) + (tl.program_id(0) // tiles) * segments
    decision = decisions + which * DECISION_COLUMNS
    size = tl.load(entry + 1) * (tl.load(decision) != 0).to(tl.int64)
    place = tl.arange(0, TILE)
    magnitude = tl.load(sample + tl.load(entry) + place, place < size, other=-1)
    _add_to_histogram(histograms, which, magnitude, magnitude >= 0, tl.load(decision + 1), SHIFT, ABOVE, BINS)


def settle(sample: Tensor, decisions: Tensor, table: Tensor, segments: int) -> None:
    """Find the magnitude of each open decision's rank; there may be several rows for each segment."""
    for shift, above in _DIGITS:
        histograms = torch.zeros(len(decisions), BINS, dtype=torch.int32, device=sample.device)
        programs = len(table) * (len(decisions) // max(segments, 1))
        constants = {"SHIFT": shift, "ABOVE": above, "BINS": BINS, "TILE": TILE}
        arguments = (sample, decisions, histograms, table, len(table), segments)
        launch(_histogram_of_samples, programs, *arguments, **constants)
        launch(pick, len(decisions), decisions, histograms, SHIFT=shift, BINS=BINS)


# The pass over the bucket


@jit
def _gather(
    bucket: Value,
    residual: Value,
    table: Value,
    cuts: Value,
    segments: Value,
    listed: Value,
    lengths: Value,
    tally: Value,
    TILE: constexpr,
):
    """List what reaches the lower cut; count a segment's values at both cuts, and what is not finite."""
    start, size, segment, _ = tile_of(table)
    place = tl.arange(0, TILE)
    is_there = place < size
    value, old = compensated(bucket, residual, start + place, is_there)
    magnitude = magnitude_of(value)
    is_listed = is_there & (magnitude >= tl.load(cuts + segments + segment))
    number = tl.cumsum(is_listed.to(tl.int32), axis=0)
    at = listed + tl.program_id(0).to(tl.int64) * TILE
    tl.store(at + number - 1, place.to(tl.int16), is_listed)
    length = tl.sum(is_listed.to(tl.int32), axis=0)
    tl.store(lengths + tl.program_id(0), length)
    reached = is_there & (magnitude >= tl.load(cuts + segment))
    counter = tally + segment * TALLY_COLUMNS
    tl.atomic_add(counter, tl.sum(reached.to(tl.int32), axis=0))
    tl.atomic_add(counter + 1, length)
    tl.atomic_add(counter + 2, tl.sum((magnitude >= INFINITY).to(tl.int32), axis=0))
    if residual is not None:
        left_out = tl.where(magnitude < INFINITY, value, old)
        tl.store(residual + start + place, left_out, is_there & (is_listed == 0))


@jit
def _open(sections: Value, cuts: Value, segments: Value, tally: Value, decisions: Value):
    """The higher cut, or the lower one where too few reach it; open where too many do."""
    segment = tl.program_id(0)
    section = sections + segment * SEGMENT_COLUMNS
    k = tl.load(section + 1)
    slots = tl.load(section + 2).to(tl.int32)
    reached = tl.load(tally + segment * TALLY_COLUMNS)
    is_few = 2 * reached < k
    reached = tl.where(is_few, tl.load(tally + segment * TALLY_COLUMNS + 1), reached)
    lowest = tl.where(is_few, tl.load(cuts + segments + segment), tl.load(cuts + segment))
    is_open = reached > slots
    decision = decisions + segment * DECISION_COLUMNS
    tl.store(decision, is_open.to(tl.int32))
    tl.store(decision + 1, tl.where(is_open, 0, lowest - 1))  # sent is what is larger
    tl.store(decision + 2, tl.where(is_open, slots, 0))
    tl.store(decision + 3, lowest)


@jit
def _listed_magnitudes(bucket: Value, residual: Value, start: Value, listed: Value, length: Value, TILE: constexpr):
    """A tile's list: places in the tile, values, the old residuals, magnitudes, and which there are."""
    number = tl.arange(0, TILE)
    is_there = number < length
    at = listed + tl.program_id(0).to(tl.int64) * TILE
    place = tl.load(at + number, is_there, other=0).to(tl.int32)
    value, _ = compensated(bucket, residual, start + place, is_there)
    return place, value, magnitude_of(value), is_there


@jit
def _histogram_of_lists(
    bucket: Value,
    residual: Value,
    table: Value,
    listed: Value,
    lengths: Value,
    decisions: Value,
    histograms: Value,
    SHIFT: constexpr,
    ABOVE: constexpr,
    BINS: constexpr,
    TILE: constexpr,
):
    start, _, segment, _ = tile_of(table)
    decision = decisions + segment * DECISION_COLUMNS
    length = tl.load(lengths + tl.program_id(0)) * (tl.load(decision) != 0).to(tl.int32)
    _, _, magnitude, is_there = _listed_magnitudes(bucket, residual, start, listed, length, TILE)
    known = tl.load(decision + 1)
    _add_to_histogram(histograms, segment, magnitude, is_there, known, SHIFT, ABOVE, BINS)


@jit
def _count(
    bucket: Value,
    residual: Value,
    table: Value,
    listed: Value,
    lengths: Value,
    decisions: Value,
    counts: Value,
    tiles: Value,
    TILE: constexpr,
):
    """How many of a tile are larger than the decision's magnitude, and how many as large."""
    start, _, segment, _ = tile_of(table)
    length = tl.load(lengths + tl.program_id(0))
    _, _, magnitude, is_there = _listed_magnitudes(bucket, residual, start, listed, length, TILE)
    last = tl.load(decisions + segment * DECISION_COLUMNS + 1)
    is_larger = is_there & (magnitude > last)
    is_equal = is_there & (magnitude == last)
    tl.store(counts + tl.program_id(0), tl.sum(is_larger.to(tl.int32), axis=0))
    tl.store(counts + tiles + tl.program_id(0), tl.sum(is_equal.to(tl.int32), axis=0))


@jit
def _or_bits(payload: Value, bit: Value, bits: Value, is_there: Value):
    """Set bits of a payload that was cleared; others may set theirs in the same word."""
    at = payload.to(tl.pointer_type(tl.int32)) + (bit >> 5)
    tl.atomic_or(at, bits << (bit & 31).to(tl.int32), mask=is_there)


@jit
def _scatter(
    bucket: Value,
    residual: Value,
    payload: Value,
    table: Value,
    sections: Value,
    listed: Value,
    lengths: Value,
    decisions: Value,
    counts: Value,
    ends: Value,
    tiles: Value,
    HAS_COUNTS: constexpr,
    TILE: constexpr,
):
    start, _, segment, in_segment = tile_of(table)
    section = sections + segment * SEGMENT_COLUMNS
    decision = decisions + segment * DECISION_COLUMNS
    last = tl.load(decision + 1)
    equals = tl.load(decision + 2).to(tl.int64)  # so many of what equals `last` are sent
    tile = tl.program_id(0)
    first_tile = tl.load(section + 3)
    larger_base = tl.load(ends + first_tile) - tl.load(counts + first_tile)
    equal_base = tl.load(ends + tiles + first_tile) - tl.load(counts + tiles + first_tile)
    larger_before = tl.load(ends + tile) - tl.load(counts + tile) - larger_base
    equal_before = tl.load(ends + tiles + tile) - tl.load(counts + tiles + tile) - equal_base

    length = tl.load(lengths + tile)
    place, value, magnitude, is_there = _listed_magnitudes(bucket, residual, start, listed, length, TILE)
    is_equal = is_there & (magnitude == last)
    rank = equal_before + tl.cumsum(is_equal.to(tl.int32), axis=0)  # from 1 on
    is_sent = is_there & ((magnitude > last) | (is_equal & (rank <= equals)))
    sent = tl.cumsum(is_sent.to(tl.int32), axis=0) - 1
    number = larger_before + tl.minimum(equal_before, equals) + sent

    values_at = tl.load(section + 5)
    words = payload.to(tl.pointer_type(tl.int32))
    tl.store(words + values_at // 4 + number, value.to(tl.int32, bitcast=True), is_sent)
    in_segment += place
    places_at = tl.load(section + 6)
    form = tl.load(section + 8)
    low = (in_segment & ((1 << form) - 1)).to(tl.int32)
    _or_bits(payload, 8 * places_at + number * form, low, is_sent & (form > 0))
    bit = tl.where(form > 0, (in_segment >> form) + number, in_segment)
    _or_bits(payload, 8 * tl.load(section + 9) + bit, tl.full([TILE], 1, tl.int32), is_sent)
    if HAS_COUNTS:
        last_tile = tl.load(section + 4)
        larger = tl.load(ends + last_tile) - larger_base
        equal = tl.load(ends + tiles + last_tile) - equal_base
        count = larger + tl.minimum(equal, equals)
        tl.store(words + values_at // 4 - 1, count.to(tl.int32), tile == first_tile)
    if residual is not None:
        left_out = tl.where(is_sent, 0.0, value)
        tl.store(residual + start + place, left_out, is_there & (magnitude < INFINITY))


def send(bucket: Tensor, residual: Tensor | None, payload: Tensor, layout: Layout, cuts: Tensor) -> Tensor:
    """Fill the payload with what reaches the cuts, two rows of one a segment; return what was counted.

    The second cut, not above the first, holds where fewer than k / 2 values reach the first.
    """
    device, tiles, segments = bucket.device, len(layout.tiles), len(layout.sections)
    listed = torch.empty(tiles * TILE, dtype=torch.int16, device=device)
    lengths = torch.empty(tiles, dtype=torch.int32, device=device)
    tally = torch.zeros(segments, 3, dtype=torch.int32, device=device)
    decisions = torch.empty(segments, 4, dtype=torch.int32, device=device)
    payload.zero_()
    launch(_gather, tiles, bucket, residual, layout.tiles, cuts, segments, listed, lengths, tally, TILE=TILE)
    launch(_open, segments, layout.sections, cuts, segments, tally, decisions)
    values = (bucket, residual, layout.tiles, listed, lengths, decisions)
    for shift, above in _DIGITS:
        histograms = torch.zeros(segments, BINS, dtype=torch.int32, device=device)
        launch(_histogram_of_lists, tiles, *values, histograms, SHIFT=shift, ABOVE=above, BINS=BINS, TILE=TILE)
        launch(pick, segments, decisions, histograms, SHIFT=shift, BINS=BINS)
    counts = torch.empty(2, tiles, dtype=torch.int32, device=device)
    launch(_count, tiles, *values, counts, tiles, TILE=TILE)
    ends = counts.cumsum(dim=1)
    places = (layout.sections, listed, lengths, decisions, counts, ends, tiles)
    arguments = (bucket, residual, payload, layout.tiles, *places)
    launch(_scatter, tiles, *arguments, HAS_COUNTS=layout.has_counts, TILE=TILE)
    return tally
