"""Tiny programs with a fault that a device alone shows, and what they should be. Each gives numbers that must be known.

A schedule shows a fault where the numbers are others, or where the host waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.late import DEVICE

SIZE = 64
Program = Callable[[bool], list[float]]
"""With a True it is right; it gives what must be all ones."""


def _ones() -> Tensor:
    return torch.ones(SIZE, device=DEVICE)


def missing_wait_stream(is_right: bool) -> list[float]:
    streams, value = torch.late, torch.zeros(SIZE, device=DEVICE)
    side = streams.Stream(DEVICE)
    value.add_(1)
    if is_right:
        side.wait_stream(streams.current_stream(DEVICE))
    with streams.stream(side):
        found = value.clone()
    return _read(found, side)


def missing_record_stream(is_right: bool) -> list[float]:
    streams, side, value = torch.late, torch.late.Stream(DEVICE), _ones()
    side.wait_stream(streams.current_stream(DEVICE))
    with streams.stream(side):
        found = value * 1
        if is_right:
            value.record_stream(side)
    del value  # its memory is the next one's
    other = torch.zeros(SIZE, device=DEVICE)
    result = _read(found, side)
    del other
    return result


def host_reads_before_an_event(is_right: bool) -> list[float]:
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(_ones(), non_blocking=True)
    event = torch.late.Event()
    event.record(torch.late.current_stream(DEVICE))
    if is_right:
        event.synchronize()
    return host.tolist()


def overwritten_pinned_buffer(is_right: bool) -> list[float]:
    host = torch.ones(SIZE, pin_memory=True)
    there = torch.empty(SIZE, device=DEVICE)
    there.copy_(host, non_blocking=True)
    event = torch.late.Event()
    event.record(torch.late.current_stream(DEVICE))
    if is_right:
        event.synchronize()
    host.zero_()
    return there.tolist()


def event_on_the_wrong_device(is_right: bool) -> list[float]:
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(_ones(), non_blocking=True)
    event = torch.late.Event()
    if is_right:
        event.record(torch.late.current_stream(DEVICE))
    else:
        event.record()  # on device 0, the current one
    event.synchronize()
    return host.tolist()


def _read(value: Tensor, stream: torch.Stream) -> list[float]:
    with torch.late.stream(stream):
        return value.tolist()


FAULTS: dict[str, Program] = {
    "a missing wait_stream": missing_wait_stream,
    "a missing record_stream": missing_record_stream,
    "a host read before an event": host_reads_before_an_event,
    "an overwritten pinned buffer": overwritten_pinned_buffer,
    "an event on the wrong device": event_on_the_wrong_device,
}


def pageable_copy(is_pinned: bool) -> None:
    there = torch.empty(SIZE, device=DEVICE)
    there.copy_(torch.ones(SIZE, pin_memory=is_pinned), non_blocking=True)
