"""List an emitted step's events: the stream of each, the memory it reads and writes, and the events it waits for.

    region_0            compute   reads the batch, parameters     writes its results
    pack_0              compute   reads gradients                 writes the buffer of %pack_0
    all_reduce_0        its own stream, after the launch          reads and writes the buffer of %pack_0
    wait_0              compute, after the collective

Events of one stream run in order. A launch starts after the earlier work of its thread, a wait blocks its own stream,
and the pool waits for its inputs. An asynchronous device has further streams: the side stream, and one for copies in
each direction. On other devices, a copy to or from the host shares its input's memory.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.aside import Crossing, crossings, goes_aside
from fxcomp.graph.captured import written_nodes
from fxcomp.graph.edit import is_collective, is_exchange, result_of
from fxcomp.graph.info import InputKind, info
from fxcomp.graph.lines import DECOMPRESS, Line, line_of
from fxcomp.graph.memories import Memories
from fxcomp.graph.ops import ALL_FINITE, D2H, H2D, WAIT
from fxcomp.graph.regions import Region, cut
from fxcomp.plan.kinds import POOL, Stream


@dataclass(frozen=True, slots=True)
class Event:
    """Work on a stream."""

    name: str
    """Name of the emitted line or region."""
    where: str
    """Stream, or host thread."""
    after: tuple[int, ...]
    """Indices of the events that this event waits for."""
    reads: frozenset[str] = frozenset()
    """Memories, named after the values for which they are allocated."""
    writes: frozenset[str] = frozenset()
    values: tuple[tuple[str, str], ...] = ()
    """(value, memory) pairs that the event reads, except live inputs (`_is_live`)."""
    makes: tuple[str, ...] = ()


HOST, ASIDE = "host", "aside"
TRANSFERS, TRANSFERS_BACK, WIRE = "transfers", "transfers back", "collective"
"""Streams that no label names: copies to the host, copies back, collectives. HOST is the main thread."""


def traces(gm: GraphModule, is_asynchronous: bool | None = None) -> Iterator[list[Event]]:
    """Yield the events of two consecutive steps, then of two steps whose first is rolled back."""
    pieces = cut(gm)
    undoing = [p for p in pieces if isinstance(p, Node) and (line := line_of(p)) is not None and line.is_undoing]
    usual = [piece for piece in pieces if piece not in undoing]
    memories = Memories(gm, _works_behind(gm) if is_asynchronous is None else is_asynchronous)
    yield _events(gm, memories, (), usual, usual)
    if undoing:
        end = next(k for k, piece in enumerate(usual) if isinstance(piece, Node) and piece.target is ALL_FINITE) + 1
        yield _events(gm, memories, undoing, [*usual[:end], *undoing], usual)


def _works_behind(gm: GraphModule) -> bool:
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    return any(isinstance(value, Tensor) and compat.is_accelerator(value.device) for value in values)


def _events(
    gm: GraphModule, memories: Memories, undoing: Sequence[Node], *steps: Sequence[Region | Node]
) -> list[Event]:
    writer = _EventWriter(memories)
    last_uses = {id(pieces): _last_uses(memories, pieces) for pieces in steps}
    for pieces in steps:
        freed = last_uses[id(pieces)]
        writer.start()
        *before, end = crossings(gm, pieces)
        for place, piece in enumerate(pieces):
            writer.cross(before[place])
            if place and pieces[place] in undoing and pieces[place - 1] not in undoing:
                writer.meet_pool("all_finite")
            writer.add(piece)
            writer.free(freed.get(place, ()))
        if pieces and pieces[-1] not in undoing:  # in a rolled-back step compute has already waited
            writer.cross(end)
        writer.meet_pool("finish")
    return writer.events


def _last_uses(memories: Memories, pieces: Sequence[Region | Node]) -> dict[int, list[str]]:
    """Return, by index of a piece, the temporary memories that no later piece of the step uses."""
    last: dict[str, int] = {}
    for place, piece in enumerate(pieces):
        nodes = (*piece.inputs, *piece.outputs) if isinstance(piece, Region) else (piece, *piece.all_input_nodes)
        last.update((memory, place) for node in nodes for memory in memories.of(node) if memory in memories.passing)
    found: dict[int, list[str]] = {}
    for memory, place in last.items():
        found.setdefault(place, []).append(memory)
    return found


class _EventWriter:
    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.events: list[Event] = []
        self.last: dict[str, int] = {}
        self.done: dict[Node, int] = {}
        """Index of the event after which a value of the pool or of a collective is ready."""
        self.on_host: set[Node] = set()
        self._of_region: dict[str, tuple[list[Node], set[str]]] = {}

    @property
    def compute(self) -> str:
        return Stream.COMPUTE.value if self.memories.is_asynchronous else HOST

    def cross(self, crossing: Crossing) -> None:
        if crossing.waits and self.memories.is_asynchronous:
            here, there = (ASIDE, self.compute) if crossing.is_aside else (self.compute, ASIDE)
            self._add("aside" if crossing.is_aside else "join", here, after=self._come_to(there))

    def start(self) -> None:
        self._add("start", HOST, makes=(node for node in self.memories.inputs if not _is_live(node)))

    def add(self, piece: Region | Node) -> None:
        if isinstance(piece, Region):
            self._region(piece)
        elif (line := line_of(piece)) is None:
            self._part(piece)
        elif piece.target is D2H:
            self._to_host(piece)
        elif piece.target is H2D:
            self._from_host(piece)
        elif is_collective(piece):
            self._launch(piece)
        elif piece.target is WAIT and not is_exchange(piece):
            self._wait(piece)
        else:
            self._line(piece, line)

    def _part(self, node: Node) -> None:
        source = result_of(node)
        if source is not None and source in self.done:
            self.done[node] = self.done[source]
            if source in self.on_host:
                self.on_host.add(node)

    def free(self, passing: Iterable[str]) -> None:
        """Add an event that frees temporary memories."""
        freed = frozenset(passing)
        if freed and self.events:
            self._add(f"del {', '.join(sorted(freed))}", self.compute, writes=freed)

    def meet_pool(self, name: str) -> None:
        """Make the main thread wait for the pool."""
        ends = [self.last[stream.value] for stream in POOL if stream.value in self.last]
        self._add(name, HOST, after=ends)

    def _region(self, region: Region) -> None:
        known = self._of_region.get(region.name)
        if known is None:
            known = self._of_region[region.name] = self._touched(region)
        self._add(region.name, self.compute, *known, makes=region.outputs)

    def _touched(self, region: Region) -> tuple[list[Node], set[str]]:
        reads: dict[Node, None] = {}
        writes: set[str] = set()
        inside = set(region.nodes)
        for node in region.nodes:
            if not _only_looks(node):
                seen = (_looked_at(source, inside) for source in node.all_input_nodes)
                reads.update((source, None) for source in seen if source not in inside)
            for place in written_nodes(node):
                writes |= self.memories.of(place)
        given = self.memories.of_all(region.inputs)
        for node in region.outputs:
            writes |= self.memories.of(node) & self.memories.passing - given
        return list(reads), writes

    def _line(self, node: Node, line: Line) -> None:
        stream = self._stream_of(node, line)
        takes, writes = _read_by(node, line), self.memories.written_by(node)
        waits = [self.done[source] for source in takes if source in self.on_host]
        if stream in POOL:
            place = self._add(node.name, stream.value, takes, writes, waits, makes=[node, *_parts(node)])
            self._is_on_host(node, place)
            return
        waits = waits if line.is_undoing else []
        where = HOST if self.memories.lies_on_host(node.args[0]) else self._device_stream(node)
        place = self._add(node.name, where, takes, writes, waits, makes=[node, *_parts(node)])
        if node.target is ALL_FINITE:
            self._add(node.name, HOST, after=[place])

    def _device_stream(self, node: Node) -> str:
        return ASIDE if self.memories.is_asynchronous and goes_aside(node) else self.compute

    def _stream_of(self, node: Node, line: Line) -> Stream | None:
        """Return a line's stream. A roll back uses the pool to decompress a payload in host memory."""
        if line.is_undoing and line.method == DECOMPRESS.method and node.args[0] in self.on_host:
            return DECOMPRESS.stream
        return info(node).stream

    def _to_host(self, node: Node) -> None:
        (source,) = node.all_input_nodes
        waits: list[int] = []
        if self.memories.is_asynchronous:
            writes = self.memories.of(node)
            waits = [self._add(node.name, TRANSFERS, [source], writes, self._come_to(self.compute), makes=[node])]
        self._is_on_host(node, self._add(node.name, Stream.CPU.value, after=waits))

    def _from_host(self, node: Node) -> None:
        (source,) = node.all_input_nodes
        waits = [self.done[source]] if source in self.on_host else []
        place = self._add(node.name, HOST, after=waits)
        if self.memories.is_asynchronous:
            copied = self._add(node.name, TRANSFERS_BACK, [source], self.memories.of(node), [place], makes=[node])
            self._add(node.name, self.compute, after=[copied])

    def _launch(self, node: Node) -> None:
        source = cast("Node", node.args[0])
        is_pools = source in self.on_host
        waits = [self.done[source]] if is_pools else []
        thread = Stream.CPU.value if is_pools else self._device_stream(node)
        launched = self._add(node.name, thread, after=waits)
        writes = self.memories.of(node)
        self.done[node] = self._add(node.name, f"{WIRE} {node.name}", [source], writes, [launched], [node])
        if is_pools:
            self.on_host.add(node)

    def _wait(self, node: Node) -> None:
        source = cast("Node", node.args[0])
        if source in self.on_host:  # the reader of the value waits
            self.done[node] = self.done[source]
            self.on_host.add(node)
        else:
            self._add(node.name, self._device_stream(node), after=[self.done[source]] if source in self.done else [])

    def _is_on_host(self, node: Node, place: int) -> None:
        for each in (node, *_parts(node)):
            self.done[each] = place
            self.on_host.add(each)

    def _come_to(self, stream: str) -> list[int]:
        return [self.last[stream]] if stream in self.last else []

    def _add(
        self,
        name: str,
        stream: str,
        takes: Iterable[Node] = (),
        writes: Iterable[str] = (),
        after: Iterable[int] = (),
        makes: Iterable[Node] = (),
    ) -> int:
        """Add an event after the events `after`.

        Except for a collective, the event also follows the last events of `stream` and of the main thread.
        """
        read = [node for node in takes if isinstance(node.meta.get("val"), Tensor | tuple | list)]
        own = [] if stream.startswith(WIRE) else [*self._come_to(stream), *self._come_to(HOST)]
        before = dict.fromkeys([*after, *own])
        reads = frozenset(memory for node in read for memory in self.memories.of(node))
        values = tuple((n.name, m) for n in read if not _is_live(n) for m in sorted(self.memories.of(n)))
        made = tuple(node.name for node in makes)
        self.events.append(Event(name, stream, tuple(before), reads, frozenset(writes), values, made))
        self.last[stream] = len(self.events) - 1
        return self.last[stream]


def _parts(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem and line_of(user) is None]


def _only_looks(node: Node) -> bool:
    """Return whether a node only makes a view or selects a result, so that it reads no data."""
    target: Any = node.target
    return target is operator.getitem or (compat.is_operator(target) and compat.is_view(target))


_CARRIED = (InputKind.RESIDUAL, InputKind.COMPRESSOR_STATE)


def _is_live(node: Node) -> bool:
    """Return whether reads of an input expect its present content, not the content at the step's start."""
    source = info(node).source
    return node.op == "get_attr" or (source is not None and source.kind not in _CARRIED)


def _looked_at(node: Node, inside: Collection[Node]) -> Node:
    while node in inside and _only_looks(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _read_by(node: Node, line: Line) -> list[Node]:
    """Return the values that a line reads, except the value that it overwrites."""
    replaced = {"restore": 0, "keep": 0}.get(line.method)
    return [source for source in node.all_input_nodes if replaced is None or source is not node.args[replaced]]
