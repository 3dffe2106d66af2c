"""Small operators of an emitted step: packing, rolling back, and random generators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fxcomp.compressors import kernels

_torch = cast("Any", torch)  # partly untyped


def turn(payloads: Tensor, outer: int, sizes: Sequence[int], buffer: Callable[[Tensor], Tensor]) -> Tensor:
    """Reorder `outer` rows of parts: all rows of part 0, then all of part 1.

    `buffer` allocates memory like its argument.
    """
    out = buffer(payloads)
    parts = torch.split(payloads.view(outer, -1), list(sizes), dim=1)
    for place, part in zip(torch.split(out, [outer * size for size in sizes]), parts, strict=True):
        place.view(part.shape).copy_(part)
    return out


def keep(state: Tensor, value: Tensor) -> Tensor:
    return state.copy_(torch.where(value.isfinite(), value, state))


def roll_back(residual: Tensor, own: Tensor, bucket: Tensor) -> None:
    """Restore the previous residual, `own + residual - bucket`, from the decoded payload `own`. Overwrites `own`."""
    before = own.add_(residual).sub_(bucket)
    torch.where(before.isfinite(), before, residual, out=residual)


def all_finite(values: Sequence[Tensor]) -> bool:
    """Return whether all values are finite. Synchronises with the device once."""
    there = [value for value in values if value.device.type != "cpu" and value.numel()]
    is_finite_here = all(_is_finite(value) for value in values if value.device.type == "cpu")
    if not there:
        return is_finite_here
    largest = torch.ops.aten._foreach_norm.Scalar(there, math.inf)
    return is_finite_here and bool(torch.stack([value.double() for value in largest]).isfinite().all())


def not_finite_too(flag: Tensor | None, value: Tensor) -> Tensor:
    """Return a flag, uint8[1]: 1 if `flag` is set or the value is not finite. Reads the value once."""
    seen = (~torch.isfinite(torch.stack(torch.aminmax(value))).all()).to(torch.uint8).view(1)
    return seen if flag is None else flag | seen


def _is_finite(value: Tensor) -> bool:
    if value.dtype is torch.float32 and value.is_contiguous() and kernels.can_run_on(value):
        return bool(kernels.run("fxcomp_all_finite", value, value.numel()))
    return bool(value.isfinite().all())


def rng_state(device: torch.device | str) -> Tensor:
    return torch.get_rng_state() if torch.device(device).type == "cpu" else torch.cuda.get_rng_state(device)


def set_rng_state(state: Tensor, device: torch.device | str) -> None:
    if torch.device(device).type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def seed_rng(seed: int, device: torch.device | str) -> None:
    named = torch.device(device)
    generator = torch.default_generator if named.type == "cpu" else torch.cuda.default_generators[named.index]
    generator.manual_seed(seed)


_AS_THEY_ARE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def packed_dtype(values: Sequence[Tensor], wanted: torch.dtype | None = None) -> torch.dtype:
    """Return the buffer's dtype: `wanted`, else the values' common floating dtype, else uint8."""
    first = values[0].dtype
    if wanted is not None:
        return wanted
    return first if first in _AS_THEY_ARE and all(value.dtype is first for value in values) else torch.uint8


def packed_sizes(values: Sequence[Tensor], wanted: torch.dtype | None = None) -> list[int]:
    if wanted is not None:
        return [value.numel() for value in values]
    size = packed_dtype(values).itemsize
    return [value.numel() * value.element_size() // size for value in values]


def slots(flat: Tensor, values: Sequence[Tensor], wanted: torch.dtype | None = None) -> list[Tensor]:
    """Return each tensor's view of a flat buffer, in its shape, and in dtype `wanted` or its own.

    Wider dtypes must come first, for alignment.
    """
    sizes = packed_sizes(values, wanted)
    ends = itertools.accumulate(sizes)
    parts = zip(ends, sizes, values, strict=True)
    return [flat[end - size : end].view(wanted or value.dtype).view(value.shape) for end, size, value in parts]


LARGE = 1 << 21
"""Number of elements from which a second pass over memory costs more than a kernel launch (assumed: 2.8 TB/s, 5 µs)."""


def copy_scaled(
    values: Sequence[Tensor], scale: float, out: Sequence[Tensor], flat: Tensor, factor: Tensor | None = None
) -> None:
    """Write each value, times `scale` and an optional `factor`, to its view `out` of a flat buffer.

    On a device, one operator copies all values with the strides of their views, and one multiplies them. Large values
    are instead multiplied into their views, in one pass over memory.
    """
    whole = None if factor is None else factor * scale
    is_scaled = whole is not None or scale != 1.0
    if flat.device.type != "cpu":
        number = scale if whole is None else whole
        pairs = list(zip(values, out, strict=True))
        large = [(v, p) for v, p in pairs if is_scaled and v.numel() >= LARGE and v.dtype is p.dtype]
        rest = [(v, p) for v, p in pairs if v.numel() < LARGE or v.dtype is not p.dtype] if large else pairs
        for value, place in large:
            torch.mul(value, number, out=place)
        copy_at_once([value for value, _ in rest], [place for _, place in rest])
        if is_scaled and not large:
            flat.mul_(number)
        elif is_scaled and rest:
            _torch._foreach_mul_([place for _, place in rest], number)
        return
    for value, place in zip(values, out, strict=True):
        if not is_scaled:
            place.copy_(value)
        elif value.dtype is not place.dtype:  # a product in the narrower dtype would be rounded
            place.copy_(value).mul_(scale if whole is None else whole)
        else:
            torch.mul(value, scale if whole is None else whole, out=place)


def copy_at_once(values: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Copy values to `out`, batched by dtype. A value whose strides differ from its target's is copied alone."""
    lists: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for value, place in zip(values, out, strict=True):
        if value.stride() == place.stride():
            places, sources = lists.setdefault((value.dtype, place.dtype), ([], []))
            places.append(place)
            sources.append(value)
        else:
            place.copy_(value)
    for places, sources in lists.values():
        _torch._foreach_copy_(places, sources)
