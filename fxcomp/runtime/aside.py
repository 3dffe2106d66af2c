"""Run lines of a step, or an exchange of a few small numbers, on another stream of a device.

Lines go aside so that compute does not stand still where they wait:

    with side.aside(bucket):        after what compute has been given so far
        ...                         compressing, launching, waiting
    side.join(mean)                 compute goes on after that

On a device that is done with its work as it is given, both do nothing. Numbers travel beside a step, which does not
wait for them, nor they for it:

    host ─► pinned ─► device ─► collective ─► pinned ─► read, by whoever needs it

All of it is given to a stream of its own when it begins. So what arrives is there whatever a device is still computing,
and the memory is used on no other stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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


_HERE = nullcontext()


class SideStream:
    """The other stream, and how it and compute's follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, compat.streams_of(device)
        self._side: Any = compat.side_stream(device)
        self.is_in_line = False
        """Everything is compute's, in the order in which it is given. Set it between two steps."""

    def aside(self, *values: Tensor) -> AbstractContextManager[Any]:
        """Run what is inside aside; if it takes `values` from compute, after all that compute has been given."""
        if self._streams is None or self.is_in_line:
            return _HERE
        if values:
            self._side.wait_stream(self._streams.current_stream(self._device))
            for value in values:
                value.record_stream(self._side)
        return self._streams.stream(self._side)

    def join(self, *values: Tensor) -> None:
        """Let compute wait for all that has gone aside so far, of which it takes `values`."""
        if self._streams is None or self.is_in_line:
            return
        compute = self._streams.current_stream(self._device)
        compute.wait_stream(self._side)
        for value in values:
            value.record_stream(compute)

    @property
    def is_used(self) -> bool:
        """True while this is the stream in use."""
        return self._side is not None and self._streams.current_stream(self._device) == self._side

    def meet(self) -> None:
        """Let both wait for each other: memory of either may be handed on afterwards."""
        if self._streams is not None:
            compute = self._streams.current_stream(self._device)
            compute.wait_stream(self._side)
            self._side.wait_stream(compute)
