"""Arithmetic of a step's own lines, in place, by a kernel where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcomp.compressors import kernels


def accumulate(bucket: Tensor, velocity: Tensor, momentum: float) -> Tensor:
    """Make both momentum · velocity + bucket; the velocity only where that is finite."""
    if _have_kernel(bucket, velocity):
        kernels.run("fxcomp_accumulate", bucket, velocity, float(momentum), bucket.numel())
    else:
        torch.add(velocity * momentum, bucket, out=bucket)
        torch.where(bucket.isfinite(), bucket, velocity, out=velocity)
    return bucket


def mask_velocity(velocity: Tensor, bucket: Tensor, residual: Tensor) -> Tensor:
    """Make the velocity 0 where nothing was left out of a finite bucket."""
    if _have_kernel(bucket, velocity, residual):
        kernels.run("fxcomp_mask_velocity", bucket, velocity, residual, bucket.numel())
        return velocity
    return velocity.masked_fill_((residual == 0) & bucket.isfinite(), 0.0)


def turn(payloads: Tensor, outer: int, sizes: Sequence[int], out: Tensor) -> Tensor:
    """Put so many rows of parts of these sizes in the parts' order: all rows of part 0, then all of part 1."""
    parts = torch.split(payloads.view(outer, -1), list(sizes), dim=1)
    for place, part in zip(torch.split(out, [outer * size for size in sizes]), parts, strict=True):
        place.view(part.shape).copy_(part)
    return out


def keep(state: Tensor, value: Tensor) -> Tensor:
    """Replace a state where the new value is finite."""
    return state.copy_(torch.where(value.isfinite(), value, state))


def roll_back(residual: Tensor, own: Tensor, bucket: Tensor) -> None:
    """Make a residual what it was before the bucket was added and the own payload taken off; `own` is overwritten."""
    before = own.add_(residual).sub_(bucket)
    torch.where(before.isfinite(), before, residual, out=residual)


def is_finite(value: Tensor) -> bool:
    if _have_kernel(value):
        return bool(kernels.run("fxcomp_all_finite", value, value.numel()))
    return bool(value.isfinite().all())


def _have_kernel(*values: Tensor) -> bool:
    """Tell whether values are what kernels take."""
    size = values[0].numel()
    return all(
        v.dtype is torch.float32 and v.numel() == size and v.is_contiguous() and kernels.can_run_on(v) for v in values
    )
