"""Time collectives on running process groups, and their interference with compute."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level, Processors
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.measure import LARGEST_BYTES, measure_collectives
from fxcomp.cost.table import CostTable
from fxcomp.plan.kinds import IN_STEPS, CollectiveKind
from fxcomp.runtime.group import Done, Work
from fxcomp.runtime.transfers import Transfer, from_first, pattern_of
from fxcomp.runtime.transport import Groups, Transport
from fxcomp.site import NOBODY, Beside

SMALL_BYTES = 4096
"""Largest collective whose processor time counts as the fixed cost, in bytes."""

LARGEST_FROM_DEVICE = 64 << 20
"""Largest collective timed between accelerators (gathers: `MOST_RECEIVED`). With 16 MiB, a dense step of 513 MB was
predicted to take 126 ms and took 305 (H100, NCCL's sockets, measured, 2026-11).
"""

LIVE_S = 3.0
"""Time for all collectives of a running job, in s. All ranks wait meanwhile."""

SMALL_OVERLAP_BYTES, LARGEST_OVERLAP_BYTES = 1 << 18, 1 << 22
"""Sizes of collectives timed while compute runs, in bytes."""

OVERLAP_S, OVERLAP_REPEATS, MOST_IN_BURST = 0.08, 5, 8
"""Limit in s on the time of the larger size without compute, number of timings per size, maximum burst length."""

SLOWEST_OVERLAP = 0.05
"""Lower bound on a collective's speed during compute, relative to idle; a fair scheduler gives more (assumed)."""


def live_links(
    costs: CostTable,
    processors: Processors,
    transport: Groups,
    cluster: Cluster,
    device: torch.device,
    beside: Beside = NOBODY,
) -> dict[str, Any]:
    """Time collectives on the running process groups, in at most about 4 s, and return fields of a cost table.

    If the network's software runs on compute's processors, also measure its processor time, and its slowdown during
    compute. Every rank takes part.
    """
    timed = TimedCollectives(transport, device, beside)
    largest = LARGEST_FROM_DEVICE if compat.is_accelerator(device) else LARGEST_BYTES
    found = measure_collectives(timed, cluster, LIVE_S, library=costs.library, largest=largest)
    links = {"collectives": found, "launch_us": timed.launch_us(costs.launch_us)}
    if math.isinf(processors.count):
        return links
    taken = timed.processor_times()
    if not processors.has_spare:
        slowdown = _OverlapSlowdown(timed, device)
        taken = {kind: replace(each, **slowdown.of(kind)) for kind, each in taken.items()}
    return {**links, "transport": taken}


def meet(transport: Transport, device: torch.device) -> None:
    transport.all_reduce(torch.zeros(1, device=device), "world", "main").wait()
    compat.synchronize(device)


class TimedCollectives:
    """Runs collectives on a job's groups from a common start. Times are the slowest rank's.

    Collectives run as in a step, with the first rank as root. A point-to-point message, which no step sends, goes over
    the process group from the first rank to the second. Sibling groups (`beside`) run the same collective at the same
    time.
    """

    def __init__(self, transport: Groups, device: torch.device, beside: Beside = NOBODY) -> None:
        self._transport, self._device, self._beside = transport, device, beside
        self._buffers: dict[int, Tensor] = {}
        self._launches_us: list[float] = []
        self._processor_us: dict[CollectiveKind, list[tuple[int, float]]] = {}
        """Pairs (bytes, µs of processor time after the launch) of collectives over all ranks."""

    def __call__(self, kind: CollectiveKind, level: Level, size: int) -> float:
        """Time one collective over `size` bytes, in seconds. The result is the same on every rank."""
        launch = self.prepared(kind, level, size)
        self.meet()
        start, cpu = time.perf_counter(), time.process_time()
        work = launch()
        launched = time.perf_counter() - start
        work.wait()
        compat.synchronize(self._device)
        passed, worked = time.perf_counter() - start, time.process_time() - cpu
        if level is Level.WORLD:
            self._processor_us.setdefault(kind, []).append((size, 1e6 * max(0.0, worked - launched)))
            self._launches_us.append(1e6 * launched)
        return self.slowest(passed)

    def trouble(self, kind: CollectiveKind) -> str | None:
        """Return the backend's error if it lacks a collective, else None. Every rank calls it.

        Errors of a collective that steps need are raised.
        """
        try:
            self.prepared(kind, Level.WORLD, 4)().wait()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if kind in IN_STEPS:
                raise
            return str(error).partition("\n")[0]
        return None

    def launch_us(self, assumed: float) -> float:
        return statistics.median(self._launches_us) if self._launches_us else assumed

    def processor_times(self) -> dict[CollectiveKind, TransportCost]:
        """Return the processor time of each collective: a fixed part, from small sizes, and a part per further MB."""
        times: dict[CollectiveKind, TransportCost] = {}
        ranks = len(self._transport.group("world", "main")[1])
        for kind, samples in self._processor_us.items():
            small = [us for size, us in samples if size <= SMALL_BYTES]
            largest = max(size for size, _ in samples)
            fixed = statistics.median(small) if small else 0.0
            most = statistics.median([us for size, us in samples if size == largest])
            sent_mb = wire_bytes(kind, ranks, largest) / 1e6
            times[kind] = TransportCost(fixed, max(0.0, most - fixed) / sent_mb)
        return times

    def slowest(self, seconds: float) -> float:
        passed = torch.tensor([seconds], dtype=torch.float32, device=self._device)
        self._transport.all_reduce(passed, "world", "main", how="max").wait()
        self._beside.largest(passed)
        return float(passed.item())

    def meet(self) -> None:
        meet(self._transport, self._device)
        self._beside.largest(torch.zeros(1, device=self._device))
        compat.synchronize(self._device)

    def prepared(self, kind: CollectiveKind, level: Level, size: int, slot: int = 0) -> Callable[[], Work]:
        """Allocate a collective's buffers and return its launch function. Concurrent ones need distinct `slot`s."""
        transport, place, elements = self._transport, (level.value, "main"), max(1, size // 4)
        group, members = transport.group(*place)
        ranks, root, me = len(members), members[0], dist.get_rank()
        whole = -(-elements // ranks) * ranks if kind.deals else elements  # equal parts
        value, rooted = self._buffer(3 * slot, whole), from_first(elements, ranks)

        if kind is CollectiveKind.POINT_TO_POINT:
            if me == root:
                return lambda: _started(dist.isend(value, members[1], group=group))
            return (lambda: _started(dist.irecv(value, root, group=group))) if me == members[1] else Done
        if not kind.has_parts:
            return lambda: transport.all_reduce(value, *place)
        pattern, cut = pattern_of(kind.value), rooted if kind.is_rooted else ranks
        going, coming = pattern.elements(pattern.parts(cut, whole), members.index(me))
        memory = functools.partial(self._buffer, 3 * slot + 2)
        transfer = Transfer(pattern, value[:going], self._buffer(3 * slot + 1, coming), cut, *place, memory)
        return functools.partial(transport.start, transfer)

    def _buffer(self, number: int, elements: int) -> Tensor:
        """Return a cached buffer: allocating 64 MiB takes longer than sending it through memory."""
        if number not in self._buffers or self._buffers[number].numel() < elements:
            self._buffers[number] = torch.zeros(elements, device=self._device)
        return self._buffers[number][:elements]


def _started(work: Any) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


class _OverlapSlowdown:
    """Measures the slowdown of collectives during compute."""

    def __init__(self, timed: TimedCollectives, device: torch.device) -> None:
        self._timed, self._device = timed, device
        self._square = torch.ones(192, 192, device=device)
        self._product = torch.zeros_like(self._square)

    def of(self, kind: CollectiveKind) -> dict[str, float]:
        sizes = self._sizes(kind)
        if len(sizes) == 1:  # a slow link, where a one-time delay is negligible
            idle_us, overlapping_us = self._burst_us(kind, sizes[0])
            return {"speed": idle_us / overlapping_us}
        small, large = (self._burst_us(kind, size) for size in sizes)
        slope = (large[1] - small[1]) / (large[0] - small[0]) if large[0] > small[0] else 1.0
        slope = min(1.0 / SLOWEST_OVERLAP, max(1.0, slope))
        return {"speed": 1.0 / slope, "more_us": max(0.0, (small[1] + large[1] - slope * (small[0] + large[0])) / 2)}

    def _sizes(self, kind: CollectiveKind) -> tuple[int, ...]:
        """Return a small size, and the largest below `OVERLAP_S` if different. The same on all ranks."""
        size = SMALL_OVERLAP_BYTES
        while size < LARGEST_OVERLAP_BYTES and 4 * self._timed(kind, Level.WORLD, size) < OVERLAP_S:
            size *= 4
        return tuple(dict.fromkeys((SMALL_OVERLAP_BYTES, size)))

    def _burst_us(self, kind: CollectiveKind, size: int) -> tuple[float, float]:
        """Return the time per collective in a burst: idle, and overlapping compute.

        One burst is waited for at once, another after compute of about the same length. Collectives that are unfinished
        after the compute continue at full speed, so the two times determine the speed during compute. A burst averages
        out the delay of the first launch.
        """
        count = min(MOST_IN_BURST, max(1, math.ceil(OVERLAP_S / 2 / self._timed(kind, Level.WORLD, size))))
        idle_s = statistics.median([self._burst_s(kind, size, count, 0.0) for _ in range(OVERLAP_REPEATS)])
        worked_s = 0.9 * idle_s
        total_s = statistics.median([self._burst_s(kind, size, count, worked_s) for _ in range(OVERLAP_REPEATS)])
        speed = min(1.0, max(SLOWEST_OVERLAP, 1.0 - (total_s - idle_s) / worked_s))
        return 1e6 * idle_s / count, 1e6 * idle_s / count / speed

    def _burst_s(self, kind: CollectiveKind, size: int, count: int, worked_s: float) -> float:
        """Time a burst on the slowest rank, waited for after `worked_s` of compute."""
        launches = [self._timed.prepared(kind, Level.WORLD, size, slot) for slot in range(count)]
        self._timed.meet()
        start = time.perf_counter()
        works = [launch() for launch in launches]
        while time.perf_counter() - start < worked_s:
            torch.mm(self._square, self._square, out=self._product)
        compat.synchronize(self._device)
        for work in works:
            work.wait()
        return self._timed.slowest(time.perf_counter() - start)
