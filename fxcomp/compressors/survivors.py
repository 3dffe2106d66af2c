"""Send the values that reach a threshold, in a payload of fixed size, for sidco.

    survivors = the values with |v| >= threshold, at most `capacity` of them
    decoded   = v where it was sent, 0 elsewhere

    k         = max(1, ceil(ratio * n)), 0 for an empty segment
    capacity  = min(n, ceil(1.3 * k))

Payload, as bytes: for each nonempty segment the count as int32, `capacity` fp32 values by ascending place (index in
the segment), and the places as in places.py, padded to a multiple of four. Unused slots are zero.

If more values survive than `capacity`, the largest are sent. Ties, values that are not finite and the residual are
handled as in topk.py. Zeros are never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors import places
from fxcomp.compressors.base import Compressed, mean_over_ranks
from fxcomp.compressors.block_codes import split
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.topk import counts

INFINITY_BITS = 0x7F800000


@lru_cache(maxsize=4096)
def capacities(segments: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    return tuple(min(n, (13 * k + 9) // 10) for n, k in zip(segments, counts(segments, ratio), strict=True))


def payload_bytes(segments: Sequence[int], ratio: float) -> int:
    return sum(map(section_bytes, segments, capacities(tuple(segments), ratio)))


def section_bytes(n: int, slots: int) -> int:
    return 4 + 4 * slots + -(-places.bytes_of(n, slots) // 4) * 4 if slots > 0 else 0


def magnitude_bits(values: Tensor) -> Tensor:
    """Return |value| as an int32 with the same order; NaN is the largest."""
    return values.view(torch.int32) & 0x7FFFFFFF


def compress(given: EncoderInput, ratio: float, thresholds: Sequence[int]) -> tuple[Compressed, list[int]]:
    """Send the values that reach their segment's threshold (bits). Also return each segment's number of such values."""
    left_out = given.value.clone()
    sections = [left_out.new_empty(0, dtype=torch.uint8)]
    reached: list[int] = []
    room = capacities(given.segments, ratio)
    for left, threshold, slots in zip(split(left_out, given.segments), thresholds, room, strict=True):
        if slots == 0:
            reached.append(0)
            continue
        kept, total = _survivors(left, threshold, slots)
        reached.append(total)
        sections += _section(left[kept], kept, len(left), slots)
        left[kept] = 0
    payload = torch.cat(sections)
    if given.residual is None:
        return Compressed(payload), reached
    return Compressed(payload, torch.where(given.value.isfinite(), left_out, given.residual)), reached


def decompress(received: DecoderInput, ratio: float) -> Tensor:
    segments = received.segments
    return mean_over_ranks([_decompress_one(payload, segments, ratio) for payload in received.of_ranks])


def kth_largest(values: Tensor, k: int) -> int:
    """Return the bits of the k-th largest magnitude; 1 (the smallest nonzero fp32) if the k-th is 0 or missing."""
    if k > len(values):
        return 1
    return max(1, int(magnitude_bits(values).topk(k, sorted=True).values[-1]))


def _survivors(piece: Tensor, threshold: int, slots: int) -> tuple[Tensor, int]:
    """Return the places to send, ascending, and the number of values that reach the threshold."""
    magnitude = magnitude_bits(piece)
    kept = (magnitude >= threshold).nonzero().flatten()
    if len(kept) <= slots:
        return kept, len(kept)
    order = (magnitude[kept].to(torch.int64) << 32) - kept  # all distinct
    return kept[order.topk(slots, sorted=False).indices.sort().values], len(kept)


def _section(values: Tensor, kept: Tensor, n: int, slots: int) -> list[Tensor]:
    count = torch.full((1,), len(kept), dtype=torch.int32, device=kept.device)
    where = places.write(kept, n, slots)
    filled = pad(values, (0, slots - len(kept)))
    return [count.view(torch.uint8), filled.view(torch.uint8), pad(where, (0, -len(where) % 4))]


def _decompress_one(payload: Tensor, segments: Sequence[int], ratio: float) -> Tensor:
    out = torch.zeros(sum(segments), dtype=torch.float32, device=payload.device)
    slots = capacities(tuple(segments), ratio)
    sizes = list(map(section_bytes, segments, slots))
    for piece, section, room in zip(split(out, segments), split(payload, sizes), slots, strict=True):
        if room == 0:
            continue
        values = section[4 : 4 + 4 * room].clone().view(torch.float32)
        kept = places.read(section[4 + 4 * room :][: places.bytes_of(len(piece), room)], len(piece), room)
        # Addition turns a sent -0 into 0, as the mean over ranks does. Unused slots add 0 to place 0.
        piece.index_add_(0, kept, values)
    return out
