"""Base class of compressors: declared facts, a reference in plain torch, and in-place `encode` and `decode`.

The reference is the specification: C++ and Triton kernels return the same bits.

A bucket is a flat fp32 tensor of parameters' gradients, and `segments` has each gradient's size. No computation mixes
two segments. A payload's size depends on `segments` alone, so one collective sends it without a header.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxcomp.compressors import kernels
from fxcomp.compressors.facts import Declared
from fxcomp.compressors.inputs import (
    DecoderInput,
    EncoderInput,
    bad_payload,
    check_decode,
    check_encode,
    check_propose,
)
from fxcomp.compressors.triton import dispatch

_OURS = "fxcomp.compressors."

Pieces = tuple[tuple[int, ...], ...]


class Compressed(NamedTuple):
    """Result of `compress_reference`."""

    payload: Tensor
    residual: Tensor | None = None
    state: Tensor | None = None
    """Next state; None without an input state, or if the summed payload becomes the state."""


class Compressor(Declared):
    """Base class of gradient compressors."""

    __slots__ = ()

    compress_op: ClassVar[OpOverload]
    decompress_op: ClassVar[OpOverload]
    propose_op: ClassVar[OpOverload | None]

    # Reference, in plain torch, without side effects

    @abstractmethod
    def compress_reference(self, given: EncoderInput) -> Compressed:
        """Compress v = bucket + residual; the new residual is v - decompress(payload).

        Non-finite values decode to non-finite values, which every rank detects, and their residuals stay unchanged.
        """

    @abstractmethod
    def decompress_reference(self, received: DecoderInput) -> Tensor:
        """Return the mean of the decoded payloads, flat fp32: the sum in rank order, multiplied by fp32(1/ranks)."""

    def propose_reference(self, given: EncoderInput) -> Tensor:
        """Compute this rank's proposal, which the ranks reduce before they compress."""
        raise NotImplementedError(f"{self.name} compresses without an agreement")

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        """Return a segment's initial state. `key`, equal on all ranks and unique per parameter, seeds random bits."""
        return torch.zeros(self.state_elements(size), dtype=self.facts.state_dtype)

    def state_after(self, before: Compressor, size: int, state: Tensor, fresh: Tensor) -> Tensor:
        """Convert a segment's state made by `before`, which has other parameters. If impossible, return `fresh`."""
        return state if state.shape == fresh.shape else fresh

    # Kernels, which a plug-in may override. They return False if the reference must run instead.

    def encode_on_cpu(self, given: EncoderInput, payload: Tensor) -> bool:
        tensors = (given.bucket, given.residual, payload, given.state, given.agreed)
        return self._run_kernel("encode", given.segments, *tensors) is not None

    def decode_on_cpu(self, received: DecoderInput, out: Tensor) -> bool:
        payloads, ranks, segments, agreed, state = received
        result = self._run_kernel("decode", segments, payloads, ranks, out, agreed, state)
        if result == 0:
            raise bad_payload(ranks, segments)
        return result is not None

    def propose_on_cpu(self, given: EncoderInput, out: Tensor) -> bool:
        return self._run_kernel("propose", given.segments, given.bucket, given.residual, given.state, out) is not None

    def encode_on_cuda(self, given: EncoderInput, payload: Tensor) -> bool:
        return dispatch.encode(self, given, payload)

    def decode_on_cuda(self, received: DecoderInput, out: Tensor) -> bool:
        return dispatch.decode(self, received, out)

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        return segments, len(segments), *self.parameters

    def _run_kernel(self, what: str, segments: tuple[int, ...], *tensors: Tensor | float | None) -> int | None:
        name = find_kernel(type(self), what)
        return None if name is None else kernels.run(name, *tensors, *self.kernel_arguments(what, segments))

    # In-place encode and decode

    def encode(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> None:
        """Fill `payload`, and overwrite `residual` and `state`."""
        given = EncoderInput(bucket, residual, tuple(segments), state, agreed)
        check_encode(self, given, payload)
        if kernels.can_run_on(bucket) and self.encode_on_cpu(given, payload):
            return
        if dispatch.can_run_on(bucket) and self.encode_on_cuda(given, payload):
            return
        new = self.compress_reference(given)
        payload.copy_(new.payload)
        if residual is not None and new.residual is not None:
            residual.copy_(new.residual)
        if state is not None and new.state is not None:
            state.copy_(new.state)

    def decode(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        out: Tensor,
        agreed: Tensor | None = None,
        state: Tensor | None = None,
    ) -> None:
        """Fill `out` with the mean over ranks, flat fp32."""
        received = DecoderInput(payloads, ranks, tuple(segments), agreed, state)
        check_decode(self, received, out)
        if kernels.can_run_on(out) and self.decode_on_cpu(received, out):
            return
        if not (dispatch.can_run_on(out) and self.decode_on_cuda(received, out)):
            out.copy_(self.decompress_reference(received))

    def propose(
        self, bucket: Tensor, residual: Tensor | None, segments: Sequence[int], state: Tensor | None, out: Tensor
    ) -> None:
        """Fill `out` with this rank's proposal."""
        given = EncoderInput(bucket, residual, tuple(segments), state)
        check_propose(self, given, out)
        if kernels.can_run_on(bucket) and self.propose_on_cpu(given, out):
            return
        if not (dispatch.can_run_on(bucket) and dispatch.propose(self, given, out)):
            out.copy_(self.propose_reference(given))


@cache
def find_kernel(kind: type[Compressor], what: str) -> str | None:
    """Return the name of a compressor's kernel in csrc/, or None."""
    name = f"fxcomp_{kind.facts.name}_{what}"
    return name if kind.__module__.startswith(_OURS) and kernels.has(name) else None


def mean_over_ranks(decoded: Sequence[Tensor]) -> Tensor:
    """Sum decoded payloads in the given order, then multiply once by 1 / ranks."""
    total = decoded[0]
    for other in decoded[1:]:
        total = total + other
    return total * (1.0 / len(decoded))
