"""Inputs of a compressor, and the checks before kernels get raw pointers.

Sizes are cached, because the checks run on every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from fxcomp.compressors.facts import Declared
from fxcomp.errors import BadTensor


class EncoderInput(NamedTuple):
    """Input of `encode` and `propose` on one rank."""

    bucket: Tensor
    residual: Tensor | None
    segments: tuple[int, ...]
    """Number of values of each parameter."""
    state: Tensor | None = None
    agreed: Tensor | None = None
    """Reduction of the ranks' proposals."""

    @property
    def value(self) -> Tensor:
        """v, the vector to compress: bucket + residual."""
        return self.bucket if self.residual is None else self.bucket + self.residual

    @property
    def pieces(self) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(self.value, self.segments)


class DecoderInput(NamedTuple):
    """Input of `decode`: payloads of `ranks` ranks, or a linear compressor's summed payload with ranks=1."""

    payloads: Tensor
    ranks: int
    segments: tuple[int, ...]
    agreed: Tensor | None = None
    state: Tensor | None = None
    """State after encoding; needed only if `facts.decode_needs_state`."""

    @property
    def of_ranks(self) -> tuple[Tensor, ...]:
        return self.payloads.view(self.ranks, -1).unbind()


def check_encode(compressor: Declared, given: EncoderInput, payload: Tensor) -> None:
    call = _Call(compressor, "encode", given.segments, given.bucket.device)
    _check_bucket(call, given)
    call.check(payload, compressor.payload_dtype, _payload_elements(compressor, given.segments), "payload")
    _check_state(call, given.state)
    _check_agreed(call, given.agreed)


def check_propose(compressor: Declared, given: EncoderInput, out: Tensor) -> None:
    call = _Call(compressor, "propose", given.segments, given.bucket.device)
    _check_bucket(call, given)
    if given.state is not None or compressor.facts.state_from_payload:  # needed to compute the proposal
        _check_state(call, given.state)
    call.check(out, compressor.facts.proposal_dtype, _proposal_elements(compressor, given.segments), "proposal")


def check_decode(compressor: Declared, received: DecoderInput, out: Tensor) -> None:
    ranks, segments = received.ranks, received.segments
    call = _Call(compressor, "decode", segments, out.device)
    check_segments(compressor, segments)
    if ranks < 1:
        call.refuse(f"there is no mean over {ranks} ranks", "Give the number of ranks whose payloads these are")
    call.check(received.payloads, compressor.payload_dtype, ranks * _payload_elements(compressor, segments), "payloads")
    call.check(out, torch.float32, sum(segments), "out")
    if received.state is not None or compressor.facts.decode_needs_state:
        _check_state(call, received.state)
    _check_agreed(call, received.agreed)


def check_segments(compressor: Declared, segments: Sequence[int]) -> None:
    """Raise BadTensor for a negative size, which would move other segments outside the bucket."""
    if segments and min(segments) < 0:
        index = next(index for index, size in enumerate(segments) if size < 0)
        what = f"segment {index} has {segments[index]} values"
        _Call(compressor, "use", segments, None).refuse(what, "Give the number of values of each parameter, 0 or more")


def check_not_mixed(compressor: Declared, segments: Sequence[int], first: Tensor, *others: Tensor | None) -> None:
    """Raise BadTensor if only some tensors are on meta, because torch would run the op's fake on the others."""
    for other in others:
        if other is not None and (other.device.type == "meta") != (first.device.type == "meta"):
            what = f"tensors are on {first.device} and on {other.device}"
            _Call(compressor, "use", segments, None).refuse(what, f"Move them all with .to({str(first.device)!r})")


def bad_payload(ranks: int, segments: Sequence[int]) -> BadTensor:
    return BadTensor(
        "a payload names places outside its segment.\n"
        f"  decoded  {_count(ranks, 'payload')}, for {_in_short(segments)}\n"
        "  Run the same version of fxcomp with the same plan on every rank; if so, the payload was damaged on the way."
    )


@lru_cache(maxsize=4096)
def _payload_elements(compressor: Declared, segments: tuple[int, ...]) -> int:
    return compressor.payload_elements(segments)


@lru_cache(maxsize=4096)
def _proposal_elements(compressor: Declared, segments: tuple[int, ...]) -> int:
    return compressor.proposal_elements(segments)


@lru_cache(maxsize=4096)
def _state_elements(compressor: Declared, segments: tuple[int, ...]) -> int:
    return compressor.all_state_elements(segments)


class _Call(NamedTuple):
    """Description of a call for error messages, and its device."""

    compressor: Declared
    verb: str
    segments: Sequence[int]
    device: torch.device | None

    def check(self, tensor: Tensor, dtype: torch.dtype, elements: int, name: str) -> None:
        if tensor.dtype is not dtype:
            self.refuse(f"the {name} must be {dtype}, not {tensor.dtype}", f"Convert it with .to({dtype})")
        if tensor.numel() != elements:
            what = f"the {name} must have {_count(elements, 'element')}, not {tensor.numel()}"
            self.refuse(what, "Make it for these segments, or pass the segments it was made for")
        if not tensor.is_contiguous():
            self.refuse(f"the {name} must be contiguous", "Give it as .contiguous()")
        if tensor.device != self.device:
            what = f"the {name} must be on {self.device}, not on {tensor.device}"
            self.refuse(what, f"Move it with .to({str(self.device)!r})")

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise BadTensor(f"{what}.\n  {self.verb}  {self.compressor}, for {_in_short(self.segments)}\n  {remedy}.")


def _check_bucket(call: _Call, given: EncoderInput) -> None:
    check_segments(call.compressor, given.segments)
    size = sum(given.segments)
    call.check(given.bucket, torch.float32, size, "bucket")
    if given.residual is not None:
        call.check(given.residual, torch.float32, size, "residual")


def _check_state(call: _Call, state: Tensor | None) -> None:
    compressor = call.compressor
    if (state is not None) != compressor.has_state:
        if state is None:
            call.refuse(f"{compressor.name} needs its state", "Give state=, at first the result of fresh_state")
        call.refuse(f"{compressor.name} has no state", "Leave state= out")
    if state is not None:
        call.check(state, compressor.facts.state_dtype, _state_elements(compressor, tuple(call.segments)), "state")


def _check_agreed(call: _Call, agreed: Tensor | None) -> None:
    compressor = call.compressor
    if (agreed is not None) != (compressor.facts.agreement is not None):
        if agreed is None:
            what = f"{compressor.name} needs the agreement of the ranks"
            call.refuse(what, "Give agreed=: the reduction of the ranks' proposals")
        call.refuse(f"{compressor.name} works without an agreement", "Leave agreed= out")
    if agreed is not None:
        elements = _proposal_elements(compressor, tuple(call.segments))
        call.check(agreed, compressor.facts.proposal_dtype, elements, "agreement")


def _in_short(segments: Sequence[int]) -> str:
    shown = ", ".join(map(str, segments[:4])) + (", ..." if len(segments) > 4 else "")
    return f"{_count(len(segments), 'segment')} of {shown} values" if segments else "no segments"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
