"""Counter-based random bits: the same on every machine, in any order, for any number of threads.

    counter i of stream (key, step)  -->  32 bits

The hash multiplies the counter three times and mixes in the key between rounds. `uniform` uses the upper 24 bits.

Each segment has a stream. Its state is two int64: the key, and the step, which each encoding increments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

STATE_ELEMENTS = 2
_LOW = 0xFFFFFFFF


def key_of(*parts: object) -> int:
    """Hash parts that identify a stream, such as a seed and a parameter's name, to 62 bits."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 2


def fresh_state(key: int) -> Tensor:
    return torch.tensor([key, 0], dtype=torch.int64)


def next_state(state: Tensor) -> Tensor:
    return state + one_step(state)


def one_step(state: Tensor) -> Tensor:
    """Return a tensor that adds 1 to each step of a state, created without waiting for the device."""
    return torch.arange(STATE_ELEMENTS, device=state.device).repeat(state.numel() // STATE_ELEMENTS)


def stream_of(state: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """Return the two 32-bit keys of a segment's stream, as int64 scalars."""
    key, step = state[2 * segment], state[2 * segment + 1]
    low = mix((key ^ step) & _LOW)
    return low, mix(((key >> 32) ^ (step >> 32) ^ low) & _LOW)


def bits(keys: tuple[Tensor, Tensor], start: int, count: int) -> Tensor:
    """Return 32 bits, as int64, for each of `count` counters from `start`."""
    counter = torch.arange(start, start + count, device=keys[0].device)
    return bits_at(keys, counter)


def bits_at(keys: tuple[Tensor, Tensor], counter: Tensor) -> Tensor:
    """Return 32 bits, as int64, for each counter."""
    x = (counter + keys[0]) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = (x + keys[1]) & _LOW
    return mix(x)


def mix(x: Tensor) -> Tensor:
    """Hash 32 bits bijectively."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _LOW
    return x ^ (x >> 15)


def uniform(keys: tuple[Tensor, Tensor], start: int, count: int) -> Tensor:
    """Return `count` fp32 numbers in [0, 1), multiples of 2^-24."""
    return (bits(keys, start, count) >> 8).float() * 2.0**-24


def uniform_of(state: Tensor, segments: Sequence[int]) -> Tensor:
    """Return a random number in [0, 1) for each value of a bucket."""
    streams = (stream_of(state, segment) for segment in range(len(segments)))
    drawn = [uniform(stream, 0, size) for stream, size in zip(streams, segments, strict=True)]
    return torch.cat([torch.empty(0, device=state.device), *drawn])
