"""Read and set the state of a device's random generator: a few microseconds each, and no wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def rng_state(device: torch.device) -> Tensor:
    """Copy the state of a device's default generator, as bytes on the CPU, to draw the same numbers again."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Let the default generator of a device go on from a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def seed_rng(seed: int, device: torch.device) -> None:
    """Let the default generator of a device begin again with a seed."""
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    generator.manual_seed(seed)
