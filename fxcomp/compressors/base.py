"""What every compressor is: declared facts, a functional op pair for the graph, and a fused pair for emitted code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxcomp.errors import BadOption


class BadCompressor(BadOption, ValueError):
    """A compressor that does not exist, or a parameter that it cannot have."""


class Compressor(Protocol):
    """A lossy map with parameters; a frozen dataclass whose `str` parses back with `parse_compressor`.

    A bucket is a flat fp32 tensor; `segments` are the sizes of its parameters, in order. A payload is one flat tensor
    of `payload_dtype` whose size depends on `segments` alone, so that it travels in one collective without a header.
    """

    name: ClassVar[str]
    is_linear: ClassVar[bool]
    """Payloads can be summed on the wire (all_reduce); otherwise they are gathered and decoded together."""
    needs_error_feedback: ClassVar[bool]
    """What compression leaves out must be carried to the next step."""
    payload_dtype: ClassVar[torch.dtype]
    compress_op: ClassVar[OpOverload]
    """`fxcomp::<name>_compress(bucket, residual?, segments, *parameters) -> (payload, new_residual)`.

    Functional: compresses v = bucket + residual (v = bucket without a residual) and returns what is left out,
    v - decompress(payload); without a residual the second result is an empty tensor.
    """
    decompress_op: ClassVar[OpOverload]
    """`fxcomp::<name>_decompress(payloads, ranks, segments, *parameters) -> mean`.

    `payloads` are `ranks` payloads one behind the other; the result is the mean of what they stand for, flat fp32,
    summed in rank order and multiplied by fp32(1/ranks), so that every rank computes the same bits. A linear
    compressor's summed payload comes with ranks=1.
    """

    @property
    def parameters(self) -> tuple[int | float, ...]:
        """The values behind `segments` in the op's schema."""
        ...

    def payload_elements(self, segments: Sequence[int]) -> int:
        """Size of the payload in elements of `payload_dtype`."""
        ...

    def payload_bytes(self, segments: Sequence[int]) -> int:
        """Size of the payload in bytes, exactly."""
        ...

    def encode(self, bucket: Tensor, residual: Tensor | None, payload: Tensor, segments: Sequence[int]) -> None:
        """`compress_op` fused and in place: fills `payload`, replaces `residual`, allocates nothing of bucket size.

        Where v is not finite the payload decodes to something not finite, and the residual stays as it was.
        """
        ...

    def decode(self, payloads: Tensor, ranks: int, segments: Sequence[int], out: Tensor) -> None:
        """`decompress_op` in place: fills `out`, flat fp32."""
        ...


def mean_over_ranks(decoded: Sequence[Tensor]) -> Tensor:
    """Sum in the order given, then multiply once: the same bits on every rank."""
    total = decoded[0]
    for other in decoded[1:]:
        total = total + other
    return total * (1.0 / len(decoded))


def check_encode(
    compressor: Compressor, bucket: Tensor, residual: Tensor | None, payload: Tensor, segments: Sequence[int]
) -> None:
    """Assert what a kernel takes for granted, before it gets raw pointers."""
    _check_flat(bucket, torch.float32, sum(segments), "bucket")
    if residual is not None:
        _check_flat(residual, torch.float32, sum(segments), "residual")
    _check_flat(payload, compressor.payload_dtype, compressor.payload_elements(segments), "payload")


def check_decode(compressor: Compressor, payloads: Tensor, ranks: int, segments: Sequence[int], out: Tensor) -> None:
    """Assert what a kernel takes for granted, before it gets raw pointers."""
    assert ranks >= 1, f"there is no mean over {ranks} ranks"
    _check_flat(payloads, compressor.payload_dtype, ranks * compressor.payload_elements(segments), "payloads")
    _check_flat(out, torch.float32, sum(segments), "out")


def _check_flat(tensor: Tensor, dtype: torch.dtype, elements: int, what: str) -> None:
    assert tensor.dtype is dtype, f"the {what} must be {dtype}, not {tensor.dtype}"
    assert tensor.numel() == elements, f"the {what} must have {elements} elements, not {tensor.numel()}"
    assert tensor.is_contiguous(), f"the {what} must be contiguous"
