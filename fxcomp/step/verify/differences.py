"""Compare the results of a compiled step with those of eager PyTorch, on this rank, up to their precision's noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.graph.captured import Captured
from fxcomp.step.verify.eager import EagerResult, largest

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

UPDATE_ROUNDINGS = 4
"""Allow an update in 16 bits to differ by so many units in the last place: fused operators round once, others often."""


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
    rounding = UPDATE_ROUNDINGS * torch.finfo(after.dtype).eps if after.is_floating_point() else 0.0
    furthest = largest(moved)
    allowed = expected.double().abs_().mul_(rounding).add_(max(UPDATE, rounding) * furthest)
    if same.any():
        allowed = allowed.masked_fill_(same, 0.0)
    return None if bool((apart <= allowed).all()) else (largest(apart), furthest)


class Differences:
    """The first difference that is more than noise, as a sentence."""

    def __init__(self, captured: Captured):
        self._captured = captured
        self.relative = tolerance_of(captured)
        self.first = ""
        self.suspects: dict[str, tuple[float, str]] = {}
        """Gradients whose difference may be rounding: how large it is, and the sentence."""
        self._is_exact = True
        """Everything so far was equal bit for bit: then whole numbers must be equal too."""

    def note(self, what: str) -> None:
        """Note a difference unless there is one already."""
        self.first = self.first or what

    def check_loss(self, loss: Tensor, expected: Tensor) -> None:
        """Compare losses; a difference comes before those of gradients."""
        if self._off(loss, expected) is not None:
            self.first = f"the loss is {loss.item():.9g}, eager's is {expected.item():.9g}"

    def check_gradient(
        self, name: str, gradient: Tensor, expected: Tensor, largest_of_all: float, start: int = 0
    ) -> None:
        """Compare a local gradient, or a part of one from element `start` on.

        One that is zero but for rounding is measured by the largest of all, a part by the largest of its whole. What
        is more, but would be noise of the largest of all, is suspected: its terms may be larger than their sum.
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
        """Note a difference beyond rounding, which moves each gradient so far; return the tolerance."""
        allowed = {name: ROUNDINGS * rounding.get(name, 0.0) for name in self.suspects}
        for name, (off, said) in self.suspects.items():
            if not off <= allowed[name]:
                self.note(said)
        return allowed

    def check_aux(self, returned: Sequence[Any], eager: EagerResult) -> None:
        """Compare the auxiliary results."""
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
        """Compare buffers with what eager's forward pass made of them."""
        for name, buffer in model.named_buffers():
            expected = eager.buffers.get(name)
            if expected is not None and (off := self._off(buffer, expected)) is not None:
                self.note(
                    f"the buffer {name!r} differs from eager's by up to {off:.3g}, where it reaches"
                    f" {largest(expected):.3g}"
                )

    def _off(self, value: Tensor, expected: Tensor, absolute: float = 0.0) -> float | None:
        """Give the difference if it is more than noise.

        Whole numbers may follow from noise, as a count of right answers.
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
