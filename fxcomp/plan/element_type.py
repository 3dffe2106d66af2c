"""Name the types that gradients may have."""

from __future__ import annotations

from enum import StrEnum

import torch

from fxcomp.errors import UnsupportedParameter


class ElementType(StrEnum):
    """The type of a gradient's elements: its parameter's. Dense gradients travel in it; compressors are given fp32."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F64 = "f64"

    __hash__ = str.__hash__  # Enum's own runs in Python

    @classmethod
    def of(cls, dtype: torch.dtype) -> ElementType:
        """Name a type of torch that a trained parameter may have."""
        return _BY_DTYPE[dtype]

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _DTYPES[self].itemsize


_DTYPES = {
    ElementType.F32: torch.float32,
    ElementType.BF16: torch.bfloat16,
    ElementType.F16: torch.float16,
    ElementType.F64: torch.float64,
}
_BY_DTYPE = {dtype: each for each, dtype in _DTYPES.items()}


def check_is_trainable(name: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedParameter for a parameter of a type that no gradient may have."""
    if dtype not in _BY_DTYPE:
        raise UnsupportedParameter(
            f"the parameter {name!r} is {dtype}; only real floating-point numbers of 16 bits or more can be trained.\n"
            "  Keep it in float32, or set requires_grad=False."
        )
