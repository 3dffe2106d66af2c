"""Read and set the state of a device's random generator: a few microseconds each, and no wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def rng_state(device: torch.device) -> Tensor:
    """Copy the state of a device's default generator, as bytes on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Put the default generator of a device into a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
