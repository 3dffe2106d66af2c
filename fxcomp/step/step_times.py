"""Step times and exposed communication, by the clock of the computing device."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from fxcomp import compat
from fxcomp.runtime.clock import Clock, Looks, Waits
from fxcomp.site import Site

KEPT = 200


class StepTimes:
    """Times of whole steps. A step counts once the device has finished it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._clock = device, Clock(device)
        self._step_ms: deque[float] = deque(maxlen=KEPT)
        self._waited_ms: deque[float] = deque(maxlen=KEPT)
        self._numbers: deque[int] = deque(maxlen=KEPT)
        self._pending: deque[tuple[int, Sequence[Looks], Waits]] = deque(maxlen=KEPT)

    def look(self) -> Any:
        """Return a clock reading, at the begin or end of a step."""
        return self._clock.look()

    def add(self, number: int, step: Sequence[Looks], waits: Waits) -> None:
        """Add a step: clock readings of its parts (one per micro-batch), and its waits for the network."""
        self._pending.append((number, step, waits))
        self._collect()

    def forget(self) -> None:
        for times in (self._step_ms, self._waited_ms, self._numbers, self._pending):
            times.clear()

    @property
    def step_ms(self) -> Sequence[float]:
        """Times of completed steps in ms, the latest last."""
        self._collect()
        return self._step_ms

    def settled_ms(self) -> Sequence[float]:
        """Return all times in ms. Waits for the device."""
        if self._pending:
            compat.synchronize(self._device)
        return self.step_ms

    def of(self, numbers: Sequence[int]) -> list[float | None]:
        """Return the times of steps in ms, None for a step that is not counted. Waits for the device."""
        times = self.settled_ms()
        known = dict(zip(self._numbers, times, strict=True))
        return [known.get(number) for number in numbers]

    def since(self, number: int) -> list[float]:
        """Return the times of completed steps from `number` on, in ms."""
        times = self.step_ms
        return [ms for other, ms in zip(self._numbers, times, strict=True) if other >= number]

    def slowest(self, numbers: Sequence[int], site: Site) -> list[float | None]:
        """Return each step's time on the slowest rank, in ms; None unless all ranks counted it. Every rank calls it."""
        mine = [-1.0 if ms is None else ms for ms in self.of(numbers)]
        everyone = site.gather_numbers("the times of a turn's steps", mine)
        return [max(times) if min(times) >= 0 else None for times in zip(*everyone, strict=True)]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms) if self.step_ms else float("nan")

    @property
    def exposed_ms(self) -> float:
        self._collect()
        return statistics.median(self._waited_ms) if self._waited_ms else float("nan")

    def _collect(self) -> None:
        while self._pending:
            number, parts, waits = self._pending[0]
            known = [us for begin, end in parts if (us := self._clock.us(begin, end)) is not None]
            if len(known) < len(parts):
                return
            took = sum(known)
            self._pending.popleft()
            waited = waits.exposed_us(self._clock, parts[0][0])
            self._numbers.append(number)
            self._step_ms.append(took / 1e3)
            self._waited_ms.append(waited / 1e3)
