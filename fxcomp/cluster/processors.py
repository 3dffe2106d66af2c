"""Describe the processors that one rank's work shares."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Processors:
    """What compute, the compressor pool and the network's software share, for one rank."""

    count: float = math.inf
    """Processors, or on a GPU 1 for the device; infinite where nothing that runs beside compute slows it."""
    compute: float = 1.0
    """How many of them compute takes."""

    @property
    def has_spare(self) -> bool:
        """Whether another thread finds a processor beside compute."""
        return self.count >= self.compute + 1


UNSHARED = Processors()
