"""Show a rank's own gradients before they are sent, and add what another plan still owes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

GradientCheck = Callable[[str, Tensor, int], None]
"""Takes a parameter's name, a gradient or a part of one, and the place of the part's first element."""


class LocalGradients:
    """The gradients of the step under way: who looks at them, and what they bring along."""

    def __init__(self) -> None:
        self.on_gradient: GradientCheck | None = None
        self.on_update: Callable[[Tensor], None] | None = None
        """Takes the loss, once every gradient has been seen."""
        self.before_packing: list[Callable[[], None]] = []
        """Each is called once, in order, before the first bucket of gradients is filled."""
        self.owed: dict[str, Tensor] = {}
        """Parts of gradients that another plan left out, flat, by parameter; they are added until this is cleared."""
        self.are_applied = False
        """True once a line of the step may have changed a parameter."""

    def see(
        self, parameters: Sequence[str], gradients: Sequence[Tensor], starts: Sequence[int], factor: Tensor | None
    ) -> None:
        """Show gradients, times the live factor, to whoever checks them."""
        while parameters and self.before_packing:
            self.before_packing.pop(0)()
        if self.on_gradient is not None and parameters:
            for parameter, gradient, start in zip(parameters, gradients, starts or [0] * len(gradients), strict=True):
                self.on_gradient(parameter, gradient if factor is None else gradient * factor, start)

    def add_owed(self, parameters: Sequence[str], parts: Sequence[Tensor], starts: Sequence[int], scale: float) -> None:
        """Add what is owed to parts of gradients, in place and scaled as they are."""
        for parameter, part, start in zip(parameters, parts, starts or [0] * len(parts), strict=False):
            owed = self.owed.get(parameter)
            if owed is not None:
                part.add_(owed[start : start + part.numel()].view(part.shape), alpha=scale)

    def complete(self, parameters: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Show gradients that no bucket carries, and add what is owed: one rank alone has no buckets."""
        self.see(parameters, gradients, (), None)
        if not self.owed:
            return list(gradients)
        return [
            gradient.add(self.owed[name].view(gradient.shape)).to(gradient.dtype) if name in self.owed else gradient
            for name, gradient in zip(parameters, gradients, strict=True)
        ]

    def before_update(self, loss: Tensor) -> None:
        """The last line before parameters change: every gradient has been seen."""
        if self.on_update is not None:
            self.on_update(loss)
        self.are_applied = True
