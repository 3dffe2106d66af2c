"""Relative squared error of a compressor on Gaussian values, with the same bits on every machine.

    ω = |v - decoded|² / |v|²        of the reference's first compression of one rank's values, without error feedback

All ranks must compute the same errors to choose the same plan. So values come from counter-based random numbers,
references sum in a fixed order, and squares are summed exactly. Each value is a sum of 64 random bytes.

Gradient matrices have low rank (Vogels et al. 2019), Gaussian matrices do not. So a compressor with
`needs_whole_parameters` compresses a matrix with singular values 1 / k instead, after `WARM_UP` steps. The error of a
mean over ranks may be smaller than ω.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fxcomp.compressors import randomness
from fxcomp.compressors.base import Compressed, Compressor
from fxcomp.compressors.inputs import DecoderInput, EncoderInput

SHAPE = (128, 256)
WARM_UP = 6  # steps, after which powersgd(1) is within 1 % of the least error of rank 1
_WORDS = 16  # random 32-bit words per value


@lru_cache(maxsize=1024)
def gaussian_error(compressor: Compressor, ranks: int = 1) -> float:
    """Return ω of a compressor bound to `ranks` ranks."""
    if compressor.facts.is_exact:
        return 0.0
    bound = compressor.bound_to([SHAPE], ranks)
    is_low_rank = bound.facts.needs_whole_parameters
    value = _falling() if is_low_rank else _values()
    segments = (value.numel(),)
    state = bound.fresh_state(value.numel(), 0, 0) if bound.has_state else None
    if is_low_rank and bound.facts.state_from_payload:
        for _ in range(WARM_UP):
            state = _compressed(bound, value, state).payload
    new = _compressed(bound, value, state)
    agreed = _agreed(bound, value, state)
    left = new.state if bound.facts.decode_needs_state else None
    decoded = bound.decompress_reference(DecoderInput(new.payload, 1, segments, agreed, left))
    return _squares(value - decoded) / _squares(value)


def _agreed(bound: Compressor, value: Tensor, state: Tensor | None) -> Tensor | None:
    if not bound.facts.agreement:
        return None
    return bound.propose_reference(EncoderInput(value, None, (value.numel(),), state))


def _compressed(bound: Compressor, value: Tensor, state: Tensor | None) -> Compressed:
    segments, agreed = (value.numel(),), _agreed(bound, value, state)
    return bound.compress_reference(EncoderInput(value, None, segments, state, agreed))


@cache
def _falling() -> Tensor:
    """Return a matrix whose k-th singular value is 1 / k."""
    rows, columns = SHAPE
    number = torch.arange(1, rows + 1, dtype=torch.float64)

    def cosines(size: int) -> Tensor:
        places = torch.arange(size, dtype=torch.float64) + 0.5
        waves = torch.cos(math.pi * number[:, None] * places / size)
        return waves / waves.square().sum(dim=1, keepdim=True).sqrt()

    return (cosines(rows).T @ (cosines(columns) / number[:, None])).float().flatten()


@cache
def _values() -> Tensor:
    stream = randomness.stream_of(randomness.fresh_state(0), 0)
    words = randomness.bits(stream, 0, _WORDS * math.prod(SHAPE)).view(-1, _WORDS)
    total = sum((((words >> shift) & 255).sum(dim=1) for shift in (0, 8, 16, 24)), torch.tensor(0))
    count = 4 * _WORDS
    deviation = math.sqrt(count * (256**2 - 1) / 12)
    return ((total - count * 255 / 2).double() / deviation).float()


def _squares(values: Tensor) -> float:
    """Return the sum of squares, rounded once."""
    squares: Any = values.double().square()
    return math.fsum(squares.tolist())
