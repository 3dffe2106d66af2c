"""The work of devices that come after the host by random delays: streams, events and memory.

    host    op a, op b, record e     ...     wait for e
    stream            a ............ b e

The host's thread runs the streams' work: some of it now and then, chosen by a seed, and what it waits for. So the same
seed gives the same schedule. Where the host stands still elsewhere, for another rank or a thread, a thread goes on with
the work, as a device would.

Memory is handed out again as soon as it is freed, to the stream that it belongs to, as torch's caching allocators do:
whatever another stream still does with it, unless `record_stream` has told.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fxcomp

DEVICES = 2
ARENA_BYTES = 256 << 20
ALIGNMENT = 64
IDLE_S = 0.01
"""A host that has given no work for so long is standing still."""

STUCK_S = 60.0

PRODUCT = str(Path(fxcomp.__file__).parent)
ELSEWHERE = "the user's code"
"""The place of a wait that is none of the product's."""


@dataclass(eq=False)
class Job:
    """A piece of a stream's work. `may_begin` and `is_over` ask for what is elsewhere: an event, a collective."""

    run: Callable[[], Any] = lambda: None
    may_begin: Callable[[], bool] | None = None
    is_over: Callable[[], bool] | None = None
    begun: bool = False
    done: bool = False
    at_s: float = 0.0


@dataclass(eq=False)
class Lane:
    """One stream: its work in order."""

    device: int
    number: int
    jobs: deque[Job] = field(default_factory=deque)
    free: dict[int, list[int]] = field(default_factory=dict)
    """Blocks that it may use again, by their size: the last one freed first."""
    in_use_elsewhere: list[tuple[Block, list[Job]]] = field(default_factory=list)
    """Freed blocks that wait for other streams, of which `record_stream` has told."""


@dataclass(eq=False)
class Block:
    """Memory of a device, at a place of its arena."""

    place: int
    size: int
    lane: Lane
    used_on: set[tuple[int, int]] = field(default_factory=set)


class Machine:
    """Two devices. One lock: whoever holds it runs the streams' work."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.arenas = [torch.from_numpy(np.empty(ARENA_BYTES, np.uint8)) for _ in range(DEVICES)]
        self._ends = [0] * DEVICES
        self.blocks: dict[int, Block] = {}
        """By their address."""
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.events: dict[int, Job] = {}
        self.waits: Counter[str] = Counter()
        """The host's waits for a device, by the line that waited."""
        self.failure: BaseException | None = None
        self._given = 0
        self._is_advancing = False
        self._draws = random.Random(0)
        self.eagerness = 0.0
        """The part of the moments when the host gives work in which some is done."""
        self.held_bytes = [0] * DEVICES
        """Memory in use on each device."""
        self.most_bytes = [0] * DEVICES
        """The most that was in use so far."""
        self._weights: dict[Lane, float] = {}
        """The eagerness of each stream in this schedule, in the order in which they were first used."""
        self.ran: list[int] = []
        """Whose turn it was in this schedule: the streams' numbers in that order."""
        self.goes_on = True
        """Work is done while the host stands still elsewhere."""

    def start(self) -> None:
        """Let devices go on while the host stands still elsewhere."""
        threading.Thread(target=self._go_on, name="late-device", daemon=True).start()

    def begin(self, seed: int) -> None:
        """Begin another schedule; what was given before is done first."""
        with self.lock:
            self.drain()
            self.waits.clear()
            self._draws = random.Random(seed)
            self.eagerness = self._draws.choice((0.0, 0.0, 0.02, 0.2, 0.8))
            self._weights.clear()
            self.ran.clear()

    def lane(self, device: int, number: int) -> Lane:
        key = device, number
        if key not in self.lanes:
            self.lanes[key] = Lane(device, number)
        return self.lanes[key]

    # Work

    def give(self, device: int, stream: int, job: Job) -> Job:
        """Hand work to a stream."""
        with self.lock:
            lane = self.lane(device, stream)
            if lane not in self._weights:
                self._weights[lane] = self._draws.choice((1.0, 1.0, 0.1, 0.01))
            lane.jobs.append(job)
            self._given += 1
            if self.eagerness and self._draws.random() < self.eagerness:
                for _ in range(self._draws.randrange(1, 5)):
                    self._advance()
        return job

    def record(self, event: int, stream: int, device: int) -> None:
        self.events[event] = self.give(device, stream, Job())

    def block(self, event: int, stream: int, device: int) -> None:
        mark = self.events.get(event)
        if mark is not None:
            self.give(device, stream, Job(may_begin=lambda: mark.done))

    def wait(self, is_over: Callable[[], bool], what: str) -> None:
        """Let the host wait, which is counted."""
        self.waits[f"{threading.current_thread().name}: {what} at {_place()}"] += 1
        self.run_until(is_over)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Run work until something is over."""
        until = time.monotonic() + STUCK_S
        while not is_over():
            with self.lock:
                advanced = self._advance()
            if not advanced:
                time.sleep(2e-5)
                assert time.monotonic() < until, f"the device is stuck: {self._open()}"
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def wait_for_lane(self, lane: Lane, what: str) -> None:
        last = self.give(lane.device, lane.number, Job())
        self.wait(lambda: last.done, what)

    def wait_for_device(self, device: int) -> None:
        last = [self.give(lane.device, lane.number, Job()) for lane in self._of(device)]
        self.wait(lambda: all(job.done for job in last), "synchronize")

    def drain(self) -> None:
        """Do all that was given, uncounted."""
        self.run_until(lambda: not any(lane.jobs for lane in list(self.lanes.values())))

    def run_what_can(self) -> None:
        """Do all that waits for nothing that is still to come, uncounted."""
        with self.lock:
            while self._advance():
                pass

    def _of(self, device: int) -> list[Lane]:
        return [lane for lane in list(self.lanes.values()) if lane.device == device]

    def _advance(self) -> bool:
        """Run the next piece of work of some stream; whether there was one that could."""
        if self._is_advancing:  # the work itself has freed something
            return False
        self._is_advancing = True
        try:
            lanes = list(self._weights)
            ready = [place for place, lane in enumerate(lanes) if lane.jobs and self._can(lane.jobs[0])]
            if ready:
                place = self._draws.choices(ready, [self._weights[lanes[place]] for place in ready])[0]
                self.ran.append(place)
                self._run(lanes[place])
            return bool(ready)
        finally:
            self._is_advancing = False

    def _run(self, lane: Lane) -> None:
        job = lane.jobs[0]
        if not job.begun:
            job.begun = True
            try:
                with torch.no_grad():
                    job.run()
            except BaseException as error:
                self.failure = self.failure or error
                job.is_over = None
        if job.is_over is None or job.is_over():
            job.done, job.at_s = True, time.perf_counter()
            job.run = lambda: None  # what it holds is free
            lane.jobs.popleft()

    @staticmethod
    def _can(job: Job) -> bool:
        if job.begun:
            return job.is_over is None or job.is_over()
        return job.may_begin is None or job.may_begin()

    def _go_on(self) -> None:
        seen = -1
        while True:
            time.sleep(IDLE_S)
            if seen == self._given and self.goes_on:
                with self.lock:
                    if seen == self._given:
                        self._advance()
            seen = self._given

    def _open(self) -> dict[tuple[int, int], int]:
        return {key: len(lane.jobs) for key, lane in self.lanes.items() if lane.jobs}

    # Memory

    def allocate(self, size: int, device: int, stream: int) -> int:
        """Take memory for a stream: a block that it has freed if there is one."""
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        with self.lock:
            lane = self.lane(device, stream)
            for waiting in list(lane.in_use_elsewhere):
                if all(job.done for job in waiting[1]):
                    lane.in_use_elsewhere.remove(waiting)
                    lane.free.setdefault(waiting[0].size, []).append(waiting[0].place)
            free = lane.free.get(size)
            if free:
                place = free.pop()
            else:
                place, self._ends[device] = self._ends[device], self._ends[device] + size
                assert self._ends[device] <= ARENA_BYTES, "the device is out of memory"
                self.arenas[device][place : place + size] = 0xFF  # not a number
            address = self.arenas[device].data_ptr() + place
            self.blocks[address] = Block(place, size, lane)
            self.held_bytes[device] += size
            self.most_bytes[device] = max(self.most_bytes[device], self.held_bytes[device])
            return address

    def free(self, address: int) -> None:
        with self.lock:
            block = self.blocks.pop(address)
            lane = block.lane
            self.held_bytes[lane.device] -= block.size
            if block.used_on:
                marks = [self.give(*stream, Job()) for stream in block.used_on]
                lane.in_use_elsewhere.append((block, marks))
            else:
                lane.free.setdefault(block.size, []).append(block.place)

    def used_on(self, address: int, stream: int, device: int) -> None:
        """Hear that another stream uses a block: it is not handed out before that stream has come so far."""
        block = self.blocks[address]
        if (block.lane.device, block.lane.number) != (device, stream):
            block.used_on.add((device, stream))


def _place() -> str:
    """Name the innermost function of the product that is running."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(PRODUCT):
            return f"{frame.filename.rpartition('/')[2]}:{frame.name}"
    return ELSEWHERE


MACHINE = Machine()
"""The devices of this process."""
