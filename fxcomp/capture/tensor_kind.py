"""Kinds of tensors beside shape and dtype: layouts, subclasses, lazy views. Some are captured, some are refused."""

# A sparse tensor's coalescing has no public name as an attribute.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.errors import UnsupportedModel, UnsupportedParameter

PLAIN: Hashable = None
"""The kind of a strided tensor of torch's own class, as it lies in memory."""

_NEITHER = (False, False)


def kind_of(tensor: Tensor) -> Hashable:
    """Read what a capture bakes in of a tensor's kind; PLAIN for most."""
    lazily = tensor.is_conj(), tensor.is_neg()
    if type(tensor) is Tensor and tensor.layout is torch.strided and lazily == _NEITHER:
        return "buffer" if getattr(tensor, "_is_buffer", False) else PLAIN
    if type(tensor) is nn.Parameter and tensor.layout is torch.strided and lazily == _NEITHER:
        return "parameter"
    entries = (tensor.is_coalesced(), tensor.sparse_dim(), tensor.dense_dim()) if tensor.is_sparse else ()
    return type(tensor).__name__, str(tensor.layout), lazily, entries


def why_not(tensor: Tensor) -> str | None:
    """Say what a tensor is that no capture carries, and what to do; None for one that is captured."""
    kind = type(tensor)
    if compat.is_uninitialized(tensor):
        return "is not initialised: a lazy module gives it its shape.\n  Call the model once before compile_step."
    if kind is not Tensor and kind is not nn.Parameter:
        return (
            f"is a {kind.__module__}.{kind.__name__}, a subclass of torch.Tensor, which would be traced as a plain"
            " tensor.\n  Pass a plain one: .as_subclass(torch.Tensor), or what it wraps; make it inside loss_fn."
        )
    if tensor.is_nested:
        return "is nested, whose sizes are data.\n  Pad it, and pass lengths beside it."
    if compat.is_without_memory(tensor):
        return "is zero without any memory, as autograd makes it.\n  Pass its .clone()."
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}), which does not trace.\n  Pass its .dequantize()."
    if compat.is_sparse_view(tensor):
        return "is a view of a sparse tensor, as .t() makes it, which does not trace.\n  Pass its .clone()."
    if tensor.layout is not torch.strided and not tensor.is_sparse:
        name = str(tensor.layout).removeprefix("torch.")
        return f"lies in memory as {name.strip('_')}, which does not trace.\n  Pass its .to_dense(), or a COO tensor."
    return None


def check_model(model: nn.Module) -> None:
    """Refuse parameters and buffers of kinds that are not captured. Raises UnsupportedParameter, UnsupportedModel."""
    for name, parameter in model.named_parameters():
        if why := why_not(parameter):
            raise UnsupportedParameter(f"the parameter {name!r} {why}")
        if overlaps(parameter):
            raise UnsupportedParameter(
                f"several elements of the parameter {name!r} lie in one place of memory, as .expand() makes them: one"
                " update would write them more than once.\n  Give each its own: nn.Parameter(value.clone())."
            )
    for name, buffer in cast("Iterable[tuple[str, Tensor]]", model.named_buffers()):
        if why := why_not(buffer) or _sparse(buffer):
            raise UnsupportedModel(f"the buffer {name!r} {why}")


def _sparse(buffer: Tensor) -> str | None:
    if not buffer.is_sparse:
        return None
    return "is sparse, and has no memory that ranks could share.\n  Keep it dense, or pass it in the batch."


def overlaps(tensor: Tensor) -> bool:
    """Ask if several elements share memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    reached = 0
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride <= reached:
            return True
        reached += stride * (size - 1)
    return False
