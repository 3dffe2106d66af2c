"""Send each value in a shorter floating-point format, which the wire can sum: what bf16 and fp16 share.

    payload = the format's nearest to v, ties to even        decoded = fp32(payload)

Payload: one element of the format a value. Linear: payloads can be summed on the wire, in that format. Where v rounds
to infinity the residual stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcomp.compressors.base import Compressed, Compressor, mean_over_ranks
from fxcomp.compressors.inputs import DecoderInput, EncoderInput


class CastCompressor(Compressor):
    """`facts.payload_dtype` says all."""

    __slots__ = ()

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        return (sum(segments),)

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(segments)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        value, residual = given.value, given.residual
        payload = value.to(self.payload_dtype)
        if residual is None:
            return Compressed(payload)
        return Compressed(payload, torch.where(payload.isfinite(), value - payload.float(), residual))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        return mean_over_ranks([payload.float() for payload in received.of_ranks])
