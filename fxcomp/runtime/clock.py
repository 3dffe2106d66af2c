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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fxcomp import compat


class Clock(Protocol):
    """Reads the time. What a look gives is only for `us`."""

    sees_threads: bool
    """True if other threads may look at it, so that the end of a collective can be known."""

    def look(self) -> Any: ...

    def us(self, start: Any, end: Any) -> float | None:
        """From one look to another, in µs; None while a device has not come so far."""
        ...


class HostClock:
    """The processor's own, in nanoseconds."""

    sees_threads = True

    def __init__(self) -> None:
        self.look = time.perf_counter_ns

    def us(self, start: int, end: int) -> float:
        return (end - start) / 1e3


class DeviceClock:
    """Events on a device's stream in use. Nothing waits for them: what has not happened yet is not known."""

    sees_threads = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def look(self) -> Any:
        return compat.recorded(self._device, timed=True)

    def us(self, start: Any, end: Any) -> float | None:
        if not end.query():
            return None
        return 1e3 * start.elapsed_time(end)


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


def clock_of(device: torch.device) -> Clock:
    """Make the clock that times work on a device."""
    return DeviceClock(device) if compat.works_later(device) else HostClock()
