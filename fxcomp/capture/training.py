"""The user's own objects that a step trains: model, loss function and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

LossFn = Callable[[nn.Module, Any], Any]
"""Takes the model and a batch; returns the scalar loss, or the loss and an auxiliary result."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A trainable parameter: its first name in the model, and the optimizer's group that updates it."""

    name: str
    parameter: nn.Parameter
    group: int


@dataclass(frozen=True, slots=True)
class Training:
    """The model, loss function and optimizer of a step, and how its gradients are clipped."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    owned: tuple[Owned, ...]
    max_grad_norm: float | None
    fresh_state: Mapping[str, object] = field(default_factory=dict[str, object])
    """Optimizer state that was created for the capture, by parameter: these have not been stepped yet."""

    @property
    def device(self) -> torch.device:
        """The one device of the model."""
        return self.owned[0].parameter.device
