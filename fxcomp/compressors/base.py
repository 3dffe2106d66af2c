"""What every compressor is: declared facts, a functional op pair for the graph, and a fused pair for emitted code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload


class Compressor(Protocol):
    """A lossy map with parameters; a frozen dataclass whose `str` parses back with `parse_compressor`.

    A bucket is a flat fp32 tensor; `segments` are the sizes of its parameters, in order. A payload is one flat tensor of
    `payload_dtype` whose size depends on `segments` alone, so that it travels in one collective without a header.
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
    summed in rank order, so that every rank computes the same bits. A linear compressor's summed payload comes with ranks=1.
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
        """`compress_op` fused and in place: fills `payload`, replaces `residual`, allocates nothing of bucket size."""
        ...

    def decode(self, payloads: Tensor, ranks: int, segments: Sequence[int], out: Tensor) -> None:
        """`decompress_op` in place: fills `out`, flat fp32."""
        ...
