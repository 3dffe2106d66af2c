"""Asynchronous devices and their streams."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def streams_of(device: torch.device) -> Any:
    """Return the module with a device's streams and events, such as torch.cuda; None for synchronous devices."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None


def works_later(device: torch.device) -> bool:
    return streams_of(device) is not None


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy host values to a device without blocking the host."""
    return values.pin_memory().to(device, non_blocking=True) if works_later(device) else values.to(device)


def recorded(device: torch.device, *, timed: bool = False) -> Any:
    """Record an event on the device's current stream; the device need not be current."""
    streams = streams_of(device)
    event = streams.Event(enable_timing=timed)
    event.record(streams.current_stream(device))
    return event


def stream_of(device: torch.device) -> Any:
    streams = streams_of(device)
    return None if streams is None else streams.current_stream(device)


def side_stream(device: torch.device) -> Any:
    """Return the device's side stream; None on the CPU. There is only one, because torch reuses memory per stream."""
    return None if streams_of(device) is None else _side_stream(torch.empty(0, device=device).device)


@cache
def _side_stream(device: torch.device) -> Any:
    return streams_of(device).Stream(device)


def wait_for_stream(stream: Any) -> None:
    if stream is not None:
        stream_of(stream.device).wait_stream(stream)
