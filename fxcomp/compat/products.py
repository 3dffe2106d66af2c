"""Matrix products of symbolic sizes, of which torch made numbers until 2.12."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxcomp.compat.symbols import has_symbols


@contextmanager
def symbolic_products(inputs: Iterable[Any]) -> Generator[None]:
    """Keep the sizes in matmul symbols, in linear and einsum too, while a function of these inputs is traced.

    Until torch 2.12 the C++ of matmul asks for plain sizes; torch's own Python version of it does not.
    """
    if torch.__version__ >= "2.13" or not any(isinstance(value, Tensor) and has_symbols(value) for value in inputs):
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        for key in ("AutogradCPU", "AutogradCUDA"):
            library.impl("matmul", _matmul, key)
        yield


def _matmul(one: Tensor, other: Tensor) -> Tensor:
    if has_symbols(one) or has_symbols(other):
        from torch._decomp.decompositions import matmul

        return matmul(one, other)
    return torch.ops.aten.matmul.default.decompose(one, other)
