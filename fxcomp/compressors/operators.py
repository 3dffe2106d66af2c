"""Define a compressor's operators, which run its own `encode`, `decode` and `propose` on fresh tensors."""

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
from fxcomp.compressors.pieces import decode, encode, in_pieces, payload_elements

# Library.define and impl cost 5 us a call; the custom_op decorator costs 45.  # measured, torch 2.13, 2026-11
_library: Any = Library("fxcomp", "FRAGMENT")

_times: Counter[str] = Counter()
"""Registrations of each op, counted."""

ARGUMENTS = ("bucket", "residual", "segments", "state", "agreed", "payloads", "ranks", "pieces")
"""The names that operators' own arguments have: a compressor's field cannot have them."""


def define_ops(kind: type[Compressor]) -> tuple[OpOverload, OpOverload, OpOverload | None]:
    """The ops that compress, decompress and propose. A fake makes the results, and the op itself fills them."""
    make, name = cast(Callable[..., Compressor], kind), kind.facts.name
    parameters = "".join(f", {SCHEMA[field.type]} {field.name}" for field in fields_of(kind).values())
    bucket = f"(Tensor bucket, Tensor? residual, int[] segments{parameters}, *, Tensor? state=None"

    def fake_compress(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
        agreed: Tensor | None = None,
        pieces: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, bucket, residual, state, agreed)
        elements = payload_elements(compressor, in_pieces(segments, pieces))
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
        return payload, _or_empty(new_residual, bucket), _or_empty(new_state, bucket)

    def fake_decompress(
        payloads: Tensor,
        ranks: int,  # noqa: ARG001
        segments: Sequence[int],
        *values: Any,
        agreed: Tensor | None = None,
        state: Tensor | None = None,
        pieces: Sequence[int] | None = None,  # noqa: ARG001
    ) -> Tensor:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, payloads, agreed, state)
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
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, bucket, residual, state)
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
    # A new name and no overload: torch 2.13 ends in an abort when it takes down a library with overloads of one op.
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


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor
