"""Start one line's collective, and wait for it; its errors say what it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxcomp.errors import LostTouch
from fxcomp.runtime.group import Work
from fxcomp.runtime.moves import Cut, Move, pattern_of
from fxcomp.runtime.transport import Transport, start_move

Take = Callable[[str, int, torch.dtype, torch.device], Tensor]
"""Gives the buffer of a name, with so many elements."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective as its line asks for it."""

    name: str
    """The line's name, which holds the bucket's number: `all_gather_3_int4`."""
    kind: str
    cut: Cut
    """The part of each rank; 1 for an all_reduce, and for a broadcast that overwrites its input."""
    level: str
    how: str
    lane: str
    rides: Callable[[Launch, Tensor, Transport], Flight] | None = None
    """Starts it where something rides along (`runtime/rider.py`)."""

    def start(self, value: Tensor, transport: Transport, take: Take) -> Flight:
        """Start it and return at once."""
        try:
            if self.rides is not None:
                return self.rides(self, value, transport)
            output, work = self._started(value, transport, take)
        except LostTouch as lost:
            raise self.told(lost) from None
        return Flight(self, output, work)

    def _started(self, value: Tensor, transport: Transport, take: Take) -> tuple[Tensor, Work]:
        if self.kind == "all_reduce":
            return value, transport.all_reduce(value, self.level, self.lane, self.how)
        if self.kind == "broadcast" and self.cut == 1:
            return value, transport.broadcast(value, 0, self.level, self.lane)
        pattern = pattern_of(self.kind)
        parts = pattern.parts(self.cut, value.numel())
        _, elements = pattern.elements(parts, transport.place(self.level))
        out = take(self.name, elements, value.dtype, value.device)

        def memory(elements: int) -> Tensor:
            return take(f"{self.name}_parts", elements, value.dtype, value.device)

        move = Move(value, out, self.cut, self.level, self.lane, memory)
        return out, start_move(transport, pattern, move)

    def told(self, lost: LostTouch) -> LostTouch:
        """Say what did not end: the collective, its bucket and its line."""
        number = re.search(r"_(\d+)", self.name.removeprefix(self.kind))
        bucket = f" of bucket {number[1]}" if number else ""
        return LostTouch(f"{self.kind}@{self.level}{bucket} did not end (line {self.name}): {lost}")


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective under way; `output` is valid once `work` is done."""

    launch: Launch
    output: Tensor
    work: Work

    def finish(self) -> Tensor:
        """Wait for the result."""
        try:
            self.work.wait()
        except LostTouch as lost:
            raise self.launch.told(lost) from None
        return self.output
