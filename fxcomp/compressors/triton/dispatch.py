"""Find a compressor's Triton kernels by its name, and run them on its tensors' device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from fxcomp.compressors.facts import Declared
from fxcomp.compressors.inputs import DecoderInput, EncoderInput

Pieces = tuple[tuple[int, ...], ...]

_OURS = "fxcomp.compressors."
_SHARED = {"int4": "int8"}
"""Compressors that use another compressor's kernels."""


@cache
def available() -> bool:
    return find_spec("triton") is not None


def can_run_on(tensor: Tensor) -> bool:
    return tensor.is_cuda and available()


def has_kernels(kind: type[Declared]) -> bool:
    return _function(kind, "encode") is not None


def encode(compressor: Declared, given: EncoderInput, payload: Tensor) -> bool:
    return _is_aligned(payload) and _run("encode", compressor, given, payload)


def decode(compressor: Declared, received: DecoderInput, out: Tensor) -> bool:
    return _is_aligned(received.payloads) and _run("decode", compressor, received, out)


def encode_pieces(compressor: Declared, given: EncoderInput, payload: Tensor, pieces: Pieces) -> bool:
    return _takes_pieces(compressor) and _is_aligned(payload) and _run("encode", compressor, given, payload, pieces)


def decode_pieces(compressor: Declared, received: DecoderInput, out: Tensor, pieces: Pieces) -> bool:
    is_aligned = _is_aligned(received.payloads)
    return _takes_pieces(compressor) and is_aligned and _run("decode", compressor, received, out, pieces)


def propose(compressor: Declared, given: EncoderInput, out: Tensor) -> bool:
    return _run("propose", compressor, given, out)


@cache
def _function(kind: type[Declared], name: str) -> Callable[..., None] | None:
    module = f"{__package__}.{_SHARED.get(kind.facts.name, kind.facts.name)}"
    if not kind.__module__.startswith(_OURS) or find_spec(module) is None:
        return None
    return getattr(import_module(module), name, None)


def _takes_pieces(compressor: Declared) -> bool:
    return _function(type(compressor), "TAKES_PIECES") is not None


def _run(
    name: str, compressor: Declared, given: EncoderInput | DecoderInput, out: Tensor, pieces: Pieces | None = None
) -> bool:
    kernel = _function(type(compressor), name)
    if kernel is None:
        return False
    # Triton launches on the current device.
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        kernel(compressor, given, out, *([] if pieces is None else [pieces]))
    return True


def _is_aligned(payload: Tensor) -> bool:
    """Return True if a byte payload starts at a multiple of four bytes, as fp32 values require."""
    return payload.dtype is not torch.uint8 or payload.data_ptr() % 4 == 0
