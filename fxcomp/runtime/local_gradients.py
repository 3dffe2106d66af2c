"""Pass a rank's gradients to checks before they are sent, and add residuals of a dropped plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

GradientCheck = Callable[[str, Tensor, int], None]
"""Takes a parameter's name, its gradient or a part of it, and the part's first index in the flat gradient."""


class LocalGradients:
    def __init__(self) -> None:
        self.on_gradient: GradientCheck | None = None
        self.on_update: Callable[[Tensor], None] | None = None
        """Called with the loss after all gradients of a step are packed."""
        self.before_packing: list[Callable[[], None]] = []
        """Callbacks, run once and in order before the first bucket is filled."""
        self.owed: dict[str, Tensor] = {}
        """Flat residuals of a dropped plan, by parameter. They are added to every step's gradients until cleared."""
        self.are_applied = False
        """True once a line may have changed a parameter."""

    def see(
        self, parameters: Sequence[str], gradients: Sequence[Tensor], starts: Sequence[int], factor: Tensor | None
    ) -> None:
        while parameters and self.before_packing:
            self.before_packing.pop(0)()
        if self.on_gradient is not None and parameters:
            for parameter, gradient, start in zip(parameters, gradients, starts or [0] * len(gradients), strict=True):
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self.on_gradient(parameter, gradient if factor is None else gradient.to(wide) * factor, start)

    def add_owed(self, parameters: Sequence[str], parts: Sequence[Tensor], starts: Sequence[int], scale: float) -> None:
        for parameter, part, start in zip(parameters, parts, starts or [0] * len(parts), strict=False):
            owed = self.owed.get(parameter)
            if owed is not None:
                part.add_(owed[start : start + part.numel()].view(part.shape), alpha=scale)

    def complete(self, parameters: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Check gradients and add `owed`. Replaces communication on a single rank."""
        self.see(parameters, gradients, (), None)
        if not self.owed:
            return list(gradients)
        return [
            gradient.add(self.owed[name].view(gradient.shape)).to(gradient.dtype) if name in self.owed else gradient
            for name, gradient in zip(parameters, gradients, strict=True)
        ]

    def before_update(self, loss: Tensor) -> None:
        """Call `on_update`. Emitted lines change parameters only after this call."""
        if self.on_update is not None:
            self.on_update(loss)
        self.are_applied = True
