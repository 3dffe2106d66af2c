"""Define the functional ops of a compressor under `torch.ops.fxcomp`.

They run the compressor's own `encode` and `decode` on fresh tensors, so a graph and the emitted code compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from fxcomp.compressors.base import Compressor

# Library.define and impl cost 5 us a call; the custom_op decorator costs 45.  # measured, torch 2.13, 2026-11
_library: Any = Library("fxcomp", "FRAGMENT")


def register_compress(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    """Define `fxcomp::<name>_compress`; `make` builds the compressor from the op's last arguments."""

    def run(bucket: Tensor, residual: Tensor | None, segments: Sequence[int], *values: Any) -> tuple[Tensor, Tensor]:
        payload, _ = fake(bucket, None, segments, *values)
        new_residual = None if residual is None else residual.clone(memory_format=torch.contiguous_format)
        make(*values).encode(bucket.contiguous(), new_residual, payload, segments)
        return payload, bucket.new_empty(0) if new_residual is None else new_residual

    def fake(bucket: Tensor, residual: Tensor | None, segments: Sequence[int], *values: Any) -> tuple[Tensor, Tensor]:
        compressor = make(*values)
        payload = bucket.new_empty(compressor.payload_elements(segments), dtype=compressor.payload_dtype)
        return payload, bucket.new_empty(0 if residual is None else sum(segments))

    arguments = ", ".join(filter(None, ["Tensor bucket, Tensor? residual, int[] segments", parameters]))
    return _register(f"{name}_compress", f"({arguments}) -> (Tensor, Tensor)", run, fake)


def register_decompress(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    """Define `fxcomp::<name>_decompress`; `make` builds the compressor from the op's last arguments."""

    def run(payloads: Tensor, ranks: int, segments: Sequence[int], *values: Any) -> Tensor:
        out = fake(payloads, ranks, segments, *values)
        make(*values).decode(payloads.contiguous(), ranks, segments, out)
        return out

    def fake(payloads: Tensor, ranks: int, segments: Sequence[int], *values: Any) -> Tensor:  # noqa: ARG001
        return payloads.new_empty(sum(segments), dtype=torch.float32)

    arguments = ", ".join(filter(None, ["Tensor payloads, int ranks, int[] segments", parameters]))
    return _register(f"{name}_decompress", f"({arguments}) -> Tensor", run, fake)


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxcomp::{name}", fake, lib=_library)  # pyright: ignore[reportUnknownMemberType]
    return getattr(torch.ops.fxcomp, name).default
