"""Compare collectives that no compiling job times with their prices: `python benchmarks/long_transfers.py --json FILE`.

Shaped hosts of one rank each measure their links as a compiling job does. Then the ranks time large all_reduces,
all_gathers, all_to_alls and reduce_scatters, which that measurement did not reach or left out, beside what the table
says of them. `before` is what was said before long transfers were timed: lines through the same samples up to 4 MiB,
and all_to_all and reduce_scatter as half an all_reduce.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxcomp.cluster.cluster import Level
from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts
from fxcomp.cost.collectives import Library, steps
from fxcomp.cost.fit import fit
from fxcomp.cost.measure import measure_collectives
from fxcomp.cost.piecewise import Fit, Sample
from fxcomp.cost.table import CostTable
from fxcomp.plan.collective_kind import CollectiveKind

K = CollectiveKind
SIZES = {K.ALL_REDUCE: (8, 24), K.ALL_GATHER: (2, 6), K.ALL_TO_ALL: (4, 16), K.REDUCE_SCATTER: (4, 16)}
"""In MB, as each collective counts its size."""

REPEATS = 2
SHORT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One collective of one size among so many hosts, in ms."""

    hosts: int
    inter: str
    kind: str
    megabytes: float
    measured_ms: float
    priced_ms: float
    before_ms: float

    def __str__(self) -> str:
        told = " | ".join(f"{ms / self.measured_ms - 1:+.1%}" for ms in (self.priced_ms, self.before_ms))
        return f"| {self.hosts} | {self.inter} | {self.kind} | {self.megabytes:g} | {self.measured_ms:.0f} | {told} |"


def rank_main(inter: str) -> None:
    from fxcomp.planning.measure_links import TimedCollectives
    from fxcomp.ranks import Ranks
    from fxcomp.runtime.transport import Groups
    from fxcomp.site import Site

    join()
    device = torch.device("cpu")
    with Ranks.meeting(None, "long transfers") as ranks:
        site = Site.of(ranks, None, device)
    assert isinstance(site.transport, Groups), "several ranks have groups"
    timed = TimedCollectives(site.transport, device)
    samples: dict[CollectiveKind, list[Sample]] = {}

    def recorded(kind: CollectiveKind, level: Level, size: int) -> float:
        seconds = timed(kind, level, size)
        samples.setdefault(kind, []).append((size, 1e6 * seconds))
        return seconds

    started = time.perf_counter()
    table = CostTable(collectives=measure_collectives(recorded, site.cluster, library=Library.GLOO))
    took_s = time.perf_counter() - started
    short = {kind: fit([one for one in found[1:] if one[0] <= SHORT_BYTES]) for kind, found in samples.items()}
    for kind, sizes in SIZES.items():
        for megabytes in sizes:
            size = int(megabytes * 1e6)
            seconds = statistics.median(timed(kind, Level.WORLD, size) for _ in range(REPEATS))
            us = table.collective_us(kind, Level.WORLD, size, site.cluster), before_us(kind, size, short)
            row = Row(
                site.cluster.world_size, inter, kind.value, megabytes, 1e3 * seconds, *(each / 1e3 for each in us)
            )
            if dist.get_rank() == 0:
                print(json.dumps(asdict(row)), flush=True)
    if dist.get_rank() == 0:
        print(f"measured links in {took_s:.1f} s", flush=True)
    ranks.release()
    dist.destroy_process_group()


def before_us(kind: CollectiveKind, size: float, short: Mapping[CollectiveKind, Fit]) -> float:
    """Price a collective as tables did: one that was not measured by its wire bytes and steps, as an all_reduce."""
    if kind in short:
        return short[kind].at(size)
    ranks, known = dist.get_world_size(), short[K.ALL_REDUCE]
    own = {K.ALL_TO_ALL: 1, K.REDUCE_SCATTER: ranks - 1}[kind]
    whole = steps(K.ALL_REDUCE, ranks)
    return max(0.0, known.at(size / 2) - (whole - own) / whole * known.pieces[0].at_zero_us)


def report(rows: list[Mapping[str, Any]]) -> str:
    lines = [
        "| hosts | link | collective | MB | measured ms | priced | before |",
        "|--:|---|---|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *(str(Row(**row)) for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--inter", default="100mbit")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_main(options.inter)
        return
    rows: list[Mapping[str, object]] = []
    for count in map(int, options.hosts.split(",")):
        command = [str(Path(__file__).resolve()), "--as-rank", "--inter", options.inter]
        with ShapedHosts(count, options.inter) as hosts:
            printed = run_ranks(command, hosts=hosts, timeout_s=900)[0].splitlines()
        rows += [json.loads(line) for line in printed if line.startswith("{")]
        print(f"{count} hosts:", *[line for line in printed if not line.startswith("{")], file=sys.stderr)
    print(report(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
