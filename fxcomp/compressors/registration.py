"""Register a compressor: define its functional ops under `torch.ops.fxcomp`, and put it into the catalogue.

The ops run the compressor's own `encode`, `decode` and `propose` on fresh tensors, so a graph and the emitted code
compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from fxcomp.compressors.base import BadCompressor, Compressor, check_not_mixed, check_segments

CATALOGUE: dict[str, type[Compressor]] = {}
"""Every registered compressor by its name."""

# Library.define and impl cost 5 us a call; the custom_op decorator costs 45.  # measured, torch 2.13, 2026-11
_library: Any = Library("fxcomp", "FRAGMENT")

_SCHEMA = {"int": "int", "float": "float", "bool": "bool", "tuple[int, ...]": "int[]"}  # by a field's annotation

Kind = TypeVar("Kind", bound=type[Compressor])


def register(kind: Kind) -> Kind:
    """Make a compressor known by its name, with its ops. Raises BadCompressor if another one has the name."""
    name = kind.facts.name
    if name in CATALOGUE:
        taken = CATALOGUE[name]
        raise BadCompressor(
            f"there are two compressors named {name!r}: {taken.__module__}.{taken.__qualname__} and "
            f"{kind.__module__}.{kind.__qualname__}.\n  Rename one of them."
        )
    make: Callable[..., Compressor] = kind
    parameters = ", ".join(f"{_SCHEMA[str(field.type)]} {field.name}" for field in fields(kind))  # pyright: ignore[reportArgumentType]
    kind.compress_op = _register_compress(name, parameters, make)
    kind.decompress_op = _register_decompress(name, parameters, make)
    kind.propose_op = _register_propose(name, parameters, make) if kind.facts.agreement is not None else None
    CATALOGUE[name] = kind
    return kind


def _register_compress(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    def run(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        payload = fake(bucket, None, segments, *values)[0]
        new_residual, new_state = _copy(residual), _copy(state)
        make(*values).encode(bucket.contiguous(), new_residual, payload, segments, new_state, _flat(agreed))
        empty = bucket.new_empty(0)
        return (
            payload,
            empty if new_residual is None else new_residual,
            bucket.new_empty(0) if new_state is None else new_state,
        )

    def fake(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, bucket, residual, state, agreed)
        payload = bucket.new_empty(compressor.payload_elements(segments), dtype=compressor.payload_dtype)
        new_residual = bucket.new_empty(0 if residual is None else sum(segments))
        return payload, new_residual, bucket.new_empty(0) if state is None else torch.empty_like(state)

    head = ", ".join(filter(None, ["Tensor bucket, Tensor? residual, int[] segments", parameters]))
    schema = f"({head}, *, Tensor? state=None, Tensor? agreed=None) -> (Tensor, Tensor, Tensor)"
    return _register(f"{name}_compress", schema, run, fake)


def _register_decompress(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    def run(
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        *values: Any,
        agreed: Tensor | None = None,
        state: Tensor | None = None,
    ) -> Tensor:
        out = fake(payloads, ranks, segments, *values)
        make(*values).decode(payloads.contiguous(), ranks, segments, out, _flat(agreed), _flat(state))
        return out

    def fake(
        payloads: Tensor,
        ranks: int,  # noqa: ARG001
        segments: Sequence[int],
        *values: Any,
        agreed: Tensor | None = None,
        state: Tensor | None = None,
    ) -> Tensor:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, payloads, agreed, state)
        return payloads.new_empty(sum(segments), dtype=torch.float32)

    head = ", ".join(filter(None, ["Tensor payloads, int ranks, int[] segments", parameters]))
    return _register(f"{name}_decompress", f"({head}, *, Tensor? agreed=None, Tensor? state=None) -> Tensor", run, fake)


def _register_propose(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    def run(
        bucket: Tensor, residual: Tensor | None, segments: Sequence[int], *values: Any, state: Tensor | None = None
    ) -> Tensor:
        out = fake(bucket, residual, segments, *values)
        make(*values).propose(bucket.contiguous(), _flat(residual), segments, _flat(state), out)
        return out

    def fake(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
    ) -> Tensor:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, bucket, residual, state)
        return bucket.new_empty(compressor.proposal_elements(segments), dtype=compressor.facts.proposal_dtype)

    head = ", ".join(filter(None, ["Tensor bucket, Tensor? residual, int[] segments", parameters]))
    return _register(f"{name}_propose", f"({head}, *, Tensor? state=None) -> Tensor", run, fake)


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxcomp::{name}", fake, lib=_library)  # pyright: ignore[reportUnknownMemberType]
    return getattr(torch.ops.fxcomp, name).default
