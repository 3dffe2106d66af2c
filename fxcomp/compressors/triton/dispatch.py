"""Find a compressor's Triton kernels by the name of its file, and run them on its tensors' device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxcomp.compressors.triton.calls import Decoding, Encoding, Proposal

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
    """Fill `payload` and replace `residual` and `state`; False where no kernel can."""
    kernel = _function(type(compressor), "encode")
    if kernel is None or not _is_aligned(payload):
        return False
    call = Encoding(compressor, bucket, residual, payload, tuple(segments), state, agreed)
    return _run(kernel, call, bucket)


def decode(
    compressor: Compressor,
    payloads: Tensor,
    ranks: int,
    segments: Sequence[int],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    """Fill `out`; False where no kernel can."""
    kernel = _function(type(compressor), "decode")
    if kernel is None or not _is_aligned(payloads):
        return False
    return _run(kernel, Decoding(compressor, payloads, ranks, tuple(segments), out, agreed, state), out)


def propose(
    compressor: Compressor,
    bucket: Tensor,
    residual: Tensor | None,
    segments: Sequence[int],
    state: Tensor | None,
    out: Tensor,
) -> bool:
    """Fill `out`; False where no kernel can."""
    kernel = _function(type(compressor), "propose")
    if kernel is None:
        return False
    return _run(kernel, Proposal(compressor, bucket, residual, tuple(segments), state, out), bucket)


@cache
def _function(kind: type[Compressor], name: str) -> Callable[[Any], None] | None:
    """Look into the file beside this one that is named as the compressor's own; a plug-in has none."""
    file = kind.__module__.removeprefix(_COMPRESSORS)
    module = f"{__package__}.{file}"
    if _COMPRESSORS + file != kind.__module__ or find_spec(module) is None:
        return None
    return getattr(import_module(module), name, None)


def _run(kernel: Callable[[Any], None], call: object, tensor: Tensor) -> bool:
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):  # Triton launches on the current device, wherever its tensors are
            kernel(call)
    else:
        kernel(call)
    return True


def _is_aligned(payload: Tensor) -> bool:
    """Bytes hold fp32, which a device reads only from a multiple of four; nobody promises one for a payload."""
    return payload.dtype is not torch.uint8 or payload.data_ptr() % 4 == 0
