"""Send what reaches a threshold, in a payload of fixed size: the common part of sidco, dgc and threshold.

    survivors = the values with |v| >= threshold, at most `capacity` of them
    decoded   = v where it was sent, 0 elsewhere

    k         = max(1, ceil(ratio * n)), 0 for an empty segment
    capacity  = min(n, ceil(1.3 * k))

Payload, as bytes: for each segment that is not empty the count as int32, then `capacity` fp32 values, then `capacity`
int32 places within the segment, ascending. Slots behind the count are zero. 4 + 8 * capacity bytes a segment.

If more values survive than there are slots, the `capacity` largest magnitudes are sent, of equal ones those at lower
places. Magnitudes are compared as unsigned bit patterns, so whatever is not finite counts as largest; zeros are never
sent. The residual is 0 where a value was sent, v elsewhere, and stays as it was where v is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors import kernels
from fxcomp.compressors.base import mean_over_ranks
from fxcomp.compressors.blocks import split
from fxcomp.compressors.topk import counts

INFINITY_BITS = 0x7F800000


class Cut(NamedTuple):
    """The threshold of a segment as a bit pattern, and a lower one for when fewer than k / 2 values reach the first."""

    bits: int
    second: int


class Selected(NamedTuple):
    """What `compress` returns: `reached` counts what reached the threshold, sent or not."""

    payload: Tensor
    residual: Tensor
    reached: list[int]


@lru_cache
def capacities(segments: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    """The slots of each segment."""
    return tuple(min(n, (13 * k + 9) // 10) for n, k in zip(segments, counts(segments, ratio), strict=True))


def payload_bytes(segments: Sequence[int], ratio: float) -> int:
    return sum(map(section_bytes, capacities(tuple(segments), ratio)))


def section_bytes(slots: int) -> int:
    """The part of one segment."""
    return 4 + 8 * slots if slots > 0 else 0


def magnitude_bits(values: Tensor) -> Tensor:
    """|value| as an int32 of the same order; NaN is the largest."""
    return values.view(torch.int32) & 0x7FFFFFFF


def compress(
    bucket: Tensor, residual: Tensor | None, segments: Sequence[int], ratio: float, cuts: Sequence[Cut]
) -> Selected:
    """Send what reaches the cuts."""
    value = bucket if residual is None else bucket + residual
    left_out = value.clone()
    sections = [bucket.new_empty(0, dtype=torch.uint8)]
    reached: list[int] = []
    pieces = zip(
        split(value, segments),
        split(left_out, segments),
        cuts,
        counts(segments, ratio),
        capacities(tuple(segments), ratio),
        strict=True,
    )
    for piece, left, cut, k, slots in pieces:
        if slots == 0:
            reached.append(0)
            continue
        places, total = _survivors(piece, cut, k, slots)
        reached.append(total)
        left[places] = 0
        sections += _section(piece[places], places, slots)
    payload = torch.cat(sections)
    if residual is None:
        return Selected(payload, bucket.new_empty(0), reached)
    return Selected(payload, torch.where(value.isfinite(), left_out, residual), reached)


def decompress(payloads: Tensor, ranks: int, segments: Sequence[int], ratio: float) -> Tensor:
    return mean_over_ranks([_decompress_one(payload, segments, ratio) for payload in payloads.view(ranks, -1)])


def decode_on_cpu(payloads: Tensor, ranks: int, segments: Sequence[int], ratio: float, out: Tensor) -> bool:
    segments = tuple(segments)
    slots = capacities(segments, ratio)
    is_ours = kernels.run("fxcomp_survivors_decode", payloads, ranks, segments, slots, len(slots), out)
    assert is_ours, "a payload names places outside its segment"
    return True


def kth_largest(values: Tensor, k: int) -> int:
    """The bit pattern of the k-th largest magnitude, at least 1: zeros reach no threshold."""
    if k > len(values):
        return 1
    return max(1, int(magnitude_bits(values).topk(k, sorted=True).values[-1]))


def _survivors(piece: Tensor, cut: Cut, k: int, slots: int) -> tuple[Tensor, int]:
    """The places to send, ascending, and how many values reached the threshold."""
    magnitude = magnitude_bits(piece)
    places = (magnitude >= cut.bits).nonzero().flatten()
    if 2 * len(places) < k:
        places = (magnitude >= cut.second).nonzero().flatten()
    if len(places) <= slots:
        return places, len(places)
    order = (magnitude[places].to(torch.int64) << 32) - places  # no two are equal
    return places[order.topk(slots, sorted=False).indices.sort().values], len(places)


def _section(values: Tensor, places: Tensor, slots: int) -> list[Tensor]:
    count = torch.tensor([len(places)], dtype=torch.int32, device=places.device)
    empty = slots - len(places)
    parts = [count, pad(values, (0, empty)), pad(places.to(torch.int32), (0, empty))]
    return [part.view(torch.uint8) for part in parts]


def _decompress_one(payload: Tensor, segments: Sequence[int], ratio: float) -> Tensor:
    out = torch.zeros(sum(segments), dtype=torch.float32, device=payload.device)
    start = 0
    for piece, slots in zip(split(out, segments), capacities(tuple(segments), ratio), strict=True):
        if slots == 0:
            continue
        words = payload[start : start + 4 + 8 * slots].clone().view(torch.int32)
        count, values, places = split(words, [1, slots, slots])
        sent = int(count)
        # Adding to zero, as the mean over ranks does.
        piece.index_add_(0, places[:sent], values[:sent].view(torch.float32))
        start += 4 + 8 * slots
    return out
