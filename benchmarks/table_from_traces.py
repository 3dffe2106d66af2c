"""Fill a cost table from torch.profiler's Chrome traces, of a job that already ran.

    python benchmarks/table_from_traces.py rank0.json rank1.json -o costs.json

A trace cannot tell how long a rank waited inside a collective for the others, so of one collective's times on all ranks
the shortest counts: the last rank to come waited for nobody. Where ranks sit is known from the host names of all ranks'
traces, or not at all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trace_events import RankTrace, read_trace

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.fit import fit
from fxcomp.cost.measured import MeasuredCollective, format_bytes
from fxcomp.cost.roofline import Measured
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.report.terminal import print_costs

_LISTED = 12  # kinds of events that are listed by name, the longest ones
_ANY_LINK = Link(0.0, 1.0)  # a cluster must have links; where ranks sit does not depend on them


@dataclass(frozen=True, slots=True)
class Traced:
    """A table, and notes on how it was made."""

    table: CostTable
    notes: tuple[str, ...]
    recognised: Mapping[str, int]
    """The number of events of each kind that became samples."""
    unknown: Mapping[str, int]
    """The number of other events, by name."""


def table_from_traces(paths: Sequence[str | Path]) -> Traced:
    """Read the traces of a job's ranks, one each, or of one rank. Raises BadOption for what is no trace."""
    traces = [read_trace(Path(path)) for path in paths]
    sizes = {trace.world_size for trace in traces}
    is_strange = any(trace.rank >= trace.world_size for trace in traces)
    if is_strange or len(sizes) > 1 or len({trace.rank for trace in traces}) < len(traces):
        told = ", ".join(f"rank {trace.rank} of {trace.world_size}" for trace in traces)
        raise BadOption(f"these traces are not of the ranks of one job: {told}.\n  Name one trace of each rank.")
    traces.sort(key=lambda trace: trace.rank)
    notes: list[str] = []
    collectives = _collectives(traces, notes)
    compute = _operators(traces)
    recognised, unknown, unknown_us = Counter[str](), Counter[str](), Counter[str]()
    for trace in traces:
        recognised += trace.recognised
        unknown += trace.unknown
        unknown_us += trace.unknown_us
    notes.insert(0, f"Recognised: {_counts(recognised) or 'nothing'}.")
    if unknown:
        names = sorted(unknown, key=lambda name: (-unknown_us[name], name))
        more = f" and {len(names) - _LISTED} other names" if len(names) > _LISTED else ""
        listed = ", ".join(f"{unknown[name]} {name}" for name in names[:_LISTED])
        notes.append(f"Not used: {sum(unknown.values())} events, the longest first: {listed}{more}.")
    if not compute:
        notes.append("No operator has shapes. Profile with record_shapes=True for operators' times.")
    hosts = Counter(trace.hardware for trace in traces if trace.hardware)
    table = CostTable(
        hardware=next(iter(hosts), CostTable().hardware),
        source=_source(len(traces)),
        compute=compute,
        collectives=collectives,
    )
    return Traced(table, tuple(notes), dict(recognised), dict(unknown))


def _source(ranks: int) -> str:
    return f"a trace of {ranks} rank{'' if ranks == 1 else 's'}"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))


def _collectives(traces: Sequence[RankTrace], notes: list[str]) -> dict[tuple[CollectiveKind, str], MeasuredCollective]:
    """Fit the collectives of all ranks' traces."""
    world_size = traces[0].world_size
    if not any(trace.collectives for trace in traces) or world_size == 1:
        return {}
    hosts = list(dict.fromkeys(trace.host for trace in traces))
    if len(traces) < world_size or "" in hosts:
        notes.append(
            f"Collectives are left out: where the ranks sit is told by the host names of all {world_size} ranks'"
            f" traces, and {len(traces)} {'is' if len(traces) == 1 else 'are'} here."
        )
        return {}
    cluster = Cluster.placed([hosts.index(trace.host) for trace in traces], intra=_ANY_LINK, inter=_ANY_LINK)
    samples: defaultdict[tuple[CollectiveKind, tuple[int, ...]], list[tuple[int, float]]] = defaultdict(list)
    unknown = 0
    for kind, ranks, size in dict.fromkeys((s.kind, s.ranks, s.size) for trace in traces for s in trace.collectives):
        if ranks is None or len(ranks) < 2 or max(ranks) >= world_size:
            unknown += sum(
                s.size == size and s.ranks == ranks and s.kind is kind for t in traces for s in t.collectives
            )
            continue
        samples[kind, ranks] += [(size, us) for us in _shortest(traces, kind, ranks, size)]
    if unknown:
        notes.append(f"{unknown} collectives do not say which ranks they join: left out.")
    found: dict[tuple[CollectiveKind, str], MeasuredCollective] = {}
    for (kind, ranks), pairs in samples.items():
        largest = max(size for size, _ in pairs)
        source = f"{_source(len(traces))}, {len(pairs)} samples up to {format_bytes(largest)}"
        topology = cluster.topology_of(ranks).text
        if (kind, topology) not in found or len(pairs) > found[kind, topology].fit.samples:
            found[kind, topology] = MeasuredCollective(len(ranks), fit(pairs), source)
    return found


def _shortest(traces: Sequence[RankTrace], kind: CollectiveKind, ranks: tuple[int, ...], size: int) -> list[float]:
    """Return one time for each occurrence: that of the rank that came last, who waited for nobody."""
    each = [
        [s.us for s in trace.collectives if (s.kind, s.ranks, s.size) == (kind, ranks, size)]
        for trace in traces
        if trace.rank in ranks
    ]
    present = [times for times in each if times]
    if len({len(times) for times in present}) == 1:
        return [min(together) for together in zip(*present, strict=True)]
    return [min(us for times in present for us in times)]  # recorded in part: nothing says which belong together


def _operators(traces: Sequence[RankTrace]) -> dict[str, Measured]:
    """Return the median time of each operator over all its occurrences on all ranks."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for trace in traces:
        for key, found in trace.operators.items():
            times[key] += found
    result: dict[str, Measured] = {}
    for key in sorted(times):
        middle = statistics.median(times[key])
        spread = statistics.median(abs(us - middle) for us in times[key]) / middle
        result[key] = Measured(middle, spread, f"{_source(len(traces))}, {len(times[key])} times")
    return result


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="of one rank each")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table as JSON")
    arguments = parser.parse_args(words)
    try:
        found = table_from_traces(arguments.traces)
    except BadOption as error:
        print(f"table_from_traces: {error}", file=sys.stderr)
        return 2
    if arguments.output:
        found.table.save(arguments.output)
    print_costs(found.table, found.notes, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
