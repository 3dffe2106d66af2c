"""Compressors to try, and what several test files measure on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fxcomp.compressors import BF16, Compressor, Int4, Int8, Sign, TopK, kernels, parse_compressor
from fxcomp.compressors.examples import ours

TYPICAL = {
    "powersgd": ["powersgd(1)", "powersgd(6)"],
    "sidco": ["sidco(0.01)", "sidco(1.0)", "sidco(0.01, fit=exponential)", "sidco(0.01, fit=gamma)"],
    "topk": ["topk(0.01)", "topk(0.3)", "topk(1.0)"],
}
"""For compressors that need a parameter, or whose edges deserve a try."""

EXTREMES = {
    "int8": ["int8", "int8(block=128)", "int8(block=7)", "int8(block=9, stochastic=true)", "int8(stochastic=true)"],
    "int4": ["int4", "int4(block=2)", "int4(block=10)", "int4(block=1000)", "int4(block=6, stochastic=true)"],
    "int2": ["int2", "int2(block=4)", "int2(block=20, stochastic=true)"],
    "cmax": ["cmax", "cmax(8)", "cmax(2)", "cmax(64)", "cmax(128)"],
    "sign": ["sign", "sign(block=8)"],
}


def every_compressor() -> list[Compressor]:
    """All of fxcomp's own, with usual parameters and with the smallest and largest that are allowed."""
    names = sorted(kind.facts.name for kind in ours())
    texts = [text for name in names for text in TYPICAL.get(name, EXTREMES.get(name, [name]))]
    return [parse_compressor(text) for text in texts]


COMPRESSORS = every_compressor()

EACH: list[Compressor] = [BF16(), Int8(), Int4(), Sign(), TopK(0.01)]

WITH_KERNELS = pytest.mark.skipif(not kernels.available(), reason="no kernels are built")


def encode(compressor: Compressor, bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> Tensor:
    """`compressor.encode` into a payload that holds rubbish before; for compressors without state."""
    payload = torch.full((compressor.payload_elements(segments),), 77, dtype=compressor.payload_dtype)
    compressor.encode(bucket, residual, payload, segments)
    return payload


def decode(compressor: Compressor, payloads: Tensor, ranks: int, segments: Sequence[int]) -> Tensor:
    """`compressor.decode` into a tensor that holds rubbish before."""
    out = torch.full((sum(segments),), 77.0)
    compressor.decode(payloads, ranks, segments, out)
    return out


def left_out(compressor: Compressor, bucket: Tensor) -> float:
    """The part of the squared norm that one compression loses."""
    segments = (len(bucket),)
    decoded = decode(compressor, encode(compressor, bucket, None, segments), 1, segments)
    return ((bucket - decoded).double().square().sum() / bucket.double().square().sum()).item()


@dataclass(frozen=True)
class Broken:
    """A compressor with a planted bug: something is done to what `encode` wrote."""

    inner: Compressor
    spoil: Callable[[Tensor, Tensor | None, Tensor], None]
    """Takes v, the residual and the payload."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def bound_to(self, shapes: object, ranks: object) -> Broken:  # noqa: ARG002
        return self

    def encode(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> None:
        value = bucket.clone() if residual is None else bucket + residual
        self.inner.encode(bucket, residual, payload, segments, state, agreed)
        self.spoil(value, residual, payload)
