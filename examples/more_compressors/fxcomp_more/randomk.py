"""Send k values of each segment at random places that all ranks draw alike, and no places.

    k       = max(1, ceil(ratio * n)), 0 for an empty segment
    decoded = v at k places, 0 elsewhere                                    scaled: v n/k at k places

Payload: for each segment its k fp32 values and one fp32 flag, 0, or NaN where any value of the segment is not finite:
4(k + 1) bytes. Linear: ranks draw the same places, so payloads are summed on the wire. A flag that is not 0 decodes to
NaN at the segment's first value, so that every rank sees it though the value was not sent; the residual stays as it was
there, and where v is not finite.

The places are runs of 16 neighbours, one in each of ceil(k/16) strata, on a circle that is turned at random:

    run j covers           16j .. min(16j + 16, k) - 1 of the k values
    stratum j covers       floor(16j n/k) .. floor(min(16j + 16, k) n/k) - 1 of the circle
    the run begins at      any place of its stratum where it has room, all equally likely: bits(j)
    the circle is turned   by u of 0..n-1, all equally likely: bits(2^32 - 1), bits(2^32 - 2)

No place comes twice, and u alone gives every element the probability k/n, exactly but for 2^-33 of u's 64 bits. A run
is a cache line or two, and a stratum's neighbours are known without a sort or a permutation.

The draws come from (key, step), which all ranks share; decoding uses the state that the step's encoding returned, where
the step was raised already.

Without `scaled` it loses 1 - ratio of the squared norm, on average, whatever the distribution: worse than top-k
everywhere. It is biased and needs error feedback. Scaled it is unbiased, its error is n/k - 1 times the squared norm,
and error feedback makes it diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
)
from fxcomp.compressors.base import mean_over_ranks
from fxcomp.compressors.block_codes import split
from fxcomp.compressors.topk import counts

_RUN = 16


def draw_places(stream: tuple[Tensor, Tensor], n: int, k: int) -> Tensor:
    """k different places of 0..n-1 in the order in which their values are sent, int64."""
    device = stream[0].device
    first = torch.arange(0, k, _RUN, device=device)
    last = (first + _RUN).clamp_max(k)
    begin, end = first * n // k, last * n // k
    room = end - begin - (last - first) + 1
    offset = (randomness.bits(stream, 0, len(first)) * room) >> 32
    number = torch.arange(k, device=device)
    on_circle = (begin + offset)[number // _RUN] + number % _RUN
    low, high = randomness.bits(stream, 2**32 - 2, 2)
    turn = (high * n + ((low * n) >> 32)) >> 32
    return (on_circle + turn) % n


def _decompress_one(payload: Tensor, segments: Sequence[int], places: Sequence[Tensor]) -> Tensor:
    out = torch.zeros(sum(segments), dtype=torch.float32, device=payload.device)
    sections = split(payload, [len(index) + (len(index) > 0) for index in places])
    for piece, section, index in zip(split(out, segments), sections, places, strict=True):
        if len(index):
            piece[index] = section[:-1]
            piece[0] = torch.where(section[-1].isfinite(), piece[0], torch.nan)
    return out


@register
@dataclass(frozen=True, slots=True)
class RandomK(Compressor):
    """The plain all_reduce of a part of the values; unscaled only with error feedback, scaled only without."""

    ratio: float
    scaled: bool = False

    facts: ClassVar[Facts] = Facts(
        name="randomk",
        summary="k values at random places that all ranks draw alike",
        payload="4(k + 1), k = ⌈ratio·n⌉",
        payload_dtype=torch.float32,
        is_linear=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(
            Parameter("ratio", "share of values sent", 1e-6, 1.0),
            Parameter("scaled", "times n/k, which makes it unbiased and forbids feedback", 0, 1),
        ),
        state="16",
        state_dtype=torch.int64,
        decode_needs_state=True,
        use="Many ranks, where gathered payloads grow too large; with a learning rate cut by about the ratio.",
        avoid="Where the links carry top-k or low rank: what is large waits as long as what is small, n/k steps.",
        source="Stich et al. 2018 (with memory); Konečný and Richtárik 2018 (scaled); stratified runs",
    )

    @property
    def feedback(self) -> Feedback:
        return Feedback.FORBIDDEN if self.scaled else Feedback.REQUIRED

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED if self.scaled else Bias.BIASED

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(k + 1 for k in counts(segments, self.ratio) if k)

    def state_elements(self, size: int) -> int:
        return randomness.STATE_ELEMENTS

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        """The same on all ranks: they draw the same places."""
        return randomness.fresh_state(key)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        assert given.state is not None, "random-k draws its places from its state"
        left_out = given.value.clone()
        sent = [given.bucket.new_empty(0)]
        pieces = zip(given.pieces, split(left_out, given.segments), counts(given.segments, self.ratio), strict=True)
        for segment, (piece, left, k) in enumerate(pieces):
            if k == 0:
                continue
            places = draw_places(randomness.stream_of(given.state, segment), len(piece), k)
            values = piece[places] * (len(piece) / k) if self.scaled else piece[places]
            is_finite = piece.isfinite().all()
            sent += [values, torch.where(is_finite, 0.0, torch.nan).to(torch.float32).view(1)]
            left[places] = torch.where(values.isfinite(), piece[places] - values, torch.nan)
            left[0] = torch.where(is_finite, left[0], torch.nan)
        new_state = randomness.next_state(given.state)
        if given.residual is None:
            return Compressed(torch.cat(sent), state=new_state)
        return Compressed(torch.cat(sent), torch.where(left_out.isfinite(), left_out, given.residual), new_state)

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        assert received.state is not None, "random-k draws its places from its state"
        before = received.state - randomness.one_step(received.state)
        none = before.new_empty(0)
        ks = counts(received.segments, self.ratio)
        places = [
            draw_places(randomness.stream_of(before, segment), n, k) if k else none
            for segment, (n, k) in enumerate(zip(received.segments, ks, strict=True))
        ]
        return mean_over_ranks([_decompress_one(payload, received.segments, places) for payload in received.of_ranks])
