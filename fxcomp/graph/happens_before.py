"""Check that whatever an emitted step reads was written before, and is not overwritten while it is read.

    launch %all_reduce_0 of %pack_0  ─►  the collective, beside compute  ─►  wait  ─►  what reads %wait_0
    d2h %pack_1  ─►  the pool compresses and launches  ─►  wait, on the pool  ─►  h2d  ─►  what reads %h2d_1

`effects.py` lists what a step does as events on streams: what each reads and writes, and what it follows for certain.
Two that touch the same memory, one of them writing, must come one after the other; and between a value's
writing and its reading nothing else is written there. Two steps are checked in a row: memory is kept from step to step.
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
    """Two lines that touch the same memory in no order, or one that comes too late."""

    first: str
    second: str
    problem: str


def races(gm: GraphModule, *, is_asynchronous: bool | None = None) -> list[DataRace]:
    """Find the races of the step that a labelled graph with streams becomes.

    `is_asynchronous`: the device works after the thread that gives it work, as a GPU does; by default, as the graph's
    device. Steps whose loss function waits for collectives of its own are not judged: memory is theirs to hand on.
    """
    if any(is_exchange(node) for node in gm.graph.find_nodes(op="call_function", target=WAIT)):
        return []
    return list(dict.fromkeys(race for events in traces(gm, is_asynchronous) for race in races_of(events)))


def races_of(events: Sequence[Event]) -> list[DataRace]:
    """Find the races among events."""
    before = _before(events)
    return list(dict.fromkeys([*_unordered(events, before), *_stale(events, before)]))


def _before(events: Sequence[Event]) -> list[int]:
    """All events that certainly come before each, as bits."""
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
    """Reads of a value whose memory has been written again since."""
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
