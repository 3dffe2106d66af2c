"""Send the k values of largest magnitude of each segment, with their places (indices in the segment).

    k       = max(1, ceil(ratio * n)), 0 for an empty segment
    decoded = v at the k places of largest |v|, 0 elsewhere

Payload, as bytes: for each segment its k fp32 values by ascending place, then their places as in places.py, padded to a
multiple of four.

Of equal magnitudes, the lower place is sent. Magnitudes are compared as bit patterns, so values that are not finite are
the largest. The residual is 0 for a sent value, v for others, and unchanged if v is not finite.

The relative squared error is at most 1 - ratio. At ratio 0.01 it is 0.92 for Gaussian values and 0.84 for Laplace.
Training without error feedback can diverge for every learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors.base import Compressed, Compressor, mean_over_ranks
from fxcomp.compressors.block_codes import split
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.places import bytes_of, read, write
from fxcomp.errors import BadOption

MOST_VALUES = 2**31 - 1  # per segment


def _decompress_one(payload: Tensor, segments: Sequence[int], ratio: float) -> Tensor:
    out = torch.zeros(sum(segments), dtype=torch.float32, device=payload.device)
    ks = counts(segments, ratio)
    sizes = [_bytes_of(n, k) for n, k in zip(segments, ks, strict=True)]
    for piece, section, k in zip(split(out, segments), split(payload, sizes), ks, strict=True):
        values, places = section[: 4 * k].clone().view(torch.float32), section[4 * k :]
        # Addition turns a sent -0 into 0, as the mean over ranks does.
        piece.index_add_(0, read(places[: bytes_of(len(piece), k)], len(piece), k), values)
    return out


def _bytes_of(n: int, k: int) -> int:
    return 4 * k + -(-bytes_of(n, k) // 4) * 4


def fill_up(section: Tensor) -> Tensor:
    return pad(section, (0, -len(section) % 4))


def _largest(piece: Tensor, k: int) -> Tensor:
    """Return the places of the k largest magnitudes, ascending."""
    magnitude = (piece.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    place = torch.arange(len(piece), device=piece.device)
    rank = (magnitude << 32) - place  # all distinct
    return rank.topk(k, sorted=False).indices.sort().values


def counts(segments: Sequence[int], ratio: float) -> tuple[int, ...]:
    """Return k of each segment, in exact arithmetic: 7 % of 100 is 7, though 0.07 * 100 > 7.

    Raises BadOption if a segment's places exceed int32.
    """
    return _counts(tuple(segments), ratio)


@lru_cache(maxsize=4096)
def _counts(segments: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    if segments and max(segments) > MOST_VALUES:
        index = max(range(len(segments)), key=segments.__getitem__)
        raise BadOption(
            f"nothing can be selected from {segments[index]} values: their places are numbers of 31 bits.\n"
            f"  segment {index} of a bucket of {len(segments)}, with ratio {ratio}\n"
            "  Split the parameter, or plan for it a compressor that sends every value, such as int8."
        )
    part, whole = as_fraction(ratio)
    return tuple(max(min(n, 1), -(-part * n // whole)) for n in segments)


@lru_cache
def as_fraction(ratio: float) -> tuple[int, int]:
    return Fraction(repr(float(ratio))).as_integer_ratio()


@register
@dataclass(frozen=True, slots=True)
class TopK(Compressor):
    """The k values of largest magnitude."""

    ratio: float

    facts: ClassVar[Facts] = Facts(
        name="topk",
        summary="the k values of largest magnitude, exactly",
        payload="4k + P(n, k), k = ⌈ratio·n⌉, P = min(n, 9k + n/2⁸, 17k + n/2¹⁶)/8",
        is_joined=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        passes=2,
        parameters=(Parameter("ratio", "share of values sent", 1e-6, 1.0),),
        use="Slow links and few ranks.",
        avoid="Where ratio exceeds 1 / ranks.",
        source="Aji and Heafield 2017; radix selection",
    )

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(map(_bytes_of, segments, counts(segments, self.ratio)))

    def compress_reference(self, given: EncoderInput) -> Compressed:
        ks = counts(given.segments, self.ratio)
        places = [_largest(piece, k) for piece, k in zip(given.pieces, ks, strict=True)]
        left_out = given.value.clone()
        sections = [left_out.new_empty(0, dtype=torch.uint8)]
        for piece, index in zip(split(left_out, given.segments), places, strict=True):
            sections += [piece[index].view(torch.uint8), fill_up(write(index, len(piece), len(index)))]
            piece[index] = 0
        payload = torch.cat(sections)
        if given.residual is None:
            return Compressed(payload)
        return Compressed(payload, torch.where(given.value.isfinite(), left_out, given.residual))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        segments = received.segments
        return mean_over_ranks([_decompress_one(payload, segments, self.ratio) for payload in received.of_ranks])

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        return segments, counts(segments, self.ratio), len(segments)
