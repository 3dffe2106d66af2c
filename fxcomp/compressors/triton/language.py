"""Triton's language and shared functions. Stand-ins replace Triton where it is not installed.

Sums add the upper half of the terms to the lower until one is left. `randomness.py` is the reference for random bits.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxcomp.compressors.randomness import STATE_ELEMENTS

if TYPE_CHECKING:
    tl: Any
    constexpr = Any

    def jit(kernel: Callable[..., Any]) -> Any: ...

    def constant(value: float) -> Any: ...

elif find_spec("triton") is not None:
    import triton
    import triton.language as tl

    jit = triton.jit
    constexpr = constant = tl.constexpr
else:
    tl = None

    def jit(kernel):
        return kernel

    constexpr = constant = float


def launch(
    kernel: Any, programs: int, *arguments: Tensor | float | None, rows: int = 1, warps: int = 4, **constants: object
) -> None:
    """Run a kernel on a grid of programs * rows, without fusing multiplication and addition."""
    if programs > 0:
        start(kernel, (programs, rows), arguments, warps, constants)


def start(
    kernel: Any, programs: tuple[int, int], arguments: tuple[Any, ...], warps: int, constants: dict[str, Any]
) -> None:
    kernel[programs](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


@jit
def sum_of_columns(terms, ROWS: constexpr, WIDTH: constexpr):
    """Sum each row."""
    if WIDTH == 1:
        return tl.reshape(terms, [ROWS])
    else:  # noqa: RET505  Triton compiles one branch only
        low, high = tl.split(tl.permute(tl.reshape(terms, [ROWS, 2, WIDTH // 2]), (0, 2, 1)))
        return sum_of_columns(low + high, ROWS, WIDTH // 2)


@jit
def sum_of_rows(terms, HEIGHT: constexpr, WIDTH: constexpr):
    """Sum each column."""
    if HEIGHT == 1:
        return tl.reshape(terms, [WIDTH])
    else:  # noqa: RET505
        low, high = tl.split(tl.permute(tl.reshape(terms, [2, HEIGHT // 2, WIDTH]), (1, 2, 0)))
        return sum_of_rows(low + high, HEIGHT // 2, WIDTH)


@jit
def product_of_rows(factors, HEIGHT: constexpr, WIDTH: constexpr):
    """Multiply the factors of each column."""
    if HEIGHT == 1:
        return tl.reshape(factors, [WIDTH])
    else:  # noqa: RET505
        low, high = tl.split(tl.permute(tl.reshape(factors, [2, HEIGHT // 2, WIDTH]), (1, 2, 0)))
        return product_of_rows(low * high, HEIGHT // 2, WIDTH)


@jit
def sum_of(lanes, WIDTH: constexpr):
    return tl.sum(sum_of_rows(tl.reshape(lanes, [WIDTH, 1]), WIDTH, 1), axis=0)


@jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@jit
def stream_of(state, segment, STEPS_BACK: constexpr = 0):
    """Return the keys of a segment's stream, STEPS_BACK steps ago."""
    key = tl.load(state + 2 * segment)
    step = tl.load(state + 2 * segment + 1) - STEPS_BACK
    low = mix((key ^ step).to(tl.uint32))
    return low, mix((key >> 32).to(tl.uint32) ^ (step >> 32).to(tl.uint32) ^ low)


@jit
def bits_at(low, high, counter):
    x = counter.to(tl.uint32) + low
    return mix((x ^ (x >> 16)) * 0x7FEB352D + high)


@jit
def uniform(low, high, counter):
    """Return a multiple of 2^-24 in [0, 1). `low`, `high`: keys of `stream_of`."""
    return (bits_at(low, high, counter) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


def raise_step(state: Tensor | None) -> None:
    """Increment the step of all random streams, after the launch that used their bits."""
    if state is not None:
        state.view(-1, STATE_ELEMENTS)[:, 1].add_(1)
