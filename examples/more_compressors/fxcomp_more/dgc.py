"""Send the values above the k-th largest magnitude of a sample.

    sample    = v at start, start + stride, start + 2 stride, ...; start is random in 0..stride-1
    threshold = the magnitude that the share k / n of the sample reaches
    decoded   = v where |v| >= threshold, 0 elsewhere

Payload: fxcomp/compressors/survivors.py. If more values reach the threshold than there are slots, the largest are sent.
If fewer than k / 2 do, there is a second look at what is left, with the threshold that twice the share of the sample
reaches, and no third.

The sample has 1 % of the values, and at least 64 / ratio, so that about 64 of it reach the threshold or more: the
count is off by 12 % then, less for large segments. The stride is odd, so that it does not fall into step with the rows
of a matrix, and the start changes with each step. What is left out is as with topk: 0.92 of the squared norm at 1 % of
Gaussian values, 0.84 for Laplace. The momentum correction of the method is not here: exchange momenta instead
(docs/where_the_mean_stands.md).

State: the stream of random starts, one a rank and segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors import (
    Bias,
    Compressed,
    Compressor,
    DecoderInput,
    EncoderInput,
    Facts,
    Feedback,
    Parameter,
    randomness,
    register,
    survivors,
)
from fxcomp.compressors.topk import counts

_REACHED = 64  # values of the sample that should reach the threshold


@lru_cache(maxsize=4096)
def strides(segments: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    """Return an odd stride for each segment, small enough for a sample of the wanted size."""
    return tuple(max(1, (n // max(ceil(_REACHED / ratio), n // 100) - 1) | 1) for n in segments)


def sampled_threshold(piece: Tensor, k: int, stride: int, random: int) -> int:
    """Estimate the threshold of the k largest, as bits, from every `stride`-th value; `piece` is not empty.

    The sample begins at `random % stride`.
    """
    sample = piece[min(random % stride, len(piece) - 1) :: stride]
    reaching = max(1, (2 * k * len(sample) + len(piece)) // (2 * len(piece)))
    first = survivors.kth_largest(sample, reaching)
    is_enough = 2 * int((survivors.magnitude_bits(piece) >= first).sum()) >= k
    return first if is_enough else survivors.kth_largest(sample, 2 * reaching)


@register
@dataclass(frozen=True, slots=True)
class DGC(Compressor):
    """About k values, for little more than one pass."""

    ratio: float

    facts: ClassVar[Facts] = Facts(
        name="dgc",
        summary="the values above a threshold found in a sample",
        payload="4 + 4c + P(n, c), c = ⌈1.3⌈ratio·n⌉⌉, P as for topk",
        is_joined=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(Parameter("ratio", "share of values to send", 1e-6, 1.0),),
        state="16",
        state_dtype=torch.int64,
        use="As topk, where its selection costs too much.",
        avoid="Where ratio is above one over the number of ranks.",
        source="Lin et al. 2018, deep gradient compression",
    )

    def payload_elements(self, segments: Sequence[int]) -> int:
        return survivors.payload_bytes(segments, self.ratio)

    def state_elements(self, size: int) -> int:
        return randomness.STATE_ELEMENTS

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        return randomness.fresh_state(randomness.key_of(key, rank))

    def compress_reference(self, given: EncoderInput) -> Compressed:
        assert given.state is not None, "dgc draws its samples from a stream"
        ks, steps = counts(given.segments, self.ratio), strides(given.segments, self.ratio)
        thresholds: list[int] = []
        for index, (piece, k, stride) in enumerate(zip(given.pieces, ks, steps, strict=True)):
            random = int(randomness.bits(randomness.stream_of(given.state, index), 0, 1))
            thresholds.append(sampled_threshold(piece, k, stride, random) if k > 0 else 1)
        sent, _ = survivors.compress(given, self.ratio, thresholds)
        return sent._replace(state=randomness.next_state(given.state))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        return survivors.decompress(received, self.ratio)
