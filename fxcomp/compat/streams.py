"""Tell devices that work after the host has given them work, and do what such a device alone needs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def streams_of(device: torch.device) -> Any:
    """Return the module with a device's streams and events, as torch.cuda; None where work is done as it is given."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None


def works_later(device: torch.device) -> bool:
    """Tell a device that works after the host has given it work."""
    return streams_of(device) is not None


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of the host to a device, which the host does not wait for."""
    return values.pin_memory().to(device, non_blocking=True) if works_later(device) else values.to(device)


def recorded(device: torch.device, *, timed: bool = False) -> Any:
    """Make an event after what a device's stream in use has been given, whichever device is the current one."""
    streams = streams_of(device)
    event = streams.Event(enable_timing=timed)
    event.record(streams.current_stream(device))
    return event


def stream_of(device: torch.device) -> Any:
    """The stream in use; None where there are none."""
    streams = streams_of(device)
    return None if streams is None else streams.current_stream(device)


def side_stream(device: torch.device) -> Any:
    """Return a device's one other stream than compute's: memory that was its own once is reused. None on the CPU."""
    return None if streams_of(device) is None else _side_stream(torch.empty(0, device=device).device)


@cache
def _side_stream(device: torch.device) -> Any:
    return streams_of(device).Stream(device)


def wait_for_stream(stream: Any) -> None:
    """Let the stream in use wait for another one."""
    if stream is not None:
        stream_of(stream.device).wait_stream(stream)
