"""Send the largest values of each segment, for topk and sidco; nothing waits for the device.

    cuts       a magnitude a segment, as bits, that what may be sent reaches
    gather     one pass over the bucket: the residual of what stays below, and a list of the rest, tile by tile
    decide     where more values reach the cut than may be sent, the last magnitude to send is found: three digits of
               it, 11, 10 and 10 bits, each from a histogram of the listed magnitudes that begin with those known so far
    count      what each tile sends; their sums tell where in the payload a tile begins
    scatter    values and places into the payload, and the residual of what was listed

Only `gather` touches memory for each value; the lists are as long as what reaches the cut. All decisions stay on the
device: every launch happens whatever the data, and returns at once where there is nothing to do. A segment's decision
is a magnitude and a number: sent is what is larger, and of what is equal the first so many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.inputs import EncoderInput
from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.sparse import (
    BITS_AT,
    FIRST_TILE,
    FORM,
    LAST_TILE,
    PLACES_AT,
    SECTION_COLUMNS,
    SLOTS,
    VALUES_AT,
    K,
    Layout,
)
from fxcomp.compressors.triton.tiles import INFINITY, TILE, Tiles, compensated, magnitude_of, segment_of, tile_of

BINS = 2048
DIGITS = ((20, 31), (10, 20), (0, 10))  # the bits of a magnitude, and what lies above them
COPIES = 8  # of a histogram while there are few: most values fall in few bins, and additions to one bin wait  # assumed
DECISION_COLUMNS = constant(3)


def copies_of(segments: int) -> int:
    return COPIES if segments <= COPIES else 1


@jit
def pick(decisions, histograms, SHIFT: constexpr, BINS: constexpr, COPIES: constexpr):
    """Append the next digit to an open decision: the last bin, from the largest on, that holds the rank."""
    decision = decisions + tl.program_id(0) * DECISION_COLUMNS
    is_open = tl.load(decision) != 0
    known = tl.load(decision + 1)
    rank = tl.load(decision + 2)
    digit = tl.arange(0, BINS)
    found = tl.zeros([BINS], tl.int32)
    for copy in range(COPIES):
        found += tl.load(histograms + (tl.program_id(0) * COPIES + copy) * BINS + digit)
    up_to = tl.cumsum(found, axis=0)
    above = tl.sum(found, axis=0) - up_to
    is_it = (above < rank) & (rank <= above + found)
    tl.store(decision + 1, known | (tl.sum(tl.where(is_it, digit, 0), axis=0) << SHIFT), is_open)
    tl.store(decision + 2, rank - tl.sum(tl.where(is_it, above, 0), axis=0), is_open)


@jit
def add_to_histogram(histogram, magnitude, is_there, known, SHIFT: constexpr, ABOVE: constexpr):
    """Count the next digits of magnitudes that begin with the known digits, value by value: there are few."""
    is_ours = is_there & ((magnitude >> ABOVE) == (known >> ABOVE))
    digit = (magnitude >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
    tl.atomic_add(histogram + digit, 1, mask=is_ours, sem="relaxed")


@jit
def _digit_histogram(
    table,
    sample,
    decisions,
    histograms,
    segments,
    SHIFT: constexpr,
    ABOVE: constexpr,
    BINS: constexpr,
    SHAPE: constexpr,
):
    """Of a tile of a sample's magnitudes, -1 where there is none, for one of the decisions on its segment."""
    TILE: constexpr = SHAPE[1]
    start, size, _, _ = tile_of(table, SHAPE)
    segment, _ = segment_of(table)
    which = segment + tl.program_id(1) * segments
    decision = decisions + which * DECISION_COLUMNS
    place = tl.arange(0, TILE)
    is_there = (place < size) & (tl.load(decision) != 0)
    magnitude = tl.load(sample + start + place, is_there, other=-1)
    add_to_histogram(histograms + which * BINS, magnitude, magnitude >= 0, tl.load(decision + 1), SHIFT, ABOVE)


def settle(sample: Tensor, decisions: Tensor, tiles: Tiles, segments: int) -> None:
    """Find the magnitude of each open decision; there may be several rows of one a segment."""
    for shift, above in DIGITS:
        histograms = torch.zeros(len(decisions), BINS, dtype=torch.int32, device=sample.device)
        constants = {"SHIFT": shift, "ABOVE": above, "BINS": BINS}
        rows = len(decisions) // max(segments, 1)
        tiles.launch(_digit_histogram, sample, decisions, histograms, segments, rows=rows, **constants)
        launch(pick, len(decisions), decisions, histograms, SHIFT=shift, BINS=BINS, COPIES=1)


TALLY_COLUMNS = constant(3)


def send(given: EncoderInput, payload: Tensor, layout: Layout, cuts: Tensor) -> Tensor:
    """Fill the payload with what reaches the cuts, two rows of one a segment; return what was counted.

    The second cut, not above the first, holds where fewer than k / 2 values reach the first.
    """
    device, tiles, count, segments = given.bucket.device, layout.tiles, len(layout.tiles), len(layout.sections)
    listed = torch.empty(count * TILE, dtype=torch.int16, device=device)
    lengths = torch.empty(count, dtype=torch.int32, device=device)
    tally = torch.zeros(segments, 3, dtype=torch.int32, device=device)
    decisions = torch.empty(segments, 3, dtype=torch.int32, device=device)
    payload.zero_()
    tiles.launch(_gather, given.bucket, given.residual, cuts, segments, listed, lengths, tally)
    launch(_open, segments, layout.sections, cuts, segments, tally, decisions)
    lists = (given.bucket, given.residual, listed, lengths, decisions)
    copies = copies_of(segments)
    for shift, above in DIGITS:
        histograms = torch.zeros(segments * copies, BINS, dtype=torch.int32, device=device)
        constants = {"SHIFT": shift, "BINS": BINS, "COPIES": copies}
        tiles.launch(_histogram, *lists, histograms, ABOVE=above, **constants)
        launch(pick, segments, decisions, histograms, **constants)
    counts = torch.empty(2, count, dtype=torch.int32, device=device)
    tiles.launch(_count, *lists, counts, count)
    places = (payload, layout.sections, counts, counts.cumsum(dim=1), count)
    tiles.launch(_scatter, *lists, *places, HAS_COUNTS=layout.has_counts)
    return tally


@jit
def _gather(table, bucket, residual, cuts, segments, listed, lengths, tally, SHAPE: constexpr):
    """List what reaches the lower cut; count a segment's values at both cuts, and what is not finite."""
    TILE: constexpr = SHAPE[1]
    start, size, _, _ = tile_of(table, SHAPE)
    segment, _ = segment_of(table)
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
    is_reached = is_there & (magnitude >= tl.load(cuts + segment))
    counter = tally + segment * TALLY_COLUMNS
    reached = tl.sum(is_reached.to(tl.int32), axis=0)
    infinite = tl.sum((magnitude >= INFINITY).to(tl.int32), axis=0)
    tl.atomic_add(counter, reached, mask=reached > 0, sem="relaxed")
    tl.atomic_add(counter + 1, length, mask=length > 0, sem="relaxed")
    tl.atomic_add(counter + 2, infinite, mask=infinite > 0, sem="relaxed")
    if residual is not None:
        left_out = tl.where(magnitude < INFINITY, value, old)
        tl.store(residual + start + place, left_out, is_there & (is_listed == 0))


@jit
def _open(sections, cuts, segments, tally, decisions):
    """Take the higher cut, or the lower one where too few reach it; open a decision where too many do."""
    segment = tl.program_id(0)
    section = sections + segment * SECTION_COLUMNS
    slots = tl.load(section + SLOTS).to(tl.int32)
    reached = tl.load(tally + segment * TALLY_COLUMNS)
    is_few = 2 * reached < tl.load(section + K)
    reached = tl.where(is_few, tl.load(tally + segment * TALLY_COLUMNS + 1), reached)
    lowest = tl.where(is_few, tl.load(cuts + segments + segment), tl.load(cuts + segment))
    is_open = reached > slots
    decision = decisions + segment * DECISION_COLUMNS
    tl.store(decision, is_open.to(tl.int32))
    tl.store(decision + 1, tl.where(is_open, 0, lowest - 1))  # sent is what is larger
    tl.store(decision + 2, tl.where(is_open, slots, 0))


@jit
def _read_list(bucket, residual, listed, length, start, TILE: constexpr):
    """Return a tile's list: places in the tile, values, magnitudes, and which there are."""
    number = tl.arange(0, TILE)
    is_there = number < length
    place = tl.load(listed + tl.program_id(0).to(tl.int64) * TILE + number, is_there, other=0).to(tl.int32)
    value, _ = compensated(bucket, residual, start + place, is_there)
    return place, value, magnitude_of(value), is_there


@jit
def _histogram(
    table,
    bucket,
    residual,
    listed,
    lengths,
    decisions,
    histograms,
    SHIFT: constexpr,
    ABOVE: constexpr,
    BINS: constexpr,
    COPIES: constexpr,
    SHAPE: constexpr,
):
    start, _, _, _ = tile_of(table, SHAPE)
    segment, _ = segment_of(table)
    decision = decisions + segment * DECISION_COLUMNS
    length = tl.load(lengths + tl.program_id(0)) * (tl.load(decision) != 0).to(tl.int32)
    _, _, magnitude, is_there = _read_list(bucket, residual, listed, length, start, SHAPE[1])
    histogram = histograms + (segment * COPIES + tl.program_id(0) % COPIES) * BINS
    add_to_histogram(histogram, magnitude, is_there, tl.load(decision + 1), SHIFT, ABOVE)


@jit
def _count(table, bucket, residual, listed, lengths, decisions, counts, tiles, SHAPE: constexpr):
    """Count what of a tile is larger than the decision's magnitude, and what is equal."""
    start, _, _, _ = tile_of(table, SHAPE)
    segment, _ = segment_of(table)
    length = tl.load(lengths + tl.program_id(0))
    _, _, magnitude, is_there = _read_list(bucket, residual, listed, length, start, SHAPE[1])
    last = tl.load(decisions + segment * DECISION_COLUMNS + 1)
    is_larger = is_there & (magnitude > last)
    is_equal = is_there & (magnitude == last)
    tl.store(counts + tl.program_id(0), tl.sum(is_larger.to(tl.int32), axis=0))
    tl.store(counts + tiles + tl.program_id(0), tl.sum(is_equal.to(tl.int32), axis=0))


@jit
def _scatter(
    table,
    bucket,
    residual,
    listed,
    lengths,
    decisions,
    payload,
    sections,
    counts,
    ends,
    tiles,
    HAS_COUNTS: constexpr,
    SHAPE: constexpr,
):
    start, _, _, _ = tile_of(table, SHAPE)
    segment, in_segment = segment_of(table)
    section = sections + segment * SECTION_COLUMNS
    decision = decisions + segment * DECISION_COLUMNS
    last = tl.load(decision + 1)
    equals = tl.load(decision + 2).to(tl.int64)  # so many of what equals `last` are sent
    tile = tl.program_id(0)
    first_tile = tl.load(section + FIRST_TILE)
    larger_base = _before(counts, ends, first_tile)
    equal_base = _before(counts + tiles, ends + tiles, first_tile)
    equal_before = _before(counts + tiles, ends + tiles, tile) - equal_base

    length = tl.load(lengths + tile)
    place, value, magnitude, is_there = _read_list(bucket, residual, listed, length, start, SHAPE[1])
    is_equal = is_there & (magnitude == last)
    rank = equal_before + tl.cumsum(is_equal.to(tl.int32), axis=0)  # from 1 on
    is_sent = is_there & ((magnitude > last) | (is_equal & (rank <= equals)))
    sent_before = _before(counts, ends, tile) - larger_base + tl.minimum(equal_before, equals)
    number = sent_before + tl.cumsum(is_sent.to(tl.int32), axis=0) - 1

    words = payload.to(tl.pointer_type(tl.int32))
    values = words + tl.load(section + VALUES_AT) // 4
    tl.store(values + number, value.to(tl.int32, bitcast=True), is_sent)
    in_segment += place
    form = tl.load(section + FORM)
    low = (in_segment & ((1 << form) - 1)).to(tl.int32)
    _or_bits(words, 8 * tl.load(section + PLACES_AT) + number * form, low, is_sent & (form > 0))
    bit = tl.where(form > 0, (in_segment >> form) + number, in_segment)
    _or_bits(words, 8 * tl.load(section + BITS_AT) + bit, tl.full([SHAPE[1]], 1, tl.int32), is_sent)
    if HAS_COUNTS:
        last_tile = tl.load(section + LAST_TILE)
        larger = tl.load(ends + last_tile) - larger_base
        equal = tl.load(ends + tiles + last_tile) - equal_base
        tl.store(values - 1, (larger + tl.minimum(equal, equals)).to(tl.int32), tile == first_tile)
    if residual is not None:
        left_out = tl.where(is_sent, 0.0, value)
        tl.store(residual + start + place, left_out, is_there & (magnitude < INFINITY))


@jit
def _before(counts, ends, tile):
    """Return the sum of all counts before a tile's."""
    return tl.load(ends + tile) - tl.load(counts + tile)


@jit
def _or_bits(words, bit, bits, is_there):
    """Set bits of a payload that was cleared; others may set theirs in the same word."""
    tl.atomic_or(words + (bit >> 5), bits << (bit & 31).to(tl.int32), mask=is_there, sem="relaxed")
