"""Measure a machine and its links for `fxcomp calibrate`, in more detail than a compiling job can.

Under a launcher all ranks measure at once, and rank 0's table is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.cost.measure import measure_collectives
from fxcomp.cost.measured import CompressorCost
from fxcomp.cost.table import CostTable
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning.measure_links import TimedCollectives
from fxcomp.planning.measure_machine import compressor_costs, costs_of_memory, device_here, with_ranks
from fxcomp.ranks import Ranks
from fxcomp.runtime.transport import Groups
from fxcomp.site import Site

LINKS_S = 8.0
"""Time for all collectives, in s."""

LARGEST_BYTES = 64 << 20
"""Bytes of the largest measured collective. Buffers must fit in memory."""


@dataclass(frozen=True, slots=True)
class Survey:
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
    """Measure the machine, and the links if there is a process group. Every rank calls it with the same arguments.

    `threads` lists CPU thread counts for compressors (default: the current count).
    """
    with Ranks.meeting(None, "survey") as ranks:
        found = _surveyed(ranks, compressors, threads, links_s, tell)
    ranks.release()
    return found


def _surveyed(
    ranks: Ranks, compressors: Sequence[Compressor], threads: Sequence[int], links_s: float, tell: Callable[[str], None]
) -> Survey:
    ranks.check_same("comparing options", {"compressors": [str(c) for c in compressors], "threads": list(threads)})
    site = Site.of(ranks, None, device_here())
    cluster, transport, device = site.cluster, site.transport, site.device
    mine = ranks.attempt("measuring the machine", lambda: _machine(compressors, threads, device, tell).to_json())
    table = CostTable.from_json(ranks.from_rank_0("the machine's costs", lambda: mine))
    if ranks.world_size == 1:
        note = "No process group: links were not measured. Start it with torchrun to measure them."
        return Survey(table, cluster, 0, (note,))
    assert isinstance(transport, Groups), "several ranks have groups"
    tell("measuring the processor time of collectives")
    table = with_ranks(table, site)
    timed = TimedCollectives(transport, device)
    missing: dict[CollectiveKind, str] = {}
    for kind in CollectiveKind:
        trouble = ranks.attempt(f"trying {kind.value}", partial(timed.trouble, kind))
        refused = [text for text in ranks.gather(f"whether there is {kind.value}", trouble) if text is not None]
        if refused:
            missing[kind] = refused[0]
    told: set[tuple[CollectiveKind, Level]] = set()

    def timed_aloud(kind: CollectiveKind, level: Level, size: int) -> float:
        if (kind, level) not in told:
            told.add((kind, level))
            group = cluster.topology_at(level)
            tell(f"measuring {kind.value} among {group.ranks} ranks ({group.text})")
        return timed(kind, level, size)

    found = measure_collectives(
        timed_aloud,
        cluster,
        links_s,
        kinds=[kind for kind in CollectiveKind if kind not in missing],
        largest=LARGEST_BYTES,
        rounds=3,
    )
    table = replace(table, collectives={**table.collectives, **found})
    notes = [f"{kind.value} was not measured, because the backend refused it: {text}" for kind, text in missing.items()]
    return Survey(CostTable.from_json(ranks.from_rank_0("the table", table.to_json)), cluster, ranks.rank, tuple(notes))


def _machine(
    compressors: Sequence[Compressor], threads: Sequence[int], device: torch.device, tell: Callable[[str], None]
) -> CostTable:
    tell("measuring memory")
    table = costs_of_memory(device)
    found: dict[str, CompressorCost] = {}
    for compressor in dict.fromkeys(compressors):
        tell(f"measuring {compressor}")
        found |= compressor_costs([compressor], device, threads)
    return replace(table, compressors=found)
