"""Measure a machine and its links on purpose: what `fxcomp calibrate` does, in more detail than a compiling job can.

Under a launcher every rank takes part, all measure at once, and rank 0's table is the answer. Alone, compressors and
memory are measured, and links are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.cost.measure import measure_collectives, measure_compressors
from fxcomp.cost.measured import CompressorCost, compressor_key
from fxcomp.cost.table import CostTable
from fxcomp.plan.collective_kind import IN_STEPS, CollectiveKind
from fxcomp.plan.strategy import Device
from fxcomp.planning.measure_step import costs_of_memory, with_live_links
from fxcomp.ranks import Ranks
from fxcomp.runtime.transport import Groups

LINKS_S = 8.0
"""For all collectives together. With the rest a survey takes less than half a minute."""

LARGEST_BYTES = 64 << 20
"""The largest bucket that is worth its memory."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A table, the cluster that it was measured on, and what there is to say about it."""

    table: CostTable
    cluster: Cluster
    rank: int
    notes: tuple[str, ...]


def survey(
    compressors: Sequence[Compressor],
    *,
    threads: Sequence[int] = (),
    links_s: float = LINKS_S,
    tell: Callable[[str], None] = lambda _: None,
) -> Survey:
    """Measure the machine, and the links if there is a process group; every rank calls it with the same arguments.

    `threads` are the thread budgets to time compressors with on the CPU (default: the one in force).
    """
    with Ranks.meeting(None, "survey") as ranks:
        found = _surveyed(ranks, compressors, threads, links_s, tell)
    ranks.release()
    return found


def _surveyed(
    ranks: Ranks,
    compressors: Sequence[Compressor],
    threads: Sequence[int],
    links_s: float,
    tell: Callable[[str], None],
) -> Survey:
    ranks.check_same("comparing options", {"compressors": [str(c) for c in compressors], "threads": list(threads)})
    device = device_here()
    cluster = ranks.cluster_of(None)
    mine = ranks.attempt("measuring the machine", lambda: _machine(compressors, threads, device, tell).to_json())
    table = CostTable.from_json(ranks.from_rank_0("the machine's costs", lambda: mine))
    if ranks.world_size == 1:
        note = "No process group: links were not measured. Start it with torchrun to measure them."
        return Survey(table, cluster, 0, (note,))
    transport = ranks.transport(cluster)
    assert isinstance(transport, Groups), "several ranks have groups"
    tell("measuring what collectives take of the processors")
    if device.type == "cpu":
        table = replace(table, processors=ranks.processors())
    table = with_live_links(table, transport, cluster, device)
    timed = TimedCollectives(transport, device)
    missing: dict[CollectiveKind, str] = {}
    for kind in CollectiveKind:
        trouble = ranks.attempt(f"trying {kind.value}", partial(timed.trouble, kind))
        told = [text for text in ranks.gather(f"whether there is {kind.value}", trouble) if text is not None]
        if told:
            missing[kind] = told[0]
    found = measure_collectives(
        timed,
        cluster,
        links_s,
        kinds=[kind for kind in CollectiveKind if kind not in missing],
        largest=LARGEST_BYTES,
        rounds=3,
        tell=tell,
    )
    table = replace(table, collectives={**table.collectives, **found})
    notes = [f"{kind.value} was not measured, because the backend refused it: {text}" for kind, text in missing.items()]
    return Survey(CostTable.from_json(ranks.from_rank_0("the table", table.to_json)), cluster, ranks.rank, tuple(notes))


# The machine


def _machine(
    compressors: Sequence[Compressor], threads: Sequence[int], device: torch.device, tell: Callable[[str], None]
) -> CostTable:
    tell("measuring memory")
    table = costs_of_memory(device)
    found: dict[str, CompressorCost] = {}
    for compressor in dict.fromkeys(compressors):
        tell(f"measuring {compressor}")
        if device.type != "cpu":
            found |= measure_compressors([compressor], on=device)
        for budget in dict.fromkeys(threads or [torch.get_num_threads()]):
            with _threads(budget):
                here = measure_compressors([compressor], device=Device.CPU)
            found |= here
            if device.type == "cpu":  # the main thread and the pool are one device
                found |= {compressor_key(str(compressor), Device.GPU.value, budget): cost for cost in here.values()}
    return replace(table, compressors=found)


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_here() -> torch.device:
    """What a survey measures: this rank's GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# The links


class TimedCollectives:
    """Runs collectives on the groups of a job, each from a common start; its seconds are the slowest rank's.

    Those that a step contains are run as a step runs them; the others straight on the process group. A broadcast, a
    reduce and a gather have the group's first rank as their root, and a message goes from the first to the second.
    """

    def __init__(self, transport: Groups, device: torch.device):
        self._transport, self._device = transport, device
        self._buffers: dict[int, torch.Tensor] = {}

    def __call__(self, kind: CollectiveKind, level: Level, size: int) -> float:
        run = self._prepared(kind, level, max(1, size // 4))
        self._transport.all_reduce(torch.zeros(1, device=self._device), "world", "main").wait()
        compat.synchronize(self._device)
        begun = time.perf_counter()
        run()
        compat.synchronize(self._device)
        passed = torch.tensor([time.perf_counter() - begun], dtype=torch.float32, device=self._device)
        self._transport.all_reduce(passed, "world", "main", how="max").wait()
        return float(passed.item())

    def trouble(self, kind: CollectiveKind) -> str | None:
        """Why the backend does not run such a collective; None if it does. Every rank tries.

        Some backends lack some. One that no step can do without is never missing: its error is the network's, and
        is raised.
        """
        try:
            self._prepared(kind, Level.WORLD, 1)()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if kind in IN_STEPS:
                raise
            return str(error).partition("\n")[0]
        return None

    def _prepared(self, kind: CollectiveKind, level: Level, elements: int) -> Callable[[], None]:
        """A collective with its buffers made."""
        transport, place = self._transport, (level.value, "main")
        group, members = transport.group(*place)
        ranks, root, me = len(members), members[0], dist.get_rank()
        whole = -(-elements // ranks) * ranks  # what is dealt out has as much for everyone
        value = self._buffer(0, whole if kind in _DEALT else elements)

        if kind is CollectiveKind.ALL_REDUCE:
            return lambda: _wait(transport.all_reduce(value, *place))
        if kind is CollectiveKind.BROADCAST:
            return lambda: _wait(transport.broadcast(value, root, *place))
        if kind is CollectiveKind.ALL_GATHER:
            gathered = self._buffer(1, ranks * elements)
            return lambda: _wait(transport.all_gather(value, gathered, *place))
        if kind is CollectiveKind.REDUCE_SCATTER:
            part = self._buffer(1, whole // ranks)
            return lambda: _wait(transport.reduce_scatter(value, part, *place))
        if kind is CollectiveKind.ALL_TO_ALL:
            dealt = self._buffer(1, whole)
            return lambda: _wait(dist.all_to_all_single(dealt, value, group=group, async_op=True))  # pyright: ignore[reportUnknownMemberType]  # untyped
        if kind is CollectiveKind.REDUCE:
            return lambda: _wait(dist.reduce(value, root, group=group, async_op=True))
        if kind is CollectiveKind.GATHER:
            parts = list(self._buffer(1, ranks * elements).chunk(ranks)) if me == root else None
            return lambda: _wait(dist.gather(value, parts, root, group=group, async_op=True))
        if me == root:
            return lambda: _wait(dist.isend(value, members[1], group=group))
        if me == members[1]:
            return lambda: _wait(dist.irecv(value, root, group=group))
        return lambda: None

    def _buffer(self, number: int, elements: int) -> torch.Tensor:
        """One of two buffers, kept: making 64 MiB anew takes longer than sending it through memory."""
        if number not in self._buffers or self._buffers[number].numel() < elements:
            self._buffers[number] = torch.zeros(elements, device=self._device)
        return self._buffers[number][:elements]


_DEALT = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)


def _wait(work: Any) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait()
