"""Triton's language and how kernels are launched; stand-ins where Triton is not installed, so that files import."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor

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
    """Run a kernel on programs * rows, with multiplication and addition kept apart as in the references."""
    if programs > 0:
        start(kernel, (programs, rows), arguments, warps, constants)


def start(
    kernel: Any, programs: tuple[int, int], arguments: tuple[Any, ...], warps: int, constants: dict[str, Any]
) -> None:
    kernel[programs](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)
