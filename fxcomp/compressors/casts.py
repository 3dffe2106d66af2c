"""Send each value in a shorter floating-point format, which the wire can sum: what bf16 and fp16 share.

    payload = the format's nearest to v, ties to even        decoded = fp32(payload)

Payload: one element of the format a value. Linear: payloads can be summed on the wire, in that format. Where v rounds
to infinity the residual stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcomp.compressors import kernels
from fxcomp.compressors.base import Compressed, Compressor, empty_like_none, mean_over_ranks


class CastCompressor(Compressor):
    """`facts.payload_dtype` says all."""

    __slots__ = ()

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(segments)

    def compress_reference(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> Compressed:
        value = bucket if residual is None else bucket + residual
        payload = value.to(self.payload_dtype)
        left_out = None if residual is None else torch.where(payload.isfinite(), value - payload.float(), residual)
        return Compressed(payload, empty_like_none(bucket, left_out), empty_like_none(bucket, state))

    def decompress_reference(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> Tensor:
        return mean_over_ranks([payload.float() for payload in payloads.view(ranks, -1)])

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        kernels.run(f"fxcomp_{self.name}_encode", bucket, residual, payload, len(payload))
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
        kernels.run(f"fxcomp_{self.name}_decode", payloads, ranks, len(out), out)
        return True
