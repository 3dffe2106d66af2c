"""Random bits from counters: the bits of `fxcomp/compressors/randomness.py`."""

from __future__ import annotations

from torch import Tensor

from fxcomp.compressors.randomness import STATE_ELEMENTS
from fxcomp.compressors.triton.language import constexpr, jit, tl


@jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@jit
def stream_of(state, segment, STEPS_BACK: constexpr = 0):
    """Return the two keys of a segment's stream, so many steps ago."""
    key = tl.load(state + 2 * segment)
    step = tl.load(state + 2 * segment + 1) - STEPS_BACK
    low = mix((key ^ step).to(tl.uint32))
    return low, mix((key >> 32).to(tl.uint32) ^ (step >> 32).to(tl.uint32) ^ low)


@jit
def bits_at(low, high, counter):
    """Return the random bits at a counter, uint32."""
    x = counter.to(tl.uint32) + low
    return mix((x ^ (x >> 16)) * 0x7FEB352D + high)


@jit
def uniform(low, high, counter):
    """Return a number in [0, 1), a multiple of 2^-24."""
    return (bits_at(low, high, counter) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


def raise_step(state: Tensor | None) -> None:
    """Advance all segments' streams, after the launch that drew from them."""
    if state is not None:
        state.view(-1, STATE_ELEMENTS)[:, 1].add_(1)
