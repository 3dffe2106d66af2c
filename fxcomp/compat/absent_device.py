"""Let a training script for a GPU run where there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Properties of a GPU that torch.cuda reports."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
