"""Compare results of a compiled step with eager PyTorch on this rank, within tolerances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.graph.captured import Captured
from fxcomp.step.verify.eager import EagerResult, largest

FLOAT32 = 1e-4
"""Tolerance relative to the largest element, for sums in another order, as in Inductor's code (assumed)."""

TF32 = 1e-2
"""Tolerance for products with factors rounded to 11 bits (assumed)."""

HALF = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Tolerances for values rounded to 11 and 8 bits between operators (assumed)."""

FLOOR = 1e-2
"""Absolute tolerance of a gradient, as a fraction of the largest gradient's tolerance.

Some gradients consist only of rounding errors.
"""

ROUNDINGS = 16
"""Maximum difference from reordered operators, in multiples of eager's own rounding error (assumed)."""

UPDATE = 1e-4
"""Tolerance of an update relative to its largest change: rounding of a few float32 operators on equal inputs."""

UPDATE_ROUNDINGS = 4
"""Maximum difference of 16-bit updates, in units in the last place, because fused operators round less often."""


def tolerance_of(captured: Captured) -> float:
    """Return the tolerance of losses and gradients relative to the largest element."""
    values = [node.meta.get("val") for node in captured.graph.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    found = [FLOAT32, *(HALF[dtype] for dtype in HALF if dtype in dtypes)]
    if captured.device.type == "cuda" and any(
        compat.multiplies_in_tf32(is_convolution=is_convolution) for is_convolution in (False, True)
    ):
        found.append(TF32)
    return max(found)


def difference(value: Tensor, expected: Tensor, relative: float, absolute: float = 0.0) -> float | None:
    """Return the largest difference; None if it is within tolerance. Non-finite values must have equal positions."""
    if value.shape != expected.shape or value.dtype is not expected.dtype:
        return float("inf")
    if torch.equal(value, expected):
        return None
    if not (value.is_floating_point() or value.is_complex()):
        return (value.double() - expected.double()).abs().max().item()
    found = (value - expected).abs().max().item()
    if not (found < float("inf")):  # some values are not finite
        both = value.isfinite() & expected.isfinite()
        if not torch.equal(value.isfinite(), expected.isfinite()):
            return float("inf")
        if not both.any():
            return None
        found = (value[both] - expected[both]).abs().max().item()
    return found if found > relative * largest(expected) + absolute + 1e-12 else None


def moved_otherwise(before: Tensor, after: Tensor, expected: Tensor) -> tuple[float, float] | None:
    """Return the largest difference of two updates and the largest change; None if the difference is within tolerance.

    Tolerances are relative to the change, because a wrong learning rate changes a parameter only slightly.
    """
    if torch.equal(after, expected):
        return None
    apart = after.double().sub_(expected).abs_()
    moved = expected.double().sub_(before).abs_()
    same = ~(after.isfinite() | expected.isfinite())
    if same.any():
        apart, moved = apart.masked_fill_(same, 0.0), moved.masked_fill_(same, 0.0)
    rounding = UPDATE_ROUNDINGS * torch.finfo(after.dtype).eps if after.is_floating_point() else 0.0
    furthest = largest(moved)
    allowed = expected.double().abs_().mul_(rounding).add_(max(UPDATE, rounding) * furthest)
    if same.any():
        allowed = allowed.masked_fill_(same, 0.0)
    return None if bool((apart <= allowed).all()) else (largest(apart), furthest)


class Differences:
    """First difference above tolerance, as a sentence."""

    def __init__(self, captured: Captured):
        self._captured = captured
        self.relative = tolerance_of(captured)
        self.first = ""
        self.suspects: dict[str, tuple[float, str]] = {}
        """Gradients whose difference may be rounding, with the difference and a message."""
        self._is_exact = True
        """True while all floats were bitwise equal. Integers must then be equal, too."""

    def note(self, what: str) -> None:
        self.first = self.first or what

    def check_loss(self, loss: Tensor, expected: Tensor) -> None:
        """Compare losses. A difference replaces earlier differences."""
        if self._off(loss, expected) is not None:
            self.first = f"the loss is {loss.item():.9g}, eager's is {expected.item():.9g}"

    def check_gradient(
        self, name: str, gradient: Tensor, expected: Tensor, largest_of_all: float, start: int = 0
    ) -> None:
        """Compare a local gradient, or its part from element `start` on.

        A gradient is a suspect if the difference is above its own tolerance, but below the tolerance of the largest
        gradient. Rounding may be the cause, because the terms of a gradient may be larger than their sum.
        """
        part, noise = expected, FLOOR * self.relative * largest_of_all
        if gradient.numel() < expected.numel():
            part = expected.reshape(-1)[start : start + gradient.numel()].view(gradient.shape)
            noise += self.relative * largest(expected)
        off = self._off(gradient, part, noise)
        if off is None:
            return
        said = (
            f"the gradient of {name!r} differs from eager by up to {off:.3g}, where it reaches {largest(expected):.3g}"
        )
        if off > self.relative * largest_of_all:
            self.note(said)
        else:
            self.suspects[name] = max((off, said), self.suspects.get(name, (0.0, "")))

    def judge_suspects(self, rounding: Mapping[str, float]) -> dict[str, float]:
        """Note suspects whose difference exceeds ROUNDINGS times their error in `rounding`. Return these tolerances."""
        allowed = {name: ROUNDINGS * rounding.get(name, 0.0) for name in self.suspects}
        for name, (off, said) in self.suspects.items():
            if not off <= allowed[name]:
                self.note(said)
        return allowed

    def check_aux(self, returned: Sequence[Any], eager: EagerResult) -> None:
        if self._captured.has_aux and eager.aux_spec != self._captured.aux_spec:
            self.note("the auxiliary result has another structure than eager's")
            return
        values = self._captured.aux_leaves(returned)
        for place, (value, expected) in enumerate(zip(values, eager.aux, strict=True)):
            if isinstance(value, Tensor) and isinstance(expected, Tensor):
                differs = self._off(value, expected, self.relative * largest(eager.loss)) is not None
            else:
                differs = not _equal(value, expected, self.relative)
            if differs:
                self.note(f"value {place} of the auxiliary result is {_shown(value)}, eager's is {_shown(expected)}")

    def check_buffers(self, model: nn.Module, eager: EagerResult) -> None:
        for name, buffer in model.named_buffers():
            expected = eager.buffers.get(name)
            if expected is not None and (off := self._off(buffer, expected)) is not None:
                self.note(
                    f"the buffer {name!r} differs from eager's by up to {off:.3g}, where it reaches"
                    f" {largest(expected):.3g}"
                )

    def _off(self, value: Tensor, expected: Tensor, absolute: float = 0.0) -> float | None:
        """Return the difference, or None if within tolerance.

        Integers may differ once floats do, for example a count of correct answers.
        """
        if torch.equal(value, expected):
            return None
        is_whole = not (value.is_floating_point() or value.is_complex())
        if is_whole and value.dtype is expected.dtype and not self._is_exact:
            return None
        self._is_exact = False
        return difference(value, expected, self.relative, absolute)


def _equal(value: Any, expected: Any, relative: float) -> bool:
    if isinstance(value, float) and isinstance(expected, float):
        return value == expected or value != value or abs(value - expected) <= relative * abs(expected)
    return type(value) is type(expected) and bool(value == expected)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.9g}" if value.numel() == 1 else f"a tensor up to {largest(value):.6g}"
    return repr(value)
