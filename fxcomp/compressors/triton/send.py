"""Send the largest values of each segment, for topk and sidco, without synchronising with the device.

    cuts       a magnitude for each segment, as bits: smaller values are not sent
    gather     one pass over the bucket: the residual, as if nothing were sent, and for each tile a list of the values
               that reach the cut, with their indices in the tile
    decide     if too many reach the cut, the smallest magnitude to send: digits of 11, 10 and 10 bits, each from a
               histogram of the listed magnitudes with the known leading digits
    count      the number of values that each tile sends, which locates the tile in the payload
    scatter    write values and places (indices in the segment) into the payload, and clear their residual

Only `gather` reads every value; then a warp reads each tile's list. The launches do not depend on the data. A decision
is a magnitude and a count: larger values are sent, and `count` values of equal magnitude, in ascending place. An open
decision has a rank, whose magnitude is found digit by digit.
"""

from __future__ import annotations

from dataclasses import replace

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
from fxcomp.compressors.triton.tiles import (
    INFINITY,
    TILE,
    Tiles,
    compensated,
    lies_well,
    magnitude_of,
    segment_of,
    tile_of,
)

BIN_COUNT = 2048
BINS = constant(BIN_COUNT)
DIGITS = ((20, 31), (10, 20), (0, 10))  # lowest bit and end of each digit of a magnitude
COPIES = 8  # histograms per segment if segments are few, because additions to one bin are serialised  # assumed
PART = constant(128)  # list entries read at once: 4 per thread of a warp  # assumed
NEAR = constant(64)  # leading digits counted locally: 8 octaves
DECISION_COLUMNS = constant(3)  # is open; magnitude; count, or rank if open


@jit
def pick(decisions, histograms, SHIFT: constexpr, COPIES: constexpr):
    """Append a digit to an open decision: the histogram bin of the magnitude with the decision's rank."""
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
    """Count the next digit of each magnitude whose leading digits are `known`."""
    is_ours = is_there & ((magnitude >> ABOVE) == (known >> ABOVE))
    digit = (magnitude >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
    tl.atomic_add(histogram + digit, 1, mask=is_ours, sem="relaxed")


@jit
def add_leading_digits(histogram, magnitude, is_there, SHIFT: constexpr):
    """Count leading digits, most in a local histogram, because global additions to one bin are serialised."""
    digit = magnitude >> SHIFT
    lowest = tl.min(tl.where(is_there, digit, BINS - 1), axis=0)
    is_near = is_there & (digit - lowest < NEAR)
    found = tl.histogram(digit - lowest, NEAR, mask=is_near)
    tl.atomic_add(histogram + lowest + tl.arange(0, NEAR), found, mask=found > 0, sem="relaxed")
    tl.atomic_add(histogram + digit, 1, mask=is_there & (is_near == 0), sem="relaxed")


@jit
def _digit_histogram(
    table, sample, decisions, histograms, segments, SHIFT: constexpr, ABOVE: constexpr, SHAPE: constexpr
):
    """Count the next digits of a sample's tile, for one of the segment's decisions; -1 is padding."""
    TILE: constexpr = SHAPE[1]
    start, size, _, _ = tile_of(table, SHAPE[3])
    segment, _ = segment_of(table)
    which = segment + tl.program_id(1) * segments
    decision = decisions + which * DECISION_COLUMNS
    place = tl.arange(0, TILE)
    is_there = (place < size) & (tl.load(decision) != 0)
    magnitude = tl.load(sample + start + place, is_there, other=-1)
    add_to_histogram(histograms + which * BINS, magnitude, magnitude >= 0, tl.load(decision + 1), SHIFT, ABOVE)


def settle(sample: Tensor, decisions: Tensor, tiles: Tiles, segments: int) -> None:
    """Compute the magnitude of each open decision from `sample`. A segment may have several decisions."""
    for shift, above in DIGITS:
        histograms = torch.zeros(len(decisions), BIN_COUNT, dtype=torch.int32, device=sample.device)
        rows = len(decisions) // max(segments, 1)
        arguments = (sample, decisions, histograms, segments)
        tiles.launch(_digit_histogram, *arguments, rows=rows, SHIFT=shift, ABOVE=above)
        launch(pick, len(decisions), decisions, histograms, SHIFT=shift, COPIES=1)


TALLY_COLUMNS = constant(3)  # numbers of values: at or above the first cut, at or above the second, not finite


def send(given: EncoderInput, payload: Tensor, layout: Layout, cuts: Tensor) -> Tensor:
    """Fill the payload with the values that reach each segment's cut.

    `cuts` has shape (2, segments). The second, lower cut applies if fewer than k / 2 values reach the first. Return the
    tally, shape (segments, 3): numbers of values that reach the first cut, that reach the second, that are not finite.
    """
    device, tiles, count, segments = given.bucket.device, layout.tiles, len(layout.tiles), len(layout.sections)
    places = torch.empty(count * TILE, dtype=torch.int16, device=device)
    values = torch.empty(count * TILE, dtype=torch.float32, device=device)
    lengths = torch.empty(count, dtype=torch.int32, device=device)
    tally = torch.zeros(segments, 3, dtype=torch.int32, device=device)
    decisions = torch.empty(segments, 3, dtype=torch.int32, device=device)
    payload.zero_()
    tiles.launch(_gather, given.bucket, given.residual, cuts, segments, places, values, lengths, tally)
    launch(_open, segments, layout.sections, cuts, segments, tally, decisions)
    lists = replace(tiles, warps=1)
    copies = COPIES if segments <= COPIES else 1
    for shift, above in DIGITS:
        histograms = torch.zeros(segments * copies, BIN_COUNT, dtype=torch.int32, device=device)
        constants = {"SHIFT": shift, "COPIES": copies}
        lists.launch(_histogram, values, lengths, decisions, histograms, ABOVE=above, **constants)
        launch(pick, segments, decisions, histograms, **constants)
    counts = torch.empty(2, count, dtype=torch.int32, device=device)
    lists.launch(_count, values, lengths, decisions, counts, count)
    ends = counts.flatten().cumsum(dim=0, dtype=torch.int32)  # a cumsum by row would use one block
    sums = (layout.sections, counts, ends, count)
    arguments = (places, values, lengths, decisions, payload, given.residual, *sums)
    lists.launch(_scatter, *arguments, HAS_COUNTS=layout.has_counts)
    return tally


@jit
def _gather(table, bucket, residual, cuts, segments, places, values, lengths, tally, SHAPE: constexpr):
    if lies_well(table, SHAPE):
        _gather_tile(table, bucket, residual, cuts, segments, places, values, lengths, tally, SHAPE[4], SHAPE)
    else:
        _gather_tile(table, bucket, residual, cuts, segments, places, values, lengths, tally, SHAPE[3], SHAPE)


@jit
def _gather_tile(
    table, bucket, residual, cuts, segments, places, values, lengths, tally, ALIGNMENT: constexpr, SHAPE: constexpr
):
    TILE: constexpr = SHAPE[1]
    start, size, _, _ = tile_of(table, ALIGNMENT)
    segment, _ = segment_of(table)
    place = tl.arange(0, TILE)
    is_there = place < size
    value, old = compensated(bucket, residual, start + place, is_there)
    magnitude = magnitude_of(value)
    is_listed = is_there & (magnitude >= tl.load(cuts + segments + segment))
    number = tl.cumsum(is_listed.to(tl.int32), axis=0)
    at = tl.program_id(0).to(tl.int64) * TILE
    tl.store(places + at + number - 1, place.to(tl.int16), is_listed)
    tl.store(values + at + number - 1, value, is_listed)
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
        tl.store(residual + start + place, left_out, is_there)


@jit
def _open(sections, cuts, segments, tally, decisions):
    """Choose the first or the lower cut of a segment. If more values reach it than fit, open the segment's decision."""
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
    tl.store(decision + 1, tl.where(is_open, 0, lowest - 1))  # larger values are sent
    tl.store(decision + 2, tl.where(is_open, slots, 0))


@jit
def _histogram(
    table,
    values,
    lengths,
    decisions,
    histograms,
    SHIFT: constexpr,
    ABOVE: constexpr,
    COPIES: constexpr,
    SHAPE: constexpr,
):
    segment, _ = segment_of(table)
    decision = decisions + segment * DECISION_COLUMNS
    length = tl.load(lengths + tl.program_id(0)) * (tl.load(decision) != 0).to(tl.int32)
    known = tl.load(decision + 1)
    histogram = histograms + (segment * COPIES + tl.program_id(0) % COPIES) * BINS
    first = length * 0
    while first < length:
        value, is_there = _read_values(values, first, length, SHAPE[1])
        magnitude = magnitude_of(value)
        if ABOVE == 31:
            add_leading_digits(histogram, magnitude, is_there, SHIFT)
        else:
            add_to_histogram(histogram, magnitude, is_there, known, SHIFT, ABOVE)
        first += PART


@jit
def _read_values(values, first, length, TILE: constexpr):
    number = first + tl.arange(0, PART)
    is_there = number < length
    return tl.load(values + tl.program_id(0).to(tl.int64) * TILE + number, is_there, other=0.0), is_there


@jit
def _count(table, values, lengths, decisions, counts, tiles, SHAPE: constexpr):
    segment, _ = segment_of(table)
    length = tl.load(lengths + tl.program_id(0))
    last = tl.load(decisions + segment * DECISION_COLUMNS + 1)
    larger = length * 0
    equal = length * 0
    first = length * 0
    while first < length:
        value, is_there = _read_values(values, first, length, SHAPE[1])
        magnitude = magnitude_of(value)
        larger += tl.sum((is_there & (magnitude > last)).to(tl.int32), axis=0)
        equal += tl.sum((is_there & (magnitude == last)).to(tl.int32), axis=0)
        first += PART
    tl.store(counts + tl.program_id(0), larger)
    tl.store(counts + tiles + tl.program_id(0), equal)


@jit
def _scatter(
    table,
    places,
    values,
    lengths,
    decisions,
    payload,
    residual,
    sections,
    counts,
    ends,
    tiles,
    HAS_COUNTS: constexpr,
    SHAPE: constexpr,
):
    start, _, _, _ = tile_of(table, SHAPE[3])
    segment, in_segment = segment_of(table)
    section = sections + segment * SECTION_COLUMNS
    decision = decisions + segment * DECISION_COLUMNS
    tile = tl.program_id(0)
    length = tl.load(lengths + tile)
    last = tl.load(decision + 1)
    equals = tl.load(decision + 2)  # number of values equal to `last` that are sent
    first_tile = tl.load(section + FIRST_TILE)
    form = tl.load(section + FORM)
    low_at = tl.load(section + PLACES_AT)
    bits_at = 8 * tl.load(section + BITS_AT)
    edge = bits_at // 32 * 4  # from here on, low bits share a word with the bit string
    words = payload.to(tl.pointer_type(tl.int32))
    sent_at = words + tl.load(section + VALUES_AT) // 4
    larger_base = _before(counts, ends, first_tile)
    equal_base = _before(counts + tiles, ends + tiles, first_tile)
    equal_before = _before(counts + tiles, ends + tiles, tile) - equal_base
    sent_before = _before(counts, ends, tile) - larger_base + tl.minimum(equal_before, equals)
    if HAS_COUNTS:  # noqa: SIM102  Triton compiles it away
        if tile == first_tile:
            last_tile = tl.load(section + LAST_TILE)
            larger = tl.load(ends + last_tile) - larger_base
            equal = tl.load(ends + tiles + last_tile) - equal_base
            tl.store(sent_at - 1, larger + tl.minimum(equal, equals))

    first = length * 0
    while first < length:
        value, is_there = _read_values(values, first, length, SHAPE[1])
        magnitude = magnitude_of(value)
        entry = tile.to(tl.int64) * SHAPE[1] + first + tl.arange(0, PART)
        place = tl.load(places + entry, is_there, other=0).to(tl.int32)
        is_equal = is_there & (magnitude == last)
        rank = equal_before + tl.cumsum(is_equal.to(tl.int32), axis=0)  # from 1 on
        is_sent = is_there & ((magnitude > last) | (is_equal & (rank <= equals)))
        number = sent_before + tl.cumsum(is_sent.to(tl.int32), axis=0) - 1
        tl.store(sent_at + number, value.to(tl.int32, bitcast=True), is_sent)
        in_all = in_segment + place
        low = low_at + number * (form // 8)
        _send_byte(payload, words, low, in_all & 255, is_sent & (form > 0), edge)
        _send_byte(payload, words, low + 1, (in_all >> 8) & 255, is_sent & (form > 8), edge)
        bit = bits_at + tl.where(form > 0, (in_all >> form) + number, in_all)
        _set_bits(words, bit, tl.full([PART], 1, tl.int32), is_sent)
        if residual is not None:
            tl.store(residual + start + place, tl.zeros([PART], tl.float32), is_sent & (magnitude < INFINITY))
        equal_before += tl.sum(is_equal.to(tl.int32), axis=0)
        sent_before += tl.sum(is_sent.to(tl.int32), axis=0)
        first += PART


@jit
def _before(counts, ends, tile):
    return tl.load(ends + tile) - tl.load(counts + tile)


@jit
def _send_byte(payload, words, at, value, is_there, edge):
    """Store a byte; from `edge` on atomically, because a word may also have bits of the bit string."""
    tl.store(payload + at, value.to(tl.uint8), is_there & (at < edge))
    _set_bits(words, 8 * at, value.to(tl.int32), is_there & (at >= edge))


@jit
def _set_bits(words, bit, value, is_there):
    tl.atomic_or(words + (bit >> 5), value << (bit & 31).to(tl.int32), mask=is_there, sem="relaxed")
