"""Tensors in a late device's memory, and the same memory as the host sees it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.late.machine import Machine

_DL_EXT_DEV = 12
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_living: dict[int, tuple[Any, Machine, int]] = {}
"""Memory that torch holds by a pointer, with the address of its block."""


def _free(managed: int) -> None:
    _, machine, address = _living.pop(managed)
    machine.free(address)


_FREE = _Deleter(_free)


def new_tensor(
    machine: Machine, size: Sequence[int], dtype: torch.dtype, device: int, stride: Sequence[int] | None
) -> Tensor:
    """Make a tensor in a block of the current stream's, which is freed with it."""
    size = tuple(size)
    stride = _contiguous(size) if stride is None else tuple(stride)
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if math.prod(size) else 0
    address = machine.allocate(elements * dtype.itemsize, device, torch.late.current_stream(device).stream_id)
    carried = torch.uint8 if dtype.itemsize == 1 else dtype
    bytes_ = _from_address(machine, address, elements, carried, device)
    flat = bytes_ if carried is dtype else bytes_.view(dtype)
    return torch.ops.aten.as_strided.default.redispatch(
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), flat, size, stride, 0
    )


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def _from_address(machine: Machine, address: int, elements: int, dtype: torch.dtype, device: int) -> Tensor:
    shape, strides = (ctypes.c_int64 * 1)(elements), (ctypes.c_int64 * 1)(1)
    name = str(dtype).removeprefix("torch.")
    code = _CODES[name.rstrip("0123456789")]
    tensor = _DLTensor(address, _DL_EXT_DEV, device, 1, code, 8 * dtype.itemsize, 1, shape, strides, 0)

    managed = _DLManagedTensor(tensor, None, _FREE)
    _living[ctypes.addressof(managed)] = (managed, shape, strides), machine, address
    return torch.utils.dlpack.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))


def on_host(machine: Machine, value: Tensor) -> Tensor:
    """View a device's memory from the host, whatever is being done there. It is nobody's: the block may be freed."""
    arena = machine.arenas[value.device.index]
    offset = value.data_ptr() - arena.data_ptr()
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    assert offset % value.element_size() == 0
    return arena.view(value.dtype).as_strided(value.shape, value.stride(), offset // value.element_size())
