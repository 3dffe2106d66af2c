"""Send one signed byte a value, on a scale that all ranks share, so that the bytes can be summed on the wire.

    levels  = floor(127 / ranks)                        the sum over the ranks stays within -127..127
    agreed  = the largest |v| of a block on any rank    the ranks' maximum of their proposals
    scale   = agreed / levels, at most fp32's largest value over levels, rounded down
    code    = v / scale, rounded stochastically to a neighbouring integer, within -levels..levels
    decoded = (sum of the codes) * scale

Proposal: one fp32 a block. Payload: one int8 a value, n bytes; the scales are not in it, for every rank has them.
Each segment starts a new block; the last block of a segment may be short.

With nearest = round(v / scale), ties to even, and d = v / scale - nearest, the code is nearest + 1 if u < d,
nearest - 1 if u < -d, and nearest otherwise, where u in [0, 1) comes from the rank's own stream (language.py). Its
mean is v / scale, and the ranks' errors average out. With `stochastic=false` the code is nearest, without state.

A rank proposes infinity for a block that holds a value which is not finite: infinity survives every maximum, where a
NaN may be lost. Such a block has codes 0 and decodes to NaN on all ranks, and their residuals stay as they were.

Each rank has only 127 / ranks levels, which is the price of the plain all_reduce. The relative squared error of a
rank's part is 1.9 / levels² for Gaussian values in blocks of 512, and half of that without `stochastic`: 1e-4 for one
rank, 2e-3 for four, 4e-2 for sixteen. From 19 ranks on (less than 7 levels) it needs error feedback; to nearest it
always does, as int8: with Adam a small bias shows. What is left out is at most one scale a value, so a residual stays
below the largest gradient / (levels - 1): bounded from two levels on, but not with the one level of 64 to 127 ranks.
There stochastic rounding must go without error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

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
    ProposalReduction,
    randomness,
    register,
)
from fxcomp.compressors.base import mean_over_ranks
from fxcomp.compressors.block_codes import count_blocks, from_blocks, most_scale, to_blocks
from fxcomp.errors import BadOption

DEFAULT_BLOCK = 512  # the proposal is 1/32 of the payload
_LARGEST_CODE = 127
_FEW_LEVELS = 7  # below, a code has fewer than four bits


def _scales(agreed: Tensor, levels: int) -> Tensor:
    """One row a block; NaN where a value was not finite."""
    scale = (agreed / levels).clamp_max(most_scale(levels))
    return torch.where(agreed.isfinite(), scale, torch.nan).view(-1, 1)


def _decompress_one(payload: Tensor, segments: Sequence[int], block: int, scale: Tensor) -> Tensor:
    return from_blocks(to_blocks(payload.float(), segments, block) * scale, segments, block)


@register
@dataclass(frozen=True, slots=True)
class SharedInt8(Compressor):
    """A quarter of the bytes, and the plain all_reduce."""

    block: int = DEFAULT_BLOCK
    stochastic: bool = True
    levels: int = _LARGEST_CODE
    """The largest code of one rank; `bound_to` divides it by the number of ranks."""

    facts: ClassVar[Facts] = Facts(
        name="shared_int8",
        summary="eight bits a value on scales that the ranks agree on",
        payload="n",
        payload_dtype=torch.int8,
        is_linear=True,
        bias=Bias.UNBIASED,
        feedback=Feedback.OPTIONAL,
        passes=2,
        parameters=(
            Parameter("block", "values that share a scale", 8, 65536),
            Parameter("stochastic", "round to either neighbour, right on average", 0, 1),
        ),
        filled_in=("levels",),
        state="16 a parameter if stochastic",
        state_dtype=torch.int64,
        agreement=ProposalReduction.MAX,
        proposal="4⌈n/B⌉",
        grain="block",
        use="Where gathering int8 from all ranks costs more than two all_reduces: from about 4 to 18 ranks.",
        avoid="On two or three ranks, where int8 has more levels and asks no second time; on more than 127.",
        source="integer all_reduce on a global maximum, as in Global-QSGD and THC",
    )

    @property
    def has_state(self) -> bool:
        return self.stochastic

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED if self.stochastic else Bias.ROUNDING

    @property
    def feedback(self) -> Feedback:
        if self.stochastic and self.levels >= _FEW_LEVELS:
            return Feedback.OPTIONAL
        return Feedback.FORBIDDEN if self.stochastic and self.levels == 1 else Feedback.REQUIRED

    def bound_to(self, shapes: Sequence[Sequence[int]], ranks: int) -> Self:
        if ranks > _LARGEST_CODE:
            raise BadOption(
                f"shared_int8 cannot sum the codes of {ranks} ranks in eight bits: each needs at least one level on "
                f"either side, so there may be {_LARGEST_CODE} ranks.\n"
                "  Use int8, whose payloads are gathered, or bf16."
            )
        return replace(self, levels=_LARGEST_CODE // ranks)

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(segments)

    def proposal_elements(self, segments: Sequence[int]) -> int:
        return count_blocks(segments, self.block)

    def state_elements(self, size: int) -> int:
        return randomness.STATE_ELEMENTS if self.stochastic else 0

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        if not self.stochastic:
            return torch.empty(0, dtype=torch.int64)
        return randomness.fresh_state(randomness.key_of(key, rank))

    def propose_reference(self, given: EncoderInput) -> Tensor:
        largest = to_blocks(given.value, given.segments, self.block).abs().amax(dim=1)
        return torch.where(largest.isfinite(), largest, torch.inf)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        assert given.agreed is not None, "shared_int8 compresses with the agreement of the ranks"
        segments, block, levels = given.segments, self.block, self.levels
        rows, scale = to_blocks(given.value, segments, block), _scales(given.agreed, levels)
        is_finite = scale.isfinite()
        quotient = (rows / torch.where(scale > 0, scale, 1.0)).clamp(-levels, levels)
        codes, new_state = quotient.round(), None
        if given.state is not None:
            above = quotient - codes
            uniform = to_blocks(randomness.uniform_of(given.state, segments), segments, block)
            codes = codes + (uniform < above).float() - (uniform < -above).float()
            new_state = randomness.next_state(given.state)
        codes = torch.where(is_finite, codes, 0.0)
        payload = from_blocks(codes.to(torch.int8), segments, block)
        if given.residual is None:
            return Compressed(payload, state=new_state)
        left_out = torch.where(is_finite, rows - codes * scale, to_blocks(given.residual, segments, block))
        return Compressed(payload, from_blocks(left_out, segments, block), new_state)

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        assert received.agreed is not None, "shared_int8 decompresses with the agreement of the ranks"
        scale, segments = _scales(received.agreed, self.levels), received.segments
        return mean_over_ranks([_decompress_one(one, segments, self.block, scale) for one in received.of_ranks])
