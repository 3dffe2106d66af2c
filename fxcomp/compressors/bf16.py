"""Send the upper half of each fp32.

    payload = bf16(v), rounded to nearest, ties to even        decoded = fp32(payload)

Payload: one bf16 a value, 2n bytes. Linear: payloads can be summed on the wire, in bf16.

The relative squared error is 3e-6 whatever the distribution, so no error feedback is needed; given a residual, the
compressor feeds it back like the others. Unlike fp16 it has fp32's range, so no gradient overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxcomp.compressors import kernels
from fxcomp.compressors.base import check_decode, check_encode, mean_over_ranks
from fxcomp.compressors.registration import register_compress, register_decompress


def compress_reference(bucket: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    value = bucket if residual is None else bucket + residual
    payload = value.to(torch.bfloat16)
    if residual is None:
        return payload, bucket.new_empty(0)
    return payload, torch.where(payload.isfinite(), value - payload.float(), residual)


def decompress_reference(payloads: Tensor, ranks: int) -> Tensor:
    return mean_over_ranks([payload.float() for payload in payloads.view(ranks, -1)])


def _make() -> BF16:
    return BF16()


@dataclass(frozen=True, slots=True)
class BF16:
    """Two bytes a value, and the plain all_reduce."""

    name: ClassVar[str] = "bf16"
    is_linear: ClassVar[bool] = True
    needs_error_feedback: ClassVar[bool] = False
    payload_dtype: ClassVar[torch.dtype] = torch.bfloat16
    compress_op: ClassVar[OpOverload] = register_compress("bf16", "", _make)
    decompress_op: ClassVar[OpOverload] = register_decompress("bf16", "", _make)

    @property
    def parameters(self) -> tuple[int | float, ...]:
        return ()

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(segments)

    def payload_bytes(self, segments: Sequence[int]) -> int:
        return 2 * sum(segments)

    def encode(self, bucket: Tensor, residual: Tensor | None, payload: Tensor, segments: Sequence[int]) -> None:
        check_encode(self, bucket, residual, payload, segments)
        if kernels.can_run_on(bucket):
            kernels.run("fxcomp_bf16_encode", bucket, residual, payload, len(payload))
            return
        new_payload, new_residual = compress_reference(bucket, residual)
        payload.copy_(new_payload)
        if residual is not None:
            residual.copy_(new_residual)

    def decode(self, payloads: Tensor, ranks: int, segments: Sequence[int], out: Tensor) -> None:
        check_decode(self, payloads, ranks, segments, out)
        if kernels.can_run_on(out):
            kernels.run("fxcomp_bf16_decode", payloads, ranks, len(out), out)
        else:
            out.copy_(decompress_reference(payloads, ranks))

    def __str__(self) -> str:
        return "bf16"
