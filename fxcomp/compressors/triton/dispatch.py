"""Find a compressor's Triton kernels by the name of its file, and run them on its tensors' device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fxcomp.compressors.base import Compressor

_COMPRESSORS = "fxcomp.compressors."


@cache
def available() -> bool:
    """Triton is installed."""
    return find_spec("triton") is not None


def can_run_on(tensor: Tensor) -> bool:
    return tensor.is_cuda and available()


def has_kernels(kind: type[Compressor]) -> bool:
    return _function(kind, "encode") is not None


def encode(
    compressor: Compressor,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: Sequence[int],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    """Whether there is a kernel, and it filled `payload` and replaced `residual` and `state`."""
    kernel = _function(type(compressor), "encode")
    if kernel is None:
        return False
    with _device_of(bucket):
        return kernel(compressor, bucket, residual, payload, tuple(segments), state, agreed)


def decode(
    compressor: Compressor,
    payloads: Tensor,
    ranks: int,
    segments: Sequence[int],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    """Whether there is a kernel, and it filled `out`."""
    kernel = _function(type(compressor), "decode")
    if kernel is None:
        return False
    with _device_of(out):
        return kernel(compressor, payloads, ranks, tuple(segments), out, agreed, state)


def propose(
    compressor: Compressor,
    bucket: Tensor,
    residual: Tensor | None,
    segments: Sequence[int],
    state: Tensor | None,
    out: Tensor,
) -> bool:
    """Whether there is a kernel, and it filled `out`."""
    kernel = _function(type(compressor), "propose")
    if kernel is None:
        return False
    with _device_of(bucket):
        return kernel(compressor, bucket, residual, tuple(segments), state, out)


@cache
def _function(kind: type[Compressor], name: str) -> Callable[..., bool] | None:
    """From the file beside this one that is named as the compressor's own; a plug-in's has none."""
    file = kind.__module__.removeprefix(_COMPRESSORS)
    module = f"{__package__}.{file}"
    if _COMPRESSORS + file != kind.__module__ or find_spec(module) is None:
        return None
    return getattr(import_module(module), name, None)


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    # Triton launches on the current device, whatever device its tensors are on.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
