"""Run lines of a step (calls of the runtime), or an exchange of a few numbers, on a side stream.

Lines there do not block compute:

    with side.aside(bucket):        waits for the compute queued so far
        ...                         compress, launch, wait
    side.join(mean)                 compute continues after the side stream

On a synchronous device, `aside` and `join` do nothing. An exchange of numbers (`Aside`) overlaps with the step:

    host ─► pinned ─► device ─► collective ─► pinned ─► read

The exchange has its own stream, so compute does not delay it and no other stream uses its memory.
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
    """An exchange in flight."""

    _values: Tensor
    """Result on the host, valid after the exchange."""
    _work: Work | None
    """The collective; None on an asynchronous device, whose stream waits for the collective."""
    _arrived: Any
    """Event after the copy from the device; None on a synchronous device."""

    def end(self) -> None:
        """Wait for the collective, so that it ends within the step."""
        if self._work is not None:
            self._work.wait()

    def read(self) -> list[float]:
        self.end()
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # untyped


class Aside:
    def __init__(self, transport: Transport, ranks: int, device: torch.device) -> None:
        self._transport, self._ranks, self._device = transport, ranks, device
        self._streams = compat.streams_of(device)
        self._stream = None if self._streams is None else self._streams.Stream(device)

    def any(self, flags: Sequence[bool]) -> Coming:
        """Start an elementwise OR of flags over all ranks. Every rank calls it, with the same number of flags."""

        def start(mine: Tensor) -> tuple[Tensor, Work]:
            return mine, self._transport.all_reduce(mine, "world", "main", "max")

        return self._begun(torch.tensor(flags, dtype=torch.uint8), start)

    def gather(self, number: float) -> Coming:
        """Start gathering one number per rank, in rank order. Every rank calls it."""

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
    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, compat.streams_of(device)
        self._side: Any = compat.side_stream(device)
        self.is_in_line = False
        """True to run everything on the compute stream. Set it between steps."""

    def aside(self, *values: Tensor) -> AbstractContextManager[Any]:
        """Run a `with` block on the side stream. A block that reads `values` from compute waits for queued compute."""
        if self._streams is None or self.is_in_line:
            return _HERE
        if values:
            self._side.wait_stream(self._streams.current_stream(self._device))
            for value in values:
                value.record_stream(self._side)
        return self._streams.stream(self._side)

    def join(self, *values: Tensor) -> None:
        if self._streams is None or self.is_in_line:
            return
        compute = self._streams.current_stream(self._device)
        compute.wait_stream(self._side)
        for value in values:
            value.record_stream(compute)

    @property
    def is_used(self) -> bool:
        return self._side is not None and self._streams.current_stream(self._device) == self._side

    def meet(self) -> None:
        """Make compute and side stream wait for each other, so that memory of either may be reused."""
        if self._streams is not None:
            compute = self._streams.current_stream(self._device)
            compute.wait_stream(self._side)
            self._side.wait_stream(compute)
