"""What is trained: the user's own model, loss function and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fxcomp.capture.whole_step import LossFn, Owned


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained: the user's own objects."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    owned: tuple[Owned, ...]
    max_grad_norm: float | None
    fresh_state: Mapping[str, object] = field(default_factory=dict[str, object])
    """The optimizer's state of each parameter that was made for the capture: its first step is still to come."""

    @property
    def device(self) -> torch.device:
        """Where the model lies, all of it."""
        return self.owned[0].parameter.device
