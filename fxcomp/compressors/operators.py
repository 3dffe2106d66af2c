"""Operators of a compressor, which run its `encode`, `decode` and `propose` on fresh tensors.

A bucket may be compressed in pieces, one for each destination rank. `pieces` is the number of segments in each piece,
and the payloads of pieces are concatenated:

    pieces (2, 1), segments (4, 8, 3)      the payload of segments (4, 8), then the payload of (3,)

Decoding reads, for each piece in order, the payloads of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from fxcomp.compressors.base import Compressor
from fxcomp.compressors.facts import SCHEMA, fields_of
from fxcomp.compressors.inputs import DecoderInput, EncoderInput, check_not_mixed, check_segments
from fxcomp.compressors.triton import dispatch

Segments = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Segment sizes of a bucket, or of each piece."""


def in_pieces(segments: Sequence[int], pieces: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Group segments. `pieces` has each piece's number of segments; None makes one piece of all."""
    if pieces is None:
        return (tuple(segments),)
    ends = [sum(pieces[: k + 1]) for k in range(len(pieces))]
    return tuple(tuple(segments[end - count : end]) for end, count in zip(ends, pieces, strict=True))


def as_pieces(segments: Segments) -> tuple[tuple[int, ...], ...]:
    nested = tuple(each for each in segments if isinstance(each, tuple))
    return nested or (tuple(size for size in segments if isinstance(size, int)),)


def payload_elements(compressor: Compressor, pieces: Sequence[tuple[int, ...]]) -> int:
    return sum(map(compressor.payload_elements, pieces))


def encode(compressor: Compressor, given: EncoderInput, payload: Tensor, pieces: Sequence[tuple[int, ...]]) -> None:
    if len(pieces) == 1 or compressor.facts.is_joined:
        bucket, residual, segments, state, agreed = given
        compressor.encode(bucket, residual, payload, segments, state, agreed)
        return
    if dispatch.can_run_on(given.bucket) and dispatch.encode_pieces(compressor, given, payload, tuple(pieces)):
        return
    values, sent, states = _PieceReader(given.bucket), _PieceReader(payload), _PieceReader(given.state)
    residuals = _PieceReader(given.residual)
    for piece in pieces:
        if piece:
            kept = states.next(compressor.all_state_elements(piece))
            part, left = values.next(sum(piece)), residuals.next(sum(piece))
            assert part is not None, "a piece has values"
            room = sent.next(compressor.payload_elements(piece))
            assert room is not None, "a piece has a payload"
            compressor.encode(part, left, room, piece, kept)


def decode(compressor: Compressor, received: DecoderInput, out: Tensor, pieces: Sequence[tuple[int, ...]]) -> None:
    """Fill `out` with the mean over ranks of each piece's payloads."""
    payloads, ranks, segments, agreed, state = received
    if len(pieces) == 1 or (ranks == 1 and compressor.facts.is_joined):
        compressor.decode(payloads, ranks, segments, out, agreed, state)
        return
    if dispatch.can_run_on(out) and dispatch.decode_pieces(compressor, received, out, tuple(pieces)):
        return
    sent, means = _PieceReader(payloads), _PieceReader(out)
    for piece in pieces:
        if piece:
            part, mean = sent.next(ranks * compressor.payload_elements(piece)), means.next(sum(piece))
            assert part is not None, "a piece has payloads"
            assert mean is not None, "a piece has values"
            compressor.decode(part, ranks, piece, mean)


class _PieceReader:
    def __init__(self, whole: Tensor | None) -> None:
        self._whole, self._at = whole, 0

    def next(self, elements: int) -> Tensor | None:
        start, self._at = self._at, self._at + elements
        return None if self._whole is None else self._whole[start : self._at]


# Library.define and impl take 5 us per op; the custom_op decorator takes 45.  # measured, torch 2.13, 2026-11
_library: Any = Library("fxcomp", "FRAGMENT")

_times: Counter[str] = Counter()

ARGUMENTS = ("bucket", "residual", "segments", "state", "agreed", "payloads", "ranks", "pieces")
"""Argument names that compressors' fields cannot have."""


def define_ops(kind: type[Compressor]) -> tuple[OpOverload, OpOverload, OpOverload | None]:
    """Define the ops that compress, decompress and propose. An op's fake allocates the results; the op fills them."""
    make, name = cast(Callable[..., Compressor], kind), kind.facts.name
    parameters = "".join(f", {SCHEMA[field.type]} {field.name}" for field in fields_of(kind).values())
    bucket = f"(Tensor bucket, Tensor? residual, int[] segments{parameters}, *, Tensor? state=None"

    def made(values: tuple[Any, ...], segments: Sequence[int], first: Tensor, *others: Tensor | None) -> Compressor:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, first, *others)
        return compressor

    def fake_compress(
        bucket: Tensor, residual: Tensor | None, segments: Sequence[int], *values: Any, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = named.get("state")
        compressor = made(values, segments, bucket, residual, state, named.get("agreed"))
        elements = payload_elements(compressor, in_pieces(segments, named.get("pieces")))
        payload = bucket.new_empty(elements, dtype=compressor.payload_dtype)
        new_residual = bucket.new_empty(0 if residual is None else sum(segments))
        return payload, new_residual, bucket.new_empty(0) if state is None else torch.empty_like(state)

    def compress(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
        agreed: Tensor | None = None,
        pieces: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        payload = fake_compress(bucket, None, segments, *values, pieces=pieces)[0]
        new_residual, new_state = _copy(residual), _copy(state)
        given = EncoderInput(bucket.contiguous(), new_residual, tuple(segments), new_state, _flat(agreed))
        encode(make(*values), given, payload, in_pieces(segments, pieces))
        return payload, or_empty(new_residual, bucket), or_empty(new_state, bucket)

    def fake_decompress(payloads: Tensor, _: int, segments: Sequence[int], *values: Any, **named: Any) -> Tensor:
        made(values, segments, payloads, named.get("agreed"), named.get("state"))
        return payloads.new_empty(sum(segments), dtype=torch.float32)

    def decompress(
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        *values: Any,
        agreed: Tensor | None = None,
        state: Tensor | None = None,
        pieces: Sequence[int] | None = None,
    ) -> Tensor:
        out = fake_decompress(payloads, ranks, segments, *values)
        received = DecoderInput(payloads.contiguous(), ranks, tuple(segments), _flat(agreed), _flat(state))
        decode(make(*values), received, out, in_pieces(segments, pieces))
        return out

    def fake_propose(
        bucket: Tensor, residual: Tensor | None, segments: Sequence[int], *values: Any, state: Tensor | None = None
    ) -> Tensor:
        compressor = made(values, segments, bucket, residual, state)
        return bucket.new_empty(compressor.proposal_elements(segments), dtype=compressor.facts.proposal_dtype)

    def propose(
        bucket: Tensor, residual: Tensor | None, segments: Sequence[int], *values: Any, state: Tensor | None = None
    ) -> Tensor:
        out = fake_propose(bucket, residual, segments, *values)
        make(*values).propose(bucket.contiguous(), _flat(residual), segments, _flat(state), out)
        return out

    compress_schema = f"{bucket}, Tensor? agreed=None, int[]? pieces=None) -> (Tensor, Tensor, Tensor)"
    decompress_schema = f"(Tensor payloads, int ranks, int[] segments{parameters}, *, Tensor? agreed=None, "
    decompress_schema += "Tensor? state=None, int[]? pieces=None) -> Tensor"
    agrees = kind.facts.agreement is not None
    return (
        _define(f"{name}_compress", compress_schema, compress, fake_compress),
        _define(f"{name}_decompress", decompress_schema, decompress, fake_decompress),
        _define(f"{name}_propose", f"{bucket}) -> Tensor", propose, fake_propose) if agrees else None,
    )


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    # A new name, because torch 2.13 aborts when it destroys a library with overloads of one op.
    full = f"{name}_again_{_times[name]}" if _times[name] else name
    _times[name] += 1
    _library.define(full + schema)
    _library.impl(full, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxcomp::{full}", fake, lib=_library)  # pyright: ignore[reportUnknownMemberType]
    return getattr(torch.ops.fxcomp, full).default


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor
