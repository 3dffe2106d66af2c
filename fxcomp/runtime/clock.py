"""Read the time on the processor, or on an asynchronous device.

    begin = clock.look()
    step(...)                       # queues work on a GPU
    end = clock.look()
    clock.us(begin, end)            # None until the GPU has reached `end`

All readings of a clock are comparable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fxcomp import compat


class Clock:
    """Processor clock, or timed events on the current stream of an asynchronous device."""

    def __init__(self, device: torch.device | None = None) -> None:
        later = device if device is not None and compat.works_later(device) else None
        self.sees_threads = later is None
        """True if other threads may read the clock."""
        self.look: Callable[[], Any] = (
            time.perf_counter_ns if later is None else partial(compat.recorded, later, timed=True)
        )

    def us(self, start: Any, end: Any) -> float | None:
        """Return the time between two readings, in µs; None if a device has not reached the second."""
        if self.sees_threads:
            return (end - start) / 1e3
        return 1e3 * start.elapsed_time(end) if end.query() else None


Looks = tuple[Any, Any]
"""Clock readings at begin and end."""


@dataclass(slots=True)
class Waits:
    """Intervals of a step during which work was blocked."""

    for_network: list[Looks] = field(default_factory=list[Looks])
    """Compute blocked on a collective."""
    for_aside: list[Looks] = field(default_factory=list[Looks])
    """Compute blocked on the side stream, which compresses and waits for collectives."""
    network_aside: list[Looks] = field(default_factory=list[Looks])
    """Side stream blocked on a collective."""

    def exposed_us(self, clock: Clock, begin: Any) -> float:
        """Return the time, in µs, for which the network blocked compute since `begin`."""
        here = sum(clock.us(*looks) or 0.0 for looks in self.for_network)
        stood, waited = (
            [(clock.us(begin, start) or 0.0, clock.us(begin, end) or 0.0) for start, end in each]
            for each in (self.for_aside, self.network_aside)
        )
        both = (min(end, other_end) - max(start, other) for start, end in stood for other, other_end in waited)
        return here + sum(us for us in both if us > 0)
