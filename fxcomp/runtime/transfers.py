"""Move values between the device and pinned host memory, beside compute.

Where the device is the host there is nothing to move, and both directions give back what they got.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NewBuffer = Callable[[], Tensor]


class Transfers:
    """Copies in both directions on a stream of their own, so that compute does not wait for them."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, value: Tensor, buffer: NewBuffer) -> Callable[[], Tensor]:
        """Start a copy behind what compute has been given so far; the result waits for it, on any thread.

        `buffer` makes pinned host memory of the value's size, if it is needed.
        """
        if self._stream is None:
            return lambda: value
        target = buffer()
        self._stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self._stream):
            target.copy_(value, non_blocking=True)
            value.record_stream(self._stream)
            copied = torch.cuda.Event()
            copied.record(self._stream)

        def arrived() -> Tensor:
            copied.synchronize()
            return target

        return arrived

    def to_device(self, value: Tensor, buffer: NewBuffer) -> Tensor:
        """Start a copy back; compute that is given from now on waits for it. `buffer` makes device memory."""
        if self._stream is None:
            return value
        target = buffer()
        # The buffer may still be read by the last step's updates.
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(value, non_blocking=True)
        torch.cuda.current_stream(target.device).wait_stream(self._stream)
        return target
