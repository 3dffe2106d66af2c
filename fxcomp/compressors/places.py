"""Encode k places below n compactly. A place is a value's index in its segment. csrc/places.h is the kernels' copy.

    n = 1000, places 3, 7, 300, 999            low bytes     3, 7, 44, 231
                                               high bits     1 1 0 1 0 0 1     (blocks 0, 0, 1, 3)

Places are ascending. n and the room for places select the shorter of two forms:

    a bitmap               n bits: bit p is 1 for a place p
    low bits and a string  the low 8 (or 16) bits of each place; then a bit string with a 1 for each place and a 0 at
                           the start of each further block of 2^8 (or 2^16) places: 9k + n/2^8 bits (or 17k + n/2^16)

The second form is the code of Elias (1974) and Fano (1971). Its i-th 1 is bit block(i) + i, so its size does not depend
on the places. For k = n / 100 it takes 9.4 bits per place.

A section has room for `slots` >= k places: low bits, then the bit string. Unused room is zero. The lowest bit of a byte
comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BITMAP = 0
_FORMS = (BITMAP, 8, 16)  # low bits of a place; of equal sizes, the first is used


def form_of(n: int, slots: int) -> int:
    """Return the number of low bits stored for each place; 0 for a bitmap."""
    return min(_FORMS, key=lambda form: _low_bytes(slots, form) + _bit_bytes(n, slots, form))


def bytes_of(n: int, slots: int) -> int:
    form = form_of(n, slots)
    return _low_bytes(slots, form) + _bit_bytes(n, slots, form)


def write(places: Tensor, n: int, slots: int) -> Tensor:
    """Return the uint8 section of ascending int64 places below n."""
    form, k = form_of(n, slots), len(places)
    ones = places if form == BITMAP else (places >> form) + torch.arange(k, device=places.device)
    bits = torch.zeros(8 * _bit_bytes(n, slots, form), dtype=torch.uint8, device=places.device)
    bits[ones] = 1
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=places.device)
    packed = (bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
    low = pad(places, (0, slots - k))
    lows = {BITMAP: [], 8: [low.to(torch.uint8)], 16: [low.to(torch.int16).view(torch.uint8)]}
    return torch.cat([*lows[form], packed])


def read(section: Tensor, n: int, slots: int) -> Tensor:
    """Undo `write`: return `slots` int64 numbers, the ascending places, then zeros."""
    form = form_of(n, slots)
    low, packed = torch.split_with_sizes(section, [_low_bytes(slots, form), _bit_bytes(n, slots, form)])
    bits = (packed.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=section.device)) & 1
    bits = bits.flatten()
    # Scatter the i-th 1 to index i and each 0 to the end: unlike nonzero, this does not wait for a GPU.
    number = torch.where(bits > 0, bits.cumsum(0) - 1, slots)
    order = torch.arange(slots + 1, device=section.device)
    unused = torch.zeros_like(order) if form == BITMAP else order
    ones = unused.scatter(0, number, torch.arange(len(bits), device=section.device))[:slots]
    if form == BITMAP:
        return ones
    high = (ones - order[:slots]) << form
    return high + (low.long() if form == 8 else low.clone().view(torch.int16).long() & 0xFFFF)


def _low_bytes(slots: int, form: int) -> int:
    return slots * form // 8


def _bit_bytes(n: int, slots: int, form: int) -> int:
    if slots == 0:
        return 0
    bits = n if form == BITMAP else slots + ((n - 1) >> form)
    return -(-bits // 8)
