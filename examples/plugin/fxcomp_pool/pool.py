"""Send the mean of each run of `width` values.

    payload = mean of v over each run        decoded = that mean, at every place of the run

Payload: one fp32 a run, 4⌈n/width⌉ bytes. Each segment starts a new run; its last one may be short. Linear: means
can be summed on the wire.

The mean is the projection of a run on a constant, so decoding is nearer to v than 0 is: error feedback is stable. For
independent values almost everything is left out, 1 - 1/width; it pays where neighbours are alike.
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
    register,
)
from fxcomp.compressors.block_codes import block_sizes, count_blocks, from_blocks, to_blocks


@register
@dataclass(frozen=True, slots=True)
class Pool(Compressor):
    """A width-th of the bytes, for gradients whose neighbours are alike."""

    width: int = 8

    facts: ClassVar[Facts] = Facts(
        name="pool",
        summary="the mean of each run of values",
        payload="4⌈n/width⌉",
        payload_dtype=torch.float32,
        is_linear=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(Parameter("width", "values that share a mean", 1, 65536),),
        grain="width",
        use="Smooth gradients: wide embeddings, convolutions over large images.",
        avoid="Anything whose neighbouring values have nothing to do with each other.",
        source="average pooling",
    )

    def payload_elements(self, segments: Sequence[int]) -> int:
        return count_blocks(segments, self.width)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        segments, residual = given.segments, given.residual
        runs = to_blocks(given.value, segments, self.width)
        means = (runs / block_sizes(segments, self.width, device=runs.device)).sum(dim=1, keepdim=True)
        # At the end of fp32 a value may be too far from its run's mean: such a run waits, whole.
        overflows = (runs.isfinite() & ~(runs - means).isfinite()).any(dim=1, keepdim=True)
        means = torch.where(overflows & runs.isfinite().all(dim=1, keepdim=True), 0.0, means)
        if residual is None:
            return Compressed(means.flatten())
        left_out = torch.where(means.isfinite(), runs - means, to_blocks(residual, segments, self.width))
        return Compressed(means.flatten(), from_blocks(left_out, segments, self.width))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        assert received.ranks == 1, "payloads of a linear compressor come summed"
        return from_blocks(received.payloads.view(-1, 1).expand(-1, self.width), received.segments, self.width)
