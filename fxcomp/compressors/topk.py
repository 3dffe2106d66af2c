"""Send the k values of largest magnitude of each segment, with their places.

    k       = max(1, ceil(ratio * n)), 0 for an empty segment
    decoded = v at the k places of largest |v|, 0 elsewhere

Payload, as bytes: for each segment its k fp32 values, by ascending place, then their places as in places.py, filled up
to a multiple of four. The shortest of three forms is taken, so P(n, k) = min(n, 9k + n/2^8, 17k + n/2^16) bits. A value
sent takes 5.1 bytes at 10 %, 5.2 at 1 %, 5.6 at 0.1 %, and 4 + 1/8 when all are sent.

Of equal magnitudes the lower place goes first. Magnitudes are compared as unsigned bit patterns, so whatever is not
finite counts as largest and is sent. The residual is 0 where a value was sent, v elsewhere, and stays as it was where
v is not finite.

What is left out is at most 1 - ratio of the squared norm: at 1 % it is 0.92 for Gaussian values and 0.84 for Laplace.
Without error feedback it can diverge for every step size. Gathering from N ranks beats a dense all_reduce in volume
only where ratio < 1/N.
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

from fxcomp.compressors import kernels
from fxcomp.compressors.base import (
    BadCompressor,
    Compressed,
    Compressor,
    bad_payload,
    empty_like_none,
    mean_over_ranks,
)
from fxcomp.compressors.blocks import split
from fxcomp.compressors.facts import Bias, Case, Facts, Feedback, Parameter
from fxcomp.compressors.places import bytes_of, read, write
from fxcomp.compressors.registration import register

_MOST_VALUES = 2**31 - 1  # of one segment


def _compress(bucket: Tensor, residual: Tensor | None, segments: Sequence[int], ratio: float) -> tuple[Tensor, Tensor]:
    value = bucket if residual is None else bucket + residual
    places = [_largest(piece, k) for piece, k in zip(split(value, segments), counts(segments, ratio), strict=True)]
    sections = [
        section
        for piece, index in zip(split(value, segments), places, strict=True)
        for section in (piece[index].view(torch.uint8), _fill_up(write(index, len(piece), len(index))))
    ]
    payload = torch.cat([bucket.new_empty(0, dtype=torch.uint8), *sections])
    if residual is None:
        return payload, bucket.new_empty(0)
    left_out = value.clone()
    for piece, index in zip(split(left_out, segments), places, strict=True):
        piece[index] = 0
    return payload, torch.where(value.isfinite(), left_out, residual)


def _decompress(payloads: Tensor, ranks: int, segments: Sequence[int], ratio: float) -> Tensor:
    return mean_over_ranks([_decompress_one(payload, segments, ratio) for payload in payloads.view(ranks, -1)])


def _decompress_one(payload: Tensor, segments: Sequence[int], ratio: float) -> Tensor:
    out = torch.zeros(sum(segments), dtype=torch.float32, device=payload.device)
    ks = counts(segments, ratio)
    sizes = [_bytes_of(n, k) for n, k in zip(segments, ks, strict=True)]
    for piece, section, k in zip(split(out, segments), split(payload, sizes), ks, strict=True):
        values, places = section[: 4 * k].clone().view(torch.float32), section[4 * k :]
        # Adding to zero, as the mean over ranks does, makes a sent -0 a 0.
        piece.index_add_(0, read(places[: bytes_of(len(piece), k)], len(piece), k), values)
    return out


def _bytes_of(n: int, k: int) -> int:
    return 4 * k + -(-bytes_of(n, k) // 4) * 4


def _fill_up(section: Tensor) -> Tensor:
    return pad(section, (0, -len(section) % 4))


def _largest(piece: Tensor, k: int) -> Tensor:
    """The places of the k largest magnitudes, ascending."""
    magnitude = (piece.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    place = torch.arange(len(piece), device=piece.device)
    rank = (magnitude << 32) - place  # no two are equal
    return rank.topk(k, sorted=False).indices.sort().values


def counts(segments: Sequence[int], ratio: float) -> tuple[int, ...]:
    """k of each segment, in exact arithmetic: 7 % of 100 is 7, though 0.07 * 100 > 7 in floating point.

    Raises BadCompressor for a segment whose places do not fit into an int32: no kernel can select from it.
    """
    return _counts(tuple(segments), ratio)


@lru_cache(maxsize=4096)
def _counts(segments: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    if segments and max(segments) > _MOST_VALUES:
        index = max(range(len(segments)), key=segments.__getitem__)
        raise BadCompressor(
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
    """Any part of the bytes; only with error feedback."""

    ratio: float

    facts: ClassVar[Facts] = Facts(
        name="topk",
        summary="the k values of largest magnitude, exactly",
        payload="4k + P(n, k), k = ⌈ratio·n⌉, P = min(n, 9k + n/2⁸, 17k + n/2¹⁶)/8",
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        sends_values=True,
        passes=2,
        parameters=(Parameter("ratio", "share of values sent", 1e-6, 1.0),),
        use="Slow links and few ranks.",
        avoid="Where ratio is above one over the number of ranks.",
        source="Aji and Heafield 2017; radix selection",
        case=Case.MODE,
    )

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(map(_bytes_of, segments, counts(segments, self.ratio)))

    def compress_reference(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> Compressed:
        payload, left_out = _compress(bucket, residual, segments, self.ratio)
        return Compressed(payload, left_out, empty_like_none(bucket, state))

    def decompress_reference(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> Tensor:
        return _decompress(payloads, ranks, segments, self.ratio)

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        ks = counts(segments, self.ratio)
        kernels.run("fxcomp_topk_encode", bucket, residual, payload, tuple(segments), ks, len(ks))
        return True

    def decode_on_cpu(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        out: Tensor,
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> bool:
        ks = counts(segments, self.ratio)
        is_ours = kernels.run("fxcomp_topk_decode", payloads, ranks, tuple(segments), ks, len(ks), out)
        if not is_ours:
            raise bad_payload("places outside its segment", ranks, segments)
        return True
