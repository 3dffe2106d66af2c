"""Sample buckets: distributions of gradients, extreme values, and lengths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxcomp.compressors import Compressor

LARGE = 5_000_000

SMALL_SEGMENTS: tuple[tuple[int, ...], ...] = ((0, 1, 512, 0, 65, 3), (1000, 66_000, 9))

ROUND_SEGMENTS = (65_536, 131_072, *range(256, 256 * 33, 256))
"""Lengths that are multiples of 2^8 or 2^16, because index tables have these sizes."""

LARGE_SEGMENTS: tuple[tuple[int, ...], ...] = (ROUND_SEGMENTS, (2**20 + 1,), (LARGE - 70_000, 70_000))


def segments_to_try(compressor: Compressor) -> list[tuple[int, ...]]:
    """Return segments at which layouts may break: of length 0, 1, odd, around a block, above 2^16; and several."""
    block = int(getattr(compressor, "block", 512))
    lengths = sorted({0, 1, 7, block - 1, block, block + 1, 65_537})
    return [(), *((length,) for length in lengths), *SMALL_SEGMENTS]


LARGEST = torch.finfo(torch.float32).max


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=generator(seed))


def laplace(elements: int, seed: int = 0) -> Tensor:
    uniform = torch.rand(elements, generator=generator(seed)) - 0.5
    return -uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-9).log()


def heavy(elements: int, seed: int = 0) -> Tensor:
    """Return Gaussian values with a log-normal scale."""
    return gaussian(elements, seed) * (2 * gaussian(elements, seed + 1_000_003)).exp()


def _with_one(value: float, share: float = 0.5) -> Callable[[int], Tensor]:
    def bucket(elements: int) -> Tensor:
        values, place = gaussian(elements), int(share * max(0, elements - 1))
        values[place : place + 1] = value
        return values

    return bucket


def _mostly(value: float, share: float) -> Callable[[int], Tensor]:
    def bucket(elements: int) -> Tensor:
        values = gaussian(elements)
        values[torch.rand(elements, generator=generator(1)) < share] = value
        return values

    return bucket


def _large_where_a_sample_looks(elements: int) -> Tensor:
    values = gaussian(elements)
    values[::33] *= 1000  # the stride at which csrc/topk.cpp samples
    return values


SAMPLES: dict[str, Callable[[int], Tensor]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "heavy": heavy,
    "constant": lambda elements: torch.full((elements,), -1.5),
    "zero": torch.zeros,
    "negative zero": lambda elements: -torch.zeros(elements),
    "mostly zero": _mostly(0.0, 0.999),
    "ties": lambda elements: gaussian(elements).round(),
    "ties between codes": lambda elements: (torch.arange(elements) % 255 - 127) / 2,
    "large where a sample looks": _large_where_a_sample_looks,
    "ascending": lambda elements: torch.linspace(0, 1, elements),
    "denormal": lambda elements: gaussian(elements) * 1e-44,
    "huge": lambda elements: gaussian(elements).clamp(-1, 1) * LARGEST,
    "one huge": _with_one(LARGEST),
    "one nan": _with_one(torch.nan),
    "one inf": _with_one(-torch.inf),
    "one positive inf": _with_one(torch.inf),
    "first nan": _with_one(torch.nan, 0.0),
    "last nan": _with_one(torch.nan, 1.0),
    "many nan": _mostly(torch.nan, 0.2),
}
"""Deterministic functions from a number of elements to a bucket, by name."""

NOT_FINITE = ("one nan", "one inf", "one positive inf", "first nan", "last nan", "many nan")

IN_RANGE = tuple(name for name in SAMPLES if name not in (*NOT_FINITE, "huge", "one huge"))
"""Samples with sums and scales below fp32's largest value."""
