"""Exchange a few small numbers between ranks beside a step, which does not wait for them, nor they for it.

    host ─► pinned ─► device ─► collective ─► pinned ─► read, by whoever needs it

All of it is given to a stream of its own when it begins. So what arrives is there whatever a device is still computing,
and the memory is used on no other stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.runtime.group import Work
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.runtime.transport import Transport


@dataclass(frozen=True, slots=True)
class Coming:
    """Numbers that are under way."""

    _values: Tensor
    """On the host, once all is over."""
    _work: Work | None
    """The collective; None where a stream waits for it."""
    _arrived: Any
    """The event after the last copy, from a device."""

    def end(self) -> None:
        """Let the collective end, so that nothing of it is under way after the step."""
        if self._work is not None:
            self._work.wait()

    def read(self) -> list[float]:
        """Wait until they have come."""
        self.end()
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # untyped


class Aside:
    """Sends numbers between all ranks, beside what a device computes."""

    def __init__(self, transport: Transport, ranks: int, device: torch.device) -> None:
        self._transport, self._ranks, self._device = transport, ranks, device
        self._streams = compat.streams_of(device)
        self._stream = None if self._streams is None else self._streams.Stream(device)

    def any(self, flags: Sequence[bool]) -> Coming:
        """Begin to find out which flags are set on any rank; every rank calls it, with as many."""

        def start(mine: Tensor) -> tuple[Tensor, Work]:
            return mine, self._transport.all_reduce(mine, "world", "main", "max")

        return self._begun(torch.tensor(flags, dtype=torch.uint8), start)

    def gather(self, number: float) -> Coming:
        """Begin to collect a number of each rank, in rank order; every rank calls it."""

        def start(mine: Tensor) -> tuple[Tensor, Work]:
            everyone = mine.new_zeros(self._ranks)
            return everyone, self._transport.start(Transfer(Pattern.ALL_GATHER, mine, everyone, self._ranks, "world"))

        return self._begun(torch.tensor([number], dtype=torch.float64), start)

    def _begun(self, mine: Tensor, start: Callable[[Tensor], tuple[Tensor, Work]]) -> Coming:
        if self._streams is None:
            values, work = start(mine)
            return Coming(values, work, None)
        with self._streams.stream(self._stream):
            there, work = start(compat.to_device(mine, self._device))
            work.wait()
            values = torch.empty(there.shape, dtype=there.dtype, pin_memory=True).copy_(there, non_blocking=True)
            return Coming(values, None, compat.recorded(self._device))
