"""Compressors and buckets to try, and the checks that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fxcomp.compressors import BF16, Compressor, Int4, Int8, Sign, TopK, kernels

COMPRESSORS: list[Compressor] = [
    *(BF16(), Int8(), Int8(128), Int8(7), Int4(), Int4(2), Int4(10), Int4(1000)),
    *(Sign(), Sign(8), TopK(0.01), TopK(0.3), TopK(1.0)),
]
"""One of each, and parameters at the edge of what they may be."""

EACH: list[Compressor] = [BF16(), Int8(), Int4(), Sign(), TopK(0.01)]

WITH_KERNELS = pytest.mark.skipif(not kernels.available(), reason="no kernels are built")

SEGMENTS: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (7,),
    (511,),
    (512,),
    (513,),
    (70_001,),
    (0, 1, 512, 0, 65, 3),
    (1000, 66_000, 9),
]


def gaussian(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def laplace(elements: int, seed: int = 0) -> Tensor:
    uniform = torch.rand(elements, generator=torch.Generator().manual_seed(seed)) - 0.5
    return -uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-9).log()


def _with_one(value: float) -> Callable[[int], Tensor]:
    def bucket(elements: int) -> Tensor:
        values = gaussian(elements)
        values[elements // 2 : elements // 2 + 1] = value
        return values

    return bucket


def _mostly(value: float, share: float) -> Callable[[int], Tensor]:
    def bucket(elements: int) -> Tensor:
        values = gaussian(elements)
        values[torch.rand(elements, generator=torch.Generator().manual_seed(1)) < share] = value
        return values

    return bucket


def _large_where_a_sample_looks(elements: int) -> Tensor:
    values = gaussian(elements)
    values[::33] *= 1000  # the stride of the sample in csrc/topk.cpp
    return values


BUCKETS: dict[str, Callable[[int], Tensor]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "constant": lambda elements: torch.full((elements,), -1.5),
    "zero": torch.zeros,
    "negative zero": lambda elements: -torch.zeros(elements),
    "mostly zero": _mostly(0.0, 0.999),
    "ties": lambda elements: gaussian(elements).round(),
    "ties between codes": lambda elements: (torch.arange(elements) % 255 - 127) / 2,
    "large where a sample looks": _large_where_a_sample_looks,
    "denormal": lambda elements: gaussian(elements) * 1e-44,
    "huge": lambda elements: gaussian(elements).clamp(-1, 1) * 3.4e38,
    "one nan": _with_one(torch.nan),
    "one inf": _with_one(-torch.inf),
    "many nan": _mostly(torch.nan, 0.2),
}

FINITE = [name for name in BUCKETS if name not in ("huge", "one nan", "one inf", "many nan")]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the references, whether kernels are built or not."""
    with patch.object(kernels, "can_run_on", return_value=False):
        yield


def encode(compressor: Compressor, bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> Tensor:
    """`compressor.encode` into a fresh payload that holds rubbish before."""
    payload = torch.full((compressor.payload_elements(segments),), 77, dtype=compressor.payload_dtype)
    compressor.encode(bucket, residual, payload, segments)
    return payload


def decode(compressor: Compressor, payloads: Tensor, ranks: int, segments: Sequence[int]) -> Tensor:
    """`compressor.decode` into a fresh tensor that holds rubbish before."""
    out = torch.full((sum(segments),), 77.0)
    compressor.decode(payloads, ranks, segments, out)
    return out


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, zeros with their signs; only one NaN is as good as another."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = actual[~actual.isnan()], expected[~expected.isnan()]
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def left_out(compressor: Compressor, bucket: Tensor) -> float:
    """The part of the squared norm that one compression loses."""
    segments = (len(bucket),)
    decoded = decode(compressor, encode(compressor, bucket, None, segments), 1, segments)
    return ((bucket - decoded).double().square().sum() / bucket.double().square().sum()).item()


def telescoping_error(compressor: Compressor, segments: Sequence[int], steps: int = 24) -> float:
    """How far what was sent plus what is left is from what was put in, relative to the latter's norm.

    The identity sum(decoded) + residual = sum(gradient) holds for every compressor under error feedback.
    """
    elements = sum(segments)
    residual = torch.zeros(elements)
    sent, put_in = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for step in range(steps):
        gradient = gaussian(elements, seed=step)
        payload = encode(compressor, gradient, residual, segments)
        sent += decode(compressor, payload, 1, segments)
        put_in += gradient
    return ((sent + residual - put_in).norm() / put_in.norm()).item()


def rounding_bias(compressor: Compressor) -> float:
    """The mean error of positive values in units of its root mean square: 0 if rounding goes either way."""
    values = gaussian(100_000).abs()
    segments = (len(values),)
    error = decode(compressor, encode(compressor, values, None, segments), 1, segments) - values
    return (error.mean() / error.square().mean().sqrt()).item()


@dataclass(frozen=True)
class Broken:
    """A compressor with a planted bug: something is done to what `encode` wrote."""

    inner: Compressor
    spoil: Callable[[Tensor, Tensor | None, Tensor], None]
    """Takes v, the residual and the payload."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def encode(self, bucket: Tensor, residual: Tensor | None, payload: Tensor, segments: Sequence[int]) -> None:
        value = bucket.clone() if residual is None else bucket + residual
        self.inner.encode(bucket, residual, payload, segments)
        self.spoil(value, residual, payload)
