"""Run lines of a step on a device's other stream, so that compute does not stand still where they wait.

    with side.aside(bucket):        after what compute has been given so far
        ...                         compressing, launching, waiting
    side.join(mean)                 compute goes on after that

On a device that is done with its work as it is given, both do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat

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
