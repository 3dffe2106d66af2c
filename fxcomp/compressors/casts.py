"""Send each value in a floating-point format: bf16 and fp16, which an all_reduce can sum, and exact forms.

    payload = v rounded to nearest, ties to even        decoded = fp32(payload)

If v rounds to infinity, its residual stays unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors.base import Compressed, Compressor, mean_over_ranks
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback
from fxcomp.compressors.inputs import DecoderInput, EncoderInput


class CastCompressor(Compressor):
    """Base of the casts to `facts.payload_dtype`."""

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


@register
@dataclass(frozen=True, slots=True)
class BF16(CastCompressor):
    """bfloat16, two bytes a value, sent by a plain all_reduce.

    The relative squared error is 3e-6 for any distribution, so error feedback is not needed. bf16 has fp32's range, so
    no gradient overflows.
    """

    facts: ClassVar[Facts] = Facts(
        name="bf16",
        summary="the upper half of each fp32",
        payload="2n",
        payload_dtype=torch.bfloat16,
        is_linear=True,
        is_joined=True,
        bias=Bias.ROUNDING,
        feedback=Feedback.OPTIONAL,
        use="The first try: half the bytes, no state, one all_reduce.",
        avoid="Where compute hides the dense collective.",
        source="IEEE fp32 cut to bfloat16, round to nearest even",
    )


@register
@dataclass(frozen=True, slots=True)
class FP16(CastCompressor):
    """Half precision, two bytes a value: more precise than bf16, with a smaller range.

    The bucket is first divided by the number of ranks, because a sum over ranks could exceed fp16's limit, 65504.
    Larger values become inf. Values below 6e-5 lose precision and values below 3e-8 become zero, so scale the loss.

    The relative squared error is 4e-8 for values of unit size, so error feedback is not needed.
    """

    facts: ClassVar[Facts] = Facts(
        name="fp16",
        summary="half precision",
        payload="2n",
        payload_dtype=torch.float16,
        is_linear=True,
        is_joined=True,
        bias=Bias.ROUNDING,
        feedback=Feedback.OPTIONAL,
        use="Where a scaled loss keeps gradients between 1e-4 and 1e4, and bf16 is too coarse.",
        avoid="Gradients of unknown size: bf16 has fp32's range for the same bytes.",
        source="IEEE 754 binary16, round to nearest even",
    )


class ExactCast(CastCompressor):
    """Base of casts without error. Every gradient value must be representable in `facts.payload_dtype`.

    mean = (sum of payloads in rank order, in fp32) / ranks

    With 2, 4, 8, ... ranks, payloads are divided before the sum. Payloads are gathered, because 16-bit sums round.
    """

    __slots__ = ()

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        ranks = received.ranks
        first = ranks if ranks.bit_count() == 1 else 1  # exact, and a sum may then not overflow
        total, *others = (payload.float() / first for payload in received.of_ranks)
        for other in others:
            total = total + other
        return total / (ranks // first)


def _exact(dtype: torch.dtype, name: str, summary: str, *, use: str, avoid: str, source: str) -> Facts:
    return Facts(
        name=name,
        summary=summary,
        payload=f"{dtype.itemsize}n",
        payload_dtype=dtype,
        is_exact=True,
        is_joined=True,
        bias=Bias.UNBIASED if dtype is torch.float32 else Bias.ROUNDING,  # of values that are no casts
        feedback=Feedback.FORBIDDEN,
        use=use,
        avoid=avoid,
        source=source,
    )


_REFUSED = "Other gradients: plans with them are refused."


@register
@dataclass(frozen=True, slots=True)
class ExactBF16(ExactCast):
    """bfloat16 for gradients that are casts of bf16 values: two bytes a value, no error."""

    facts: ClassVar[Facts] = _exact(
        torch.bfloat16,
        "exact_bf16",
        "the upper half of each fp32, where the graph proves that the lower half is zero",
        use="Chosen by `lossless` under bf16 autocast.",
        avoid=_REFUSED,
        source="IEEE fp32 cut to bfloat16",
    )


@register
@dataclass(frozen=True, slots=True)
class ExactFP16(ExactCast):
    """Half precision for gradients that are casts of fp16 values: two bytes a value, no error."""

    facts: ClassVar[Facts] = _exact(
        torch.float16,
        "exact_fp16",
        "half precision, where the graph proves that each fp32 is a cast of it",
        use="Chosen by `lossless` under fp16 autocast.",
        avoid=_REFUSED,
        source="IEEE 754 binary16",
    )


@register
@dataclass(frozen=True, slots=True)
class ExactFP32(ExactCast):
    """fp32 as it is, gathered, so that every rank adds in the order of the ranks."""

    facts: ClassVar[Facts] = _exact(
        torch.float32,
        "exact_fp32",
        "fp32 as it is, added in the order of the ranks",
        use='Chosen by `Compress(within="lossless", sums="ranks")`.',
        avoid="Where the order of a sum does not matter: all_reduce sends no more.",
        source="IEEE fp32",
    )
