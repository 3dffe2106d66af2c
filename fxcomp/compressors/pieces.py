"""Compress a value in pieces, each by itself, one payload after the other: each goes to another rank.

    pieces (2, 1), segments (4, 8, 3)      the payload of segments (4, 8), then that of (3,)

Residual and state lie as the values do. Decoding takes the pieces' payloads in the same order, with those of all ranks
for one piece after each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxcomp.compressors.base import Compressor
from fxcomp.compressors.inputs import DecoderInput, EncoderInput

Segments = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""The sizes of a value's segments; those of each of its pieces, where it is compressed in pieces."""


def in_pieces(segments: Sequence[int], pieces: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Group segments by their numbers in each piece; one piece where there are no numbers."""
    if pieces is None:
        return (tuple(segments),)
    ends = [sum(pieces[: k + 1]) for k in range(len(pieces))]
    return tuple(tuple(segments[end - count : end]) for end, count in zip(ends, pieces, strict=True))


def as_pieces(segments: Segments) -> tuple[tuple[int, ...], ...]:
    """Read the segments of one piece, or of several."""
    nested = tuple(each for each in segments if isinstance(each, tuple))
    return nested or (tuple(size for size in segments if isinstance(size, int)),)


def payload_elements(compressor: Compressor, pieces: Sequence[tuple[int, ...]]) -> int:
    return sum(map(compressor.payload_elements, pieces))


def encode(compressor: Compressor, given: EncoderInput, payload: Tensor, pieces: Sequence[tuple[int, ...]]) -> None:
    """Fill `payload`, replace the residual and the state that are given."""
    if len(pieces) == 1:
        bucket, residual, segments, state, agreed = given
        compressor.encode(bucket, residual, payload, segments, state, agreed)
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
    """Fill `out` with the mean of each piece's payloads."""
    payloads, ranks, segments, agreed, state = received
    if len(pieces) == 1:
        compressor.decode(payloads, ranks, segments, out, agreed, state)
        return
    sent, means = _PieceReader(payloads), _PieceReader(out)
    for piece in pieces:
        if piece:
            part, mean = sent.next(ranks * compressor.payload_elements(piece)), means.next(sum(piece))
            assert part is not None, "a piece has payloads"
            assert mean is not None, "a piece has values"
            compressor.decode(part, ranks, piece, mean)


class _PieceReader:
    """Reads a flat tensor part by part; None where there is none."""

    def __init__(self, whole: Tensor | None) -> None:
        self._whole, self._at = whole, 0

    def next(self, elements: int) -> Tensor | None:
        start, self._at = self._at, self._at + elements
        return None if self._whole is None else self._whole[start : self._at]
