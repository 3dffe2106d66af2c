"""Which cost each line of an emitted step has: what is predicted for it, and what a timed step says it took."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.compressors import compressor_of
from fxcomp.cost.timeline import Timeline
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    D2H,
    KEEP,
    MASK_VELOCITY,
    PACK,
    PAD,
    REDUCE_SCATTER,
    ROLL_BACK,
    SAVE,
)
from fxcomp.graph.regions import Region, cut
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.strategy import Device
from fxcomp.plan.streams import Stream
from fxcomp.runtime.stopwatch import Call, Reading

BLOCKED_US = 50.0
"""A wait that took longer stood still, and its end is the collective's; a shorter one only bounds it (assumed)."""


class Kind(Enum):
    """What kind of cost a line has."""

    COMPUTE = "compute"
    UPDATE = "updates"
    PACK = "packing"
    START = "starting collectives"
    COLLECTIVE = "collective"
    COMPRESS = "compressing"
    DECOMPRESS = "decompressing"


@dataclass(frozen=True, slots=True)
class Cost:
    """What is compared: a kind, with what it is of (`all_reduce@world`, `int8@cpu`), and a collective's bytes."""

    kind: Kind
    what: str = ""
    size: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.COLLECTIVE:
            return f"{self.what} of {_size(self.size)}"
        return f"{self.kind.value} {self.what}".strip()

    @property
    def order(self) -> tuple[str, str, int]:
        """The same on all ranks."""
        return self.kind.value, self.what, self.size


def _size(size: int) -> str:
    return f"{size / 1e6:.3g} MB" if size >= 100_000 else f"{size / 1e3:.3g} kB"


_KINDS = {
    ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    ALL_GATHER: CollectiveKind.ALL_GATHER,
    REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    BROADCAST: CollectiveKind.BROADCAST,
}

_METHODS = {
    Role.COLLECTIVE: "launch",
    Role.WAIT: "wait",
    Role.PROPOSE: "propose",
    Role.COMPRESS: "compress",
    Role.DECOMPRESS: "decompress",
    Role.COMMIT: "all_finite",
}

_MOVES: Mapping[object, str] = {
    PACK: "pack",
    PAD: "pad",
    SAVE: "save",
    ACCUMULATE: "accumulate",
    MASK_VELOCITY: "mask_velocity",
}


def method_of(node: Node) -> str | None:
    """The runtime's method that a node's line calls; None if it has no line, or one of a step that is taken back."""
    role, target = info(node).role, node.target
    if target in _MOVES:
        return _MOVES[target]
    if target is KEEP:
        return None if role is Role.VELOCITY else "keep"
    if target is operator.getitem or target is ROLL_BACK or role is Role.ROLL_BACK:
        return None
    if role is Role.COPY:
        return "d2h" if target is D2H else "h2d"
    return _METHODS.get(role)


@dataclass(frozen=True, slots=True)
class Passage:
    """A collective of the step: the line that launches it, the one that waits for it, and the links that it takes."""

    cost: Cost
    launch: Call
    wait: Call | None
    predicted_us: float
    stream: Stream
    on_pool: bool


@dataclass(frozen=True, slots=True)
class Sheet:
    """Which cost each line of an emitted step has, and what is predicted for them in µs a step."""

    lines: Mapping[Call, Cost]
    passages: tuple[Passage, ...]
    predicted_us: Mapping[Cost, float]
    step_us: float
    tasks: Mapping[str, Cost]
    """What each task of the prediction costs."""
    elements: Mapping[Cost, int]
    """How much a compressor's largest bucket is."""

    @property
    def costs(self) -> tuple[Cost, ...]:
        """All that is compared, in an order that is the same on all ranks that follow a plan."""
        return tuple(sorted(self.predicted_us, key=lambda cost: cost.order))

    def measured_us(self, reading: Reading) -> dict[Cost, float]:
        """What each cost took in one step; what could not be known is left out."""
        sums: dict[Cost, float] = {}
        for call, cost in self.lines.items():
            if cost.kind in (Kind.START, Kind.COMPRESS, Kind.DECOMPRESS) and call in reading.pool:
                start, end = reading.pool[call]
            elif call in reading.main:
                start, end = reading.main[call]
            else:
                continue
            sums[cost] = sums.get(cost, 0.0) + end - start
        return sums | self._passages_us(reading)

    def _passages_us(self, reading: Reading) -> dict[Cost, float]:
        """How long each collective had its links: from its launch, or from when the one before it was done.

        What is only known within bounds is left out if it may be what was predicted; else it is taken to be the bound
        that is nearest to that.
        """
        sums: dict[Cost, float] = {}
        unknown: set[Cost] = set()
        free: dict[tuple[Stream, bool], tuple[float, float]] = {}
        for passage in self.passages:
            times = reading.pool if passage.on_pool else reading.main
            if passage.launch not in times:
                return {}
            queue = passage.stream, passage.on_pool
            launched, before = times[passage.launch][1], free.get(queue, (0.0, 0.0))
            first, last = max(launched, before[0]), max(launched, before[1])
            earliest, latest = free[queue] = _end_us(passage, reading, first)
            least, most = earliest - last, latest - first
            if least < passage.predicted_us < most:
                unknown.add(passage.cost)
            us = min(max(passage.predicted_us, least), most)
            sums[passage.cost] = sums.get(passage.cost, 0.0) + max(0.0, us)
        return {cost: us for cost, us in sums.items() if cost not in unknown}


def _end_us(passage: Passage, reading: Reading, begun_us: float) -> tuple[float, float]:
    """When a collective was done, at the earliest and at the latest.

    Exactly, if somebody was told, or if a wait stood still for it; else somewhere between its begin and its wait.
    """
    if passage.launch in reading.ends:
        end = reading.ends[passage.launch]
        return end, end
    times = reading.pool if passage.on_pool else reading.main
    if passage.wait not in times:
        return begun_us, math.inf
    start, end = times[passage.wait]
    return (end, end) if end - start > BLOCKED_US else (min(begun_us, end), end)


def sheet_of(gm: GraphModule, timeline: Timeline) -> Sheet:
    """Read a final graph and its prediction."""
    spans = {span.task.name: span.end_us - span.start_us for span in timeline.spans}
    lines: dict[Call, Cost] = {}
    passages: list[Passage] = []
    predicted: dict[Cost, float] = {}
    elements: dict[Cost, int] = {}
    tasks: dict[str, Cost] = {}
    calls: dict[Node, Call] = {}
    counts: dict[str, int] = {}

    def note(call: Call, cost: Cost, task: str) -> None:
        lines[call] = cost
        predicted[cost] = predicted.get(cost, 0.0) + spans.get(task, 0.0)
        tasks[task] = cost

    for piece in cut(gm):
        if isinstance(piece, Region):
            kind = Kind.UPDATE if piece.updates else Kind.COMPUTE
            note((piece.name, 0), Cost(kind), piece.name.replace("_", " "))
            continue
        method = method_of(piece)
        if method is None:
            continue
        counts[method] = counts.get(method, -1) + 1
        call = calls[piece] = (method, counts[method])
        if method == "launch":
            note(call, Cost(Kind.START), f"start {piece.name}")
            cost = Cost(Kind.COLLECTIVE, *_collective(piece))
            predicted[cost] = predicted.get(cost, 0.0) + spans.get(piece.name, 0.0)
            tasks[piece.name] = cost
        elif method in ("propose", "compress", "decompress"):
            cost = Cost(Kind.DECOMPRESS if method == "decompress" else Kind.COMPRESS, _compressor(piece))
            note(call, cost, piece.name)
            arguments: Any = piece.args
            elements[cost] = max(elements.get(cost, 0), sum(arguments[2]))
        elif method not in ("wait", "d2h", "h2d"):
            note(call, Cost(Kind.PACK), piece.name)
    for node, call in calls.items():
        if call[0] == "launch":
            wait = next((calls[user] for user in node.users if user in calls and calls[user][0] == "wait"), None)
            on_pool = any(info(source).stream in (Stream.CPU, Stream.D2H) for source in node.all_input_nodes)
            stream = info(node).stream or Stream.INTER
            cost, us = Cost(Kind.COLLECTIVE, *_collective(node)), spans.get(node.name, 0.0)
            passages.append(Passage(cost, call, wait, us, stream, on_pool))
    return Sheet(lines, tuple(passages), predicted, timeline.step_time_us, tasks, elements)


def _collective(node: Node) -> tuple[str, int]:
    target: Any = node.target
    value: Any = node.args[0]
    tensor = value.meta["val"]
    return f"{_KINDS[target].value}@{node.args[-1]}", tensor.numel() * tensor.element_size()


def _compressor(node: Node) -> str:
    target: Any = node.target
    arguments: Any = node.args
    device = Device.CPU if info(node).stream is Stream.CPU else Device.GPU
    return f"{compressor_of(target, arguments[3:])}@{device.value}"
