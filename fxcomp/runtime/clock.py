"""Read the time where the work is done: on the processor, or on the device that it is handed to.

    begin = clock.look()
    step(...)                       # a GPU is given work here, and has done none of it yet
    end = clock.look()
    clock.us(begin, end)            # None until the device has come so far

Whatever is timed, a line, a region or a whole step, is timed between two looks of the same clock. So what is compared
has been measured alike.
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
    """The processor's own clock, or events on the stream in use of a device that works later.

    Nothing waits for a device: what has not happened there yet is not known. A look is only for `us`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Time work on a device; on the processor if none is given."""
        later = device if device is not None and compat.works_later(device) else None
        self.sees_threads = later is None
        """True if other threads may look at it, so that the end of a collective can be known."""
        self.look: Callable[[], Any] = (
            time.perf_counter_ns if later is None else partial(compat.recorded, later, timed=True)
        )

    def us(self, start: Any, end: Any) -> float | None:
        """From one look to another, in µs; None while a device has not come so far."""
        if self.sees_threads:
            return (end - start) / 1e3
        return 1e3 * start.elapsed_time(end) if end.query() else None


Looks = tuple[Any, Any]
"""A begin and an end, as a clock saw them."""


@dataclass(slots=True)
class Waits:
    """Times of a step in which something stood still."""

    for_network: list[Looks] = field(default_factory=list[Looks])
    """Compute, for a collective."""
    for_aside: list[Looks] = field(default_factory=list[Looks])
    """Compute, for all that had gone aside: it compresses there, and waits for collectives."""
    network_aside: list[Looks] = field(default_factory=list[Looks])
    """Lines that had gone aside, for a collective; compute may go on meanwhile."""

    def exposed_us(self, clock: Clock, begin: Any) -> float:
        """Return the time for which compute stood still for the network, after the step's begin, in us."""
        here = sum(clock.us(*looks) or 0.0 for looks in self.for_network)
        stood, waited = (
            [(clock.us(begin, start) or 0.0, clock.us(begin, end) or 0.0) for start, end in each]
            for each in (self.for_aside, self.network_aside)
        )
        both = (min(end, other_end) - max(start, other) for start, end in stood for other, other_end in waited)
        return here + sum(us for us in both if us > 0)
