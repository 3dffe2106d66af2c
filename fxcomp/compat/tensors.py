"""Facts about tensors."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

is_subclass = is_traceable_wrapper_subclass
"""Ask if a tensor wraps others, as a DTensor does."""

suggested_format = suggest_memory_format
"""The memory format that kernels give to the result for a tensor, where they do not follow its strides."""


def is_fake(tensor: Tensor) -> bool:
    """Ask if a tensor was made while tracing, or comes in as an argument; others are constants of the trace."""
    return isinstance(tensor, FakeTensor)


def knows_values(tensor: Tensor) -> bool:
    """Ask if a fake knows what it stands for, as what torch.tensor([1, 2]) makes in a trace."""
    return getattr(tensor, "constant", None) is not None


def is_uninitialized(tensor: Tensor) -> bool:
    """Ask if a lazy module has not given a tensor its shape yet."""
    return is_lazy(tensor)


def is_without_memory(tensor: Tensor) -> bool:
    """Ask if a tensor is one of autograd's zeros, which lie nowhere."""
    return torch._is_zerotensor(tensor)


def is_sparse_view(tensor: Tensor) -> bool:
    """Ask if a sparse tensor is a view of another."""
    return tensor.is_sparse and tensor._is_view()


def strides(tensor: Tensor) -> Sequence[Any]:
    """Give a tensor's strides; a dimension with 0 is one value, however large. Sparse tensors have no 0."""
    return tensor.stride() if tensor.layout is torch.strided else [1] * tensor.dim()
