"""What every compressor is: declared facts, a reference in plain torch, functional ops, and a fused pair in place.

A compressor is a frozen dataclass under `@register`. It declares `facts`, says how large its payload is, and gives the
references, which are the specification; C++ and Triton kernels only make them faster. `register` defines its ops:

    fxcomp::<name>_compress(bucket, residual?, segments, *parameters, *, state?, agreed?) -> (payload, residual, state)
    fxcomp::<name>_decompress(payloads, ranks, segments, *parameters, *, agreed?, state?) -> mean
    fxcomp::<name>_propose(bucket, residual?, segments, *parameters, *, state?) -> proposal     where ranks agree first

A bucket is a flat fp32 tensor; `segments` are the sizes of its parameters, in order, and nothing mixes two of them. A
payload is one flat tensor whose size depends on `segments` alone, so it travels in one collective without a header.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxcomp.compressors import kernels, triton
from fxcomp.compressors.facts import Bias, Facts, Feedback
from fxcomp.compressors.fields import checked, fields_of, text_of
from fxcomp.errors import BadOption, BadPayload, BadTensor


class BadCompressor(BadOption, ValueError):
    """A compressor that does not exist, or a parameter that it cannot have."""


class Compressed(NamedTuple):
    """What `compress_reference` returns. `residual` and `state` are empty where none came in."""

    payload: Tensor
    residual: Tensor
    state: Tensor


class Compressor(ABC):
    """A lossy map with parameters; a frozen dataclass whose `str` parses back with `parse_compressor`.

    A field is a parameter if `facts.parameters` names it; other fields are what `bound_to` filled in.
    """

    __slots__ = ()

    facts: ClassVar[Facts]
    compress_op: ClassVar[OpOverload]
    decompress_op: ClassVar[OpOverload]
    propose_op: ClassVar[OpOverload | None]

    # What a compressor is

    @abstractmethod
    def payload_elements(self, segments: Sequence[int]) -> int:
        """Size of the payload in elements of `payload_dtype`."""

    @abstractmethod
    def compress_reference(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> Compressed:
        """Compress v = bucket + residual; the new residual is what is left out, v - decompress(payload).

        Where v is not finite the payload decodes to something not finite, at least once in that segment, so that every
        rank sees it; and the residual stays as it was there. Changes none of its arguments.
        """

    @abstractmethod
    def decompress_reference(
        self, payloads: Tensor, ranks: int, segments: Sequence[int], agreed: Tensor | None, state: Tensor | None
    ) -> Tensor:
        """The mean of what `ranks` payloads, one behind the other, stand for: flat fp32.

        Summed in rank order and multiplied by fp32(1/ranks), so that every rank computes the same bits. A linear
        compressor's summed payload comes with ranks=1: its bucket was scaled before.

        `state` comes where `facts.decode_needs_state`: what this step's compression returned, one step raised already.
        """

    def propose_reference(
        self, bucket: Tensor, residual: Tensor | None, segments: Sequence[int], state: Tensor | None
    ) -> Tensor:
        """What ranks reduce before they compress, `proposal_elements` of `facts.proposal_dtype`."""
        raise NotImplementedError(f"{self.name} compresses without an agreement")

    def proposal_elements(self, segments: Sequence[int]) -> int:
        return 0

    def state_elements(self, size: int) -> int:
        """State of one segment of `size` values, in elements of `facts.state_dtype`; segments' states lie in order."""
        return 0

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        """The first step's state of one segment. `key` is the same on all ranks and differs between parameters."""
        return torch.zeros(self.state_elements(size), dtype=self.facts.state_dtype)

    def bound_to(self, shapes: Sequence[Sequence[int]], ranks: int) -> Self:
        """The compressor for a bucket of parameters of these shapes, averaged over so many ranks."""
        return self

    def of_segment(self, index: int) -> Self:
        """The compressor for one segment of the bucket that it was bound to: ask it for that segment's state."""
        return self

    @property
    def feedback(self) -> Feedback:
        """With these parameters."""
        return self.facts.feedback

    @property
    def bias(self) -> Bias:
        """With these parameters."""
        return self.facts.bias

    @property
    def sends_values(self) -> bool:
        """With these parameters."""
        return self.facts.sends_values

    # Kernels: they return whether they did it

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        return False

    def decode_on_cpu(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        out: Tensor,
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> bool:
        return False

    def propose_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        out: Tensor,
    ) -> bool:
        return False

    def encode_on_cuda(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        return triton.encode(self, bucket, residual, payload, segments, state, agreed)

    def decode_on_cuda(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        out: Tensor,
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> bool:
        return triton.decode(self, payloads, ranks, segments, out, agreed, state)

    def propose_on_cuda(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        out: Tensor,
    ) -> bool:
        return triton.propose(self, bucket, residual, segments, state, out)

    # What follows from it

    def __post_init__(self) -> None:
        declared = fields_of(type(self))
        for parameter in self.facts.parameters:
            try:
                value = checked(declared[parameter.name], getattr(self, parameter.name))
            except ValueError as error:
                raise BadCompressor(f"{self.name}: {error}") from None
            object.__setattr__(self, parameter.name, value)
            if not parameter.low <= value <= parameter.high:
                raise BadCompressor(
                    f"{self.name} needs {parameter.name} from {parameter.low:g} to {parameter.high:g}, not {value}"
                )

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def is_linear(self) -> bool:
        return self.facts.is_linear

    @property
    def payload_dtype(self) -> torch.dtype:
        return self.facts.payload_dtype

    @property
    def needs_error_feedback(self) -> bool:
        return self.feedback is Feedback.REQUIRED

    @property
    def has_state(self) -> bool:
        return self.facts.state != "none"

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The values behind `segments` in the ops' schemas: all fields, in order."""
        return tuple(getattr(self, field.name) for field in _fields(self))

    def payload_bytes(self, segments: Sequence[int]) -> int:
        """Size of the payload in bytes, exactly."""
        return self.payload_elements(segments) * self.payload_dtype.itemsize

    def state_bytes(self, segments: Sequence[int]) -> int:
        """Bytes kept from step to step besides the residual."""
        return self.all_state_elements(segments) * self.facts.state_dtype.itemsize

    def all_state_elements(self, segments: Sequence[int]) -> int:
        """The state of a bucket: its segments' states, one behind the other."""
        return sum(self.of_segment(index).state_elements(size) for index, size in enumerate(segments))

    def proposal_bytes(self, segments: Sequence[int]) -> int:
        return self.proposal_elements(segments) * self.facts.proposal_dtype.itemsize

    def encode(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> None:
        """Compress in place: fill `payload`, replace `residual` and `state`; kernels allocate nothing of their size."""
        check_encode(self, bucket, residual, payload, segments, state, agreed)
        if kernels.can_run_on(bucket) and self.encode_on_cpu(bucket, residual, payload, segments, state, agreed):
            return
        if triton.can_run_on(bucket) and self.encode_on_cuda(bucket, residual, payload, segments, state, agreed):
            return
        new = self.compress_reference(bucket, residual, segments, state, agreed)
        payload.copy_(new.payload)
        if residual is not None:
            residual.copy_(new.residual)
        if state is not None and not self.facts.state_from_payload:
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
        """Decompress in place: fill `out`, flat fp32. `state` is what this step's encoding left."""
        check_decode(self, payloads, ranks, segments, out, agreed, state)
        if kernels.can_run_on(out) and self.decode_on_cpu(payloads, ranks, segments, out, agreed, state):
            return
        if not (triton.can_run_on(out) and self.decode_on_cuda(payloads, ranks, segments, out, agreed, state)):
            out.copy_(self.decompress_reference(payloads, ranks, segments, agreed, state))

    def propose(
        self, bucket: Tensor, residual: Tensor | None, segments: Sequence[int], state: Tensor | None, out: Tensor
    ) -> None:
        """Fill `out` with what the ranks are to reduce before they compress."""
        check_propose(self, bucket, residual, segments, state, out)
        if kernels.can_run_on(bucket) and self.propose_on_cpu(bucket, residual, segments, state, out):
            return
        if not (triton.can_run_on(bucket) and self.propose_on_cuda(bucket, residual, segments, state, out)):
            out.copy_(self.propose_reference(bucket, residual, segments, state))

    def __str__(self) -> str:
        public = {parameter.name for parameter in self.facts.parameters}
        parts = [
            text_of(getattr(self, field.name))
            if field.default is MISSING
            else f"{field.name}={text_of(getattr(self, field.name))}"
            for field in _fields(self)
            if field.name in public and getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(parts)})" if parts else self.name


def _fields(compressor: Any) -> tuple[Field[Any], ...]:
    return fields(compressor)


def mean_over_ranks(decoded: Sequence[Tensor]) -> Tensor:
    """Sum in the order given, then multiply once: the same bits on every rank."""
    total = decoded[0]
    for other in decoded[1:]:
        total = total + other
    return total * (1.0 / len(decoded))


def empty_like_none(bucket: Tensor, value: Tensor | None) -> Tensor:
    """`value`, or the empty tensor that stands for none in an op's results."""
    return bucket.new_empty(0) if value is None else value


def bad_payload(names: str, ranks: int, segments: Sequence[int]) -> BadPayload:
    """The error for a payload that a kernel refused; `names` is what cannot be in it."""
    return BadPayload(
        f"a payload names {names}.\n"
        f"  decoded  {_count(ranks, 'payload')}, for {_in_short(segments)}\n"
        "  Run the same version of fxcomp with the same plan on every rank; if so, the payload was damaged on the way."
    )


# What a kernel takes for granted, checked before it gets raw pointers; on every step, so an error's text is made last.


def check_encode(
    compressor: Compressor,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: Sequence[int],
    state: Tensor | None,
    agreed: Tensor | None = None,
) -> None:
    """Raise BadTensor if these are not what `encode` takes."""
    call = _Call(compressor, "encode", segments, bucket.device)
    _check_input(call, bucket, residual)
    call.check(payload, compressor.payload_dtype, _payload_elements(compressor, tuple(segments)), "payload")
    _check_state(call, state)
    _check_agreed(call, agreed)


def check_propose(
    compressor: Compressor,
    bucket: Tensor,
    residual: Tensor | None,
    segments: Sequence[int],
    state: Tensor | None,
    out: Tensor,
) -> None:
    """Raise BadTensor if these are not what `propose` takes."""
    call = _Call(compressor, "propose", segments, bucket.device)
    _check_input(call, bucket, residual)
    if state is not None or compressor.facts.state_from_payload:  # it is what the ranks propose from
        _check_state(call, state)
    call.check(out, compressor.facts.proposal_dtype, _proposal_elements(compressor, tuple(segments)), "proposal")


def check_decode(
    compressor: Compressor,
    payloads: Tensor,
    ranks: int,
    segments: Sequence[int],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> None:
    """Raise BadTensor if these are not what `decode` takes."""
    call = _Call(compressor, "decode", segments, out.device)
    check_segments(compressor, segments)
    if ranks < 1:
        call.refuse(f"there is no mean over {ranks} ranks", "Give the number of ranks whose payloads these are")
    call.check(payloads, compressor.payload_dtype, ranks * _payload_elements(compressor, tuple(segments)), "payloads")
    call.check(out, torch.float32, sum(segments), "out")
    if state is not None or compressor.facts.decode_needs_state:
        _check_state(call, state)
    _check_agreed(call, agreed)


def check_segments(compressor: Compressor, segments: Sequence[int]) -> None:
    """Raise BadTensor if one has less than no values: the others would lie outside the bucket."""
    if segments and min(segments) < 0:
        index = next(index for index, size in enumerate(segments) if size < 0)
        what = f"segment {index} has {segments[index]} values"
        _Call(compressor, "use", segments, None).refuse(what, "Give the number of values of each parameter, 0 or more")


def check_not_mixed(compressor: Compressor, segments: Sequence[int], first: Tensor, *others: Tensor | None) -> None:
    """Raise BadTensor if some are on meta and some are not: torch gives an op's fake real tensors then."""
    for other in others:
        if other is not None and (other.device.type == "meta") != (first.device.type == "meta"):
            what = f"tensors are on {first.device} and on {other.device}"
            _Call(compressor, "use", segments, None).refuse(what, f"Move them all with .to({str(first.device)!r})")


# Sizes are asked for at every step, and take a few microseconds a segment to work out.


@lru_cache(maxsize=4096)
def _payload_elements(compressor: Compressor, segments: tuple[int, ...]) -> int:
    return compressor.payload_elements(segments)


@lru_cache(maxsize=4096)
def _proposal_elements(compressor: Compressor, segments: tuple[int, ...]) -> int:
    return compressor.proposal_elements(segments)


@lru_cache(maxsize=4096)
def _state_elements(compressor: Compressor, segments: tuple[int, ...]) -> int:
    return compressor.all_state_elements(segments)


class _Call(NamedTuple):
    """What is being done, for the text of an error, and where the tensors must lie."""

    compressor: Compressor
    verb: str
    segments: Sequence[int]
    device: torch.device | None

    def check(self, tensor: Tensor, dtype: torch.dtype, elements: int, name: str) -> None:
        if tensor.dtype is not dtype:
            self.refuse(f"the {name} must be {dtype}, not {tensor.dtype}", f"Convert it with .to({dtype})")
        if tensor.numel() != elements:
            what = f"the {name} must have {_count(elements, 'element')}, not {tensor.numel()}"
            self.refuse(what, "Make it for these segments; they must be those that it was made for")
        if not tensor.is_contiguous():
            self.refuse(f"the {name} must be contiguous", "Give it as .contiguous()")
        if tensor.device != self.device:
            what = f"the {name} must be on {self.device}, not on {tensor.device}"
            self.refuse(what, f"Move it with .to({str(self.device)!r})")

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise BadTensor(f"{what}.\n  {self.verb}  {self.compressor}, for {_in_short(self.segments)}\n  {remedy}.")


def _check_input(call: _Call, bucket: Tensor, residual: Tensor | None) -> None:
    check_segments(call.compressor, call.segments)
    size = sum(call.segments)
    call.check(bucket, torch.float32, size, "bucket")
    if residual is not None:
        call.check(residual, torch.float32, size, "residual")


def _check_state(call: _Call, state: Tensor | None) -> None:
    compressor = call.compressor
    if (state is not None) != compressor.has_state:
        if state is None:
            call.refuse(f"{compressor.name} needs its state", "Give state=, at first what fresh_state returns")
        call.refuse(f"{compressor.name} has no state", "Leave state= out")
    if state is not None:
        call.check(state, compressor.facts.state_dtype, _state_elements(compressor, tuple(call.segments)), "state")


def _check_agreed(call: _Call, agreed: Tensor | None) -> None:
    compressor = call.compressor
    if (agreed is not None) != (compressor.facts.agreement is not None):
        if agreed is None:
            what = f"{compressor.name} needs what the ranks agreed on"
            call.refuse(what, "Give agreed=: what the ranks' proposals reduce to")
        call.refuse(f"{compressor.name} works without an agreement", "Leave agreed= out")
    if agreed is not None:
        elements = _proposal_elements(compressor, tuple(call.segments))
        call.check(agreed, compressor.facts.proposal_dtype, elements, "agreement")


def _in_short(segments: Sequence[int]) -> str:
    shown = ", ".join(map(str, segments[:4])) + (", ..." if len(segments) > 4 else "")
    return f"{_count(len(segments), 'segment')} of {shown} values" if segments else "no segments"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
