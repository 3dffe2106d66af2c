"""GradScaler: what it keeps for each optimizer between `step` and `update`."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

__all__ = ["GradScaler", "awaits_update", "mark_stepped", "scale_of"]


def scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    """The scale, a scalar of fp32 on the device; made there at the first call."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    scale: Any = scaler._scale
    return scale


def mark_stepped(scaler: GradScaler, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Record that an optimizer has stepped, or was left out for infinite gradients, as `scaler.step` does."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.STEPPED
    state["found_inf_per_device"] = {found_inf.device: found_inf}


def awaits_update(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has stepped, or gradients were unscaled, since the last `scaler.update`."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY
