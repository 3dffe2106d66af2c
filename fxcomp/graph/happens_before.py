"""Check that an emitted step reads memory only after it is written, and before it is overwritten.

    launch %all_reduce_0 of %pack_0  ─►  collective, during compute  ─►  wait  ─►  readers of %wait_0
    d2h %pack_1  ─►  the pool compresses and launches  ─►  wait, on the pool  ─►  h2d  ─►  readers of %h2d_1

Two accesses to the same memory, at least one a write, must be ordered. Two steps in a row are checked, because memory
is kept between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from fxcomp.graph.edit import is_exchange
from fxcomp.graph.effects import Event, traces
from fxcomp.graph.ops import WAIT


@dataclass(frozen=True, slots=True)
class DataRace:
    """Two unordered accesses to the same memory, or a read after an overwrite."""

    first: str
    second: str
    problem: str


def races(gm: GraphModule, *, is_asynchronous: bool | None = None) -> list[DataRace]:
    """Return the data races of a labelled graph with streams.

    `is_asynchronous` is true if kernels run after their launch returns; the default depends on the graph's device.
    Steps whose loss function waits for its own collectives are not checked.
    """
    if any(is_exchange(node) for node in gm.graph.find_nodes(op="call_function", target=WAIT)):
        return []
    return list(dict.fromkeys(race for events in traces(gm, is_asynchronous) for race in races_of(events)))


def races_of(events: Sequence[Event]) -> list[DataRace]:
    before = _before(events)
    return list(dict.fromkeys([*_unordered(events, before), *_stale(events, before)]))


def _before(events: Sequence[Event]) -> list[int]:
    """Return the events that come before each event, as bit masks."""
    before: list[int] = []
    for event in events:
        known = 0
        for other in event.after:
            known |= before[other] | 1 << other
        before.append(known)
    return before


def _unordered(events: Sequence[Event], before: Sequence[int]) -> Iterator[DataRace]:
    reads: dict[str, list[int]] = {}
    writes: dict[str, list[int]] = {}
    for place, event in enumerate(events):
        for memory in event.reads:
            reads.setdefault(memory, []).append(place)
        for memory in event.writes:
            writes.setdefault(memory, []).append(place)
    for memory, places in writes.items():
        for write in places:
            for other in (*reads.get(memory, ()), *places):
                early, late = sorted((write, other))
                if early == late or before[late] >> early & 1 or (other < write and other in places):
                    continue
                yield _race(events, memory, early, late)


def _race(events: Sequence[Event], memory: str, early: int, late: int) -> DataRace:
    first, second = events[early], events[late]
    does = "writes" if memory in second.writes else "reads"
    did = "writes" if memory in first.writes else "reads"
    return DataRace(
        first.name,
        second.name,
        f"{does} the memory of %{memory}, which %{first.name} {did}: nothing orders the two"
        f" ({second.where}, {first.where})",
    )


def _stale(events: Sequence[Event], before: Sequence[int]) -> Iterator[DataRace]:
    writers: dict[str, list[int]] = {}
    made: dict[str, int] = {}
    for place, event in enumerate(events):
        for value, memory in event.values:
            made_at = made.get(value)
            if made_at is None:
                continue
            for write in writers.get(memory, ()):
                if made_at < write < place and before[write] >> made_at & 1 and before[place] >> write & 1:
                    problem = f"reads %{value}, which %{events[write].name} has overwritten by then"
                    yield DataRace(events[write].name, event.name, problem)
        for memory in event.writes:
            writers.setdefault(memory, []).append(place)
        made.update(dict.fromkeys(event.makes, place))
