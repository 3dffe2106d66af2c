"""The scale of the loss, which stays the user's GradScaler's: its settings, its growth, its state.

    loss * scale ─backward─► gradients * scale ─pack, times 1 / scale─► gradients

What is packed is in the unit of the gradient, and so is what compression leaves out, whatever the scale becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.optimizer import Owned
from fxcomp.errors import ScaleNotUpdated, UnsupportedParameter


@dataclass(frozen=True, slots=True)
class LossScale:
    """A GradScaler and the optimizers that it serves here."""

    scaler: Any
    optimizers: tuple[torch.optim.Optimizer, ...]
    device: torch.device

    @classmethod
    def of(cls, scaler: Any, optimizers: Sequence[torch.optim.Optimizer], owned: Sequence[Owned]) -> LossScale | None:
        """Take an enabled GradScaler; None for none. Raises UnsupportedParameter, as `scaler.unscale_` refuses them."""
        if scaler is None:
            return None
        for each in owned:
            if each.parameter.dtype is torch.float16:
                raise UnsupportedParameter(
                    f"the parameter {each.name!r} is torch.float16, and so is its gradient: without the scale small"
                    " values of it are zero, as they would be had the loss not been scaled.\n"
                    "  Keep parameters in float32 and compute in float16 under torch.autocast, or leave scaler= out."
                )
        return cls(scaler, tuple(optimizers), owned[0].parameter.device)

    @property
    def scale(self) -> Tensor:
        """The factor on the loss: a scalar of fp32, on the device."""
        return compat.scale_of(self.scaler, self.device)

    @property
    def inverse(self) -> Tensor:
        """The factor on gradients, rounded as `scaler.unscale_` does."""
        return self.scale.double().reciprocal().float()

    def check_updated(self) -> None:
        """Raise ScaleNotUpdated unless the scaler was told that the last step is over."""
        if any(compat.awaits_update(self.scaler, optimizer) for optimizer in self.optimizers):
            raise ScaleNotUpdated(
                "scaler.update() was not called since the last step, or scaler.unscale_ or scaler.step was.\n"
                "  Call scaler.update() once after each step that updates parameters. The step itself unscales, clips"
                " and steps: leave scaler.scale, scaler.unscale_ and scaler.step out."
            )

    def changes(self) -> int:
        """Count how often the scale was written, without reading it from the device."""
        return self.scale._version

    def tell(self, *, skipped: bool) -> None:
        """Let `scaler.update` know whether the step was left out, on all ranks."""
        with torch.inference_mode(False):  # `update` adds these up outside of it
            found_inf = torch.full((), float(skipped), device=self.device)
        for optimizer in self.optimizers:
            compat.mark_stepped(self.scaler, optimizer, found_inf)
