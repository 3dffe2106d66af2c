"""Describe the processors that one rank's work shares."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of one rank, shared by compute, the compressor pool and the network's software."""

    count: float = math.inf
    """Processors, or on a GPU 1 for the device; infinite where nothing that runs beside compute slows it."""
    compute: float = 1.0
    """The processors that compute takes."""

    @property
    def has_spare(self) -> bool:
        """Another thread finds a processor while compute runs."""
        return self.count >= self.compute + 1


UNSHARED = Processors()
