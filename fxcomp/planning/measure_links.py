"""Time collectives on running process groups, and measure the network software's processor time."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
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
"""Bytes of the largest collective whose processor time counts as the fixed cost."""

LARGEST_FROM_DEVICE = 64 << 20
"""Bytes of the largest collective timed between accelerators. `MOST_RECEIVED` limits gathers.

With 16 MiB, a dense step of 513 MB was predicted to take 126 ms and took 305 ms (H100, NCCL's sockets, 2026-11).
"""

LIVE_S = 3.0
"""Time to measure all collectives of a running job, in s. All ranks wait meanwhile."""


def live_links(
    costs: CostTable,
    processors: Processors,
    transport: Groups,
    cluster: Cluster,
    device: torch.device,
    beside: Beside = NOBODY,
) -> dict[str, Any]:
    """Time collectives on the running process groups for about `LIVE_S` seconds. Return fields of a cost table.

    If the network's software runs on compute's processors, also measure its processor time. Every rank takes part.
    """
    timed = TimedCollectives(transport, device, beside)
    largest = LARGEST_FROM_DEVICE if compat.is_accelerator(device) else LARGEST_BYTES
    found = measure_collectives(timed, cluster, LIVE_S, library=costs.library, largest=largest)
    links = {"collectives": found, "launch_us": timed.launch_us(costs.launch_us)}
    if math.isinf(processors.count):
        return links
    return {**links, "transport": timed.processor_times()}


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
        """Return the backend's error if the backend lacks a collective, else None. Every rank calls it.

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
        """Return the processor time of each collective, in µs: a fixed part and a part per MB sent."""
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
        """Allocate a collective's buffers and return its launch function. Concurrent calls need distinct `slot`s."""
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
        """Return a cached buffer, because allocating 64 MiB takes longer than sending 64 MiB within a host."""
        if number not in self._buffers or self._buffers[number].numel() < elements:
            self._buffers[number] = torch.zeros(elements, dtype=torch.float32, device=self._device)
        return self._buffers[number][:elements]


def _started(work: Any) -> Work:
    assert work is not None, "this rank is not in the group"
    return work
