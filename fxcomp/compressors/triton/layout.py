"""Lay out a sparse payload, for topk, threshold, dgc and sidco.

Each segment has a section: the number of values if it varies, values, the low bits of their places, and a bit string
with the rest; `fxcomp/compressors/topk.py`, `survivors.py` and `places.py` say more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from fxcomp.compressors.places import bytes_of, form_of
from fxcomp.compressors.survivors import capacities
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton.language import constant
from fxcomp.compressors.triton.tiles import TILE, Tiles, cut

SECTION_COLUMNS = constant(9)
K, SLOTS, FIRST_TILE, LAST_TILE, VALUES_AT, PLACES_AT, BITS_AT, FORM, LIST_AT = map(constant, range(9))
"""Columns of a section: values wanted, and at most sent; the segment's first and last tile; the bytes of the payload
where values, places and the bit string begin; the low bits of a place; where the list begins that decoding reads."""


@dataclass(frozen=True)
class Layout:
    """Of a bucket and its payload, on the device."""

    sections: Tensor
    tiles: Tiles
    slots: tuple[int, ...]
    """At most so many values of each segment are sent."""
    has_counts: bool
    """The number of values comes before the values."""


@cache
def layout_of_largest(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    """Lay out the payload of topk.py: as many values as slots."""
    return _layout(segments, ratio, counts(segments, ratio), device, has_counts=False)


@cache
def layout_of_survivors(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    """Lay out the payload of survivors.py: a number of values, and slots for some more than are wanted."""
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
