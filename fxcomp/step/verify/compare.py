"""Compare two tensors up to the noise of their precision."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.graph.captured import Captured

FLOAT32 = 1e-4
"""Relative to the largest element: sums in another order, as Inductor's code has them (assumed)."""

TF32 = 1e-2
"""Factors are rounded to 11 bits, and which products are is the library's choice (assumed)."""

HALF = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Values between operators are rounded to 11 and 8 bits (assumed)."""

FLOOR = 1e-2
"""Absolute tolerance of gradients over the relative one times the largest gradient: some are zero but for rounding."""

ROUNDINGS = 16
"""So many times as far as eager's own rounding moves a gradient, another order of operators may (assumed)."""

UPDATE = 1e-4
"""Relative to the largest movement: an optimizer's few operators in float32, on the same numbers."""


def tolerance_of(captured: Captured) -> float:
    """Choose the tolerance of losses and gradients relative to the largest element, for reordered operators."""
    values = [node.meta.get("val") for node in captured.graph.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    found = [FLOAT32, *(HALF[dtype] for dtype in HALF if dtype in dtypes)]
    if captured.device.type == "cuda" and any(
        compat.multiplies_in_tf32(is_convolution=is_convolution) for is_convolution in (False, True)
    ):
        found.append(TF32)
    return max(found)


def largest(value: Tensor) -> float:
    """Find the largest finite magnitude; 0 if there is none."""
    if value.numel() == 0:
        return 0.0
    found = value.detach().abs().max().item()
    if found == found and found != float("inf"):
        return float(found)
    finite = value[value.isfinite()]
    return float(finite.abs().max().item()) if finite.numel() else 0.0


def difference(value: Tensor, expected: Tensor, relative: float, absolute: float = 0.0) -> float | None:
    """Find the largest difference, or None if it is noise. Values that are not finite must be so in both."""
    if value.shape != expected.shape or value.dtype is not expected.dtype:
        return float("inf")
    if torch.equal(value, expected):
        return None
    if not (value.is_floating_point() or value.is_complex()):
        return (value.double() - expected.double()).abs().max().item()
    found = (value - expected).abs().max().item()
    if not (found < float("inf")):  # something is not finite
        both = value.isfinite() & expected.isfinite()
        if not torch.equal(value.isfinite(), expected.isfinite()):
            return float("inf")
        if not both.any():
            return None
        found = (value[both] - expected[both]).abs().max().item()
    return found if found > relative * largest(expected) + absolute + 1e-12 else None


def moved_otherwise(before: Tensor, after: Tensor, expected: Tensor) -> tuple[float, float] | None:
    """Find the largest distance of two updates of a tensor, and of its movement; None if it is rounding.

    Differences are held against the movement: a rate that is off by a tenth moves a parameter by a fraction of itself.
    """
    if torch.equal(after, expected):
        return None
    apart = after.double().sub_(expected).abs_()
    moved = expected.double().sub_(before).abs_()
    same = ~(after.isfinite() | expected.isfinite())
    if same.any():
        apart, moved = apart.masked_fill_(same, 0.0), moved.masked_fill_(same, 0.0)
    rounding = 4 * torch.finfo(after.dtype).eps if after.is_floating_point() else 0.0
    furthest = largest(moved)
    allowed = expected.double().abs_().mul_(rounding).add_(UPDATE * furthest)
    if same.any():
        allowed = allowed.masked_fill_(same, 0.0)
    return None if bool((apart <= allowed).all()) else (largest(apart), furthest)
