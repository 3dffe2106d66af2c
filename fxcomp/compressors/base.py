"""Define a compressor: declared facts, a reference in plain torch, and a fused pair in place.

A compressor is a frozen dataclass under `@register`. It declares `facts`, says how large its payload is, and gives the
references, which are the specification; C++ and Triton kernels only make them faster. `catalogue.py` defines its ops.

A bucket is a flat fp32 tensor; `segments` are the sizes of its parameters, in order, and nothing mixes two of them. A
payload is one flat tensor whose size depends on `segments` alone, so it travels in one collective without a header.
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
"""The sizes of the segments of each piece."""


class Compressed(NamedTuple):
    """The result of `compress_reference`."""

    payload: Tensor
    residual: Tensor | None = None
    """None where none came in."""
    state: Tensor | None = None
    """The next step's; None where none came in, or where the summed payload is it."""


class Compressor(Declared):
    """A lossy map with parameters."""

    __slots__ = ()

    compress_op: ClassVar[OpOverload]
    decompress_op: ClassVar[OpOverload]
    propose_op: ClassVar[OpOverload | None]

    # The specification, in plain torch. It changes none of its arguments.

    @abstractmethod
    def compress_reference(self, given: EncoderInput) -> Compressed:
        """Compress v = bucket + residual; the new residual is what is left out, v - decompress(payload).

        Where v is not finite the payload decodes to something not finite, at least once in that segment, so that every
        rank sees it; and the residual stays as it was there.
        """

    @abstractmethod
    def decompress_reference(self, received: DecoderInput) -> Tensor:
        """The mean of what the payloads stand for: flat fp32.

        Summed in rank order and multiplied by fp32(1/ranks), so that every rank computes the same bits.
        """

    def propose_reference(self, given: EncoderInput) -> Tensor:
        """Make the proposal that ranks reduce before they compress, `proposal_elements` of `facts.proposal_dtype`."""
        raise NotImplementedError(f"{self.name} compresses without an agreement")

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        """The first step's state of one segment. `key` is the same on all ranks and differs between parameters."""
        return torch.zeros(self.state_elements(size), dtype=self.facts.state_dtype)

    def state_after(self, before: Compressor, size: int, state: Tensor, fresh: Tensor) -> Tensor:
        """Go on from the state of a segment of `size` values under other parameters; `fresh` is a new one's."""
        return state if state.shape == fresh.shape else fresh

    # Kernels. A package may bring its own: these return whether they did it.

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

    def propose_on_cuda(self, given: EncoderInput, out: Tensor) -> bool:
        return dispatch.propose(self, given, out)

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        """List the kernels' arguments after the tensors: how the bucket is cut, and the parameters."""
        return segments, len(segments), *self.parameters

    def _run_kernel(self, what: str, segments: tuple[int, ...], *tensors: Tensor | float | None) -> int | None:
        name = find_kernel(type(self), what)
        return None if name is None else kernels.run(name, *tensors, *self.kernel_arguments(what, segments))

    # The fused pair, in place: on kernels that allocate nothing of the bucket's size, where there are any.

    def encode(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> None:
        """Fill `payload`, replace `residual` and `state`."""
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
        """Fill `out` with the mean, flat fp32. `state` is what this step's encoding left."""
        received = DecoderInput(payloads, ranks, tuple(segments), agreed, state)
        check_decode(self, received, out)
        if kernels.can_run_on(out) and self.decode_on_cpu(received, out):
            return
        if not (dispatch.can_run_on(out) and self.decode_on_cuda(received, out)):
            out.copy_(self.decompress_reference(received))

    def propose(
        self, bucket: Tensor, residual: Tensor | None, segments: Sequence[int], state: Tensor | None, out: Tensor
    ) -> None:
        """Fill `out` with what the ranks are to reduce before they compress."""
        given = EncoderInput(bucket, residual, tuple(segments), state)
        check_propose(self, given, out)
        if kernels.can_run_on(bucket) and self.propose_on_cpu(given, out):
            return
        if not (dispatch.can_run_on(bucket) and self.propose_on_cuda(given, out)):
            out.copy_(self.propose_reference(given))


@cache
def find_kernel(kind: type[Compressor], what: str) -> str | None:
    """The kernel of csrc/ that does `what` (encode, decode or propose), if there is one; a plug-in has none there."""
    name = f"fxcomp_{kind.facts.name}_{what}"
    return name if kind.__module__.startswith(_OURS) and kernels.has(name) else None


def mean_over_ranks(decoded: Sequence[Tensor]) -> Tensor:
    """Sum in the order given, then multiply once: the same bits on every rank."""
    total = decoded[0]
    for other in decoded[1:]:
        total = total + other
    return total * (1.0 / len(decoded))
