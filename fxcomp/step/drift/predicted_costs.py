"""Match the lines of an emitted step with costs: what is predicted for each, and what a timed step says it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxcomp.codegen.program import Program
from fxcomp.cost.timeline import Timeline
from fxcomp.graph.edit import collective_kind, level_of, sent_bytes, value_bytes
from fxcomp.graph.info import info
from fxcomp.graph.lines import CostKind, Line, compressed_elements, compressor_at, timed_lines
from fxcomp.graph.regions import Region, cut
from fxcomp.plan.kinds import POOL, Stream
from fxcomp.plan.strategy import Device
from fxcomp.runtime.stopwatch import Reading
from fxcomp.runtime.watched_lines import Call

BLOCKED_US = 50.0
"""A wait longer than this stood still, and its end is the collective's; a shorter one only bounds it (assumed)."""

COMPRESSING = (CostKind.COMPRESS, CostKind.DECOMPRESS)


@dataclass(frozen=True, slots=True)
class Cost:
    """One cost that is compared: its kind, what it is of (`all_reduce@world`, `int8@cpu`), and a collective's bytes."""

    kind: CostKind
    what: str = ""
    size: int = 0

    def __str__(self) -> str:
        if self.kind is CostKind.COLLECTIVE:
            return f"{self.what} of {_size(self.size)}"
        return f"{self.kind.value} {self.what}".strip()

    @property
    def order(self) -> tuple[str, str, int]:
        """The same on all ranks."""
        return self.kind.value, self.what, self.size

    def to_json(self) -> list[str | int]:
        return list(self.order)

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Cost:
        kind, what, size = data
        return cls(CostKind(kind), what, size)


def _size(size: int) -> str:
    return f"{size / 1e6:.3g} MB" if size >= 100_000 else f"{size / 1e3:.3g} kB"


@dataclass(frozen=True, slots=True)
class LaunchedCollective:
    """A collective of the step: the line that launches it, the one that waits for it, and the links that it takes."""

    cost: Cost
    launch: Call
    wait: Call | None
    predicted_us: float
    stream: Stream
    on_pool: bool
    is_idle: bool
    """Nothing goes out of this rank, and nothing comes in."""


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """The cost of each line of a program, and what is predicted for each cost, in us a step."""

    program: Program
    lines: Mapping[Call, Cost]
    collectives: tuple[LaunchedCollective, ...]
    predicted_us: Mapping[Cost, float]
    tasks: Mapping[str, Cost]
    """The cost of each task of the prediction, by the task's name."""
    elements: Mapping[Cost, int]
    """The size of a compressor's largest bucket."""

    @property
    def timeline(self) -> Timeline:
        return self.program.timeline

    @property
    def step_us(self) -> float:
        return self.timeline.step_time_us

    @property
    def costs(self) -> tuple[Cost, ...]:
        """All that is compared on this rank. A rank that holds nothing between two steps has less than others."""
        return tuple(sorted(self.predicted_us, key=lambda cost: cost.order))

    def measured_us(self, reading: Reading) -> dict[Cost, float]:
        """Sum what each cost took in one step; what could not be known is left out."""
        sums: dict[Cost, float] = {}
        for call, cost in self.lines.items():
            may_be_on_pool = cost.kind in (CostKind.START, *COMPRESSING)
            times = reading.pool if may_be_on_pool and call in reading.pool else reading.main
            if call in times:
                start, end = times[call]
                sums[cost] = sums.get(cost, 0.0) + end - start
        return sums | self._collectives_us(reading)

    def _collectives_us(self, reading: Reading) -> dict[Cost, float]:
        """Sum how long collectives had their links: from the launch, or from when the one before was done.

        A duration that is only known within bounds is left out if the prediction lies between them; else it counts as
        the bound nearest to the prediction.
        """
        sums: dict[Cost, float] = {}
        unknown: set[Cost] = set()
        free: dict[tuple[Stream, bool], tuple[float, float]] = {}
        for collective in self.collectives:
            times = reading.pool if collective.on_pool else reading.main
            if collective.launch not in times:
                return {}
            queue = collective.stream, collective.on_pool
            launched, before = times[collective.launch][1], free.get(queue, (0.0, 0.0))
            first, last = max(launched, before[0]), max(launched, before[1])
            earliest, latest = free[queue] = end_us(collective, reading, first)
            if collective.is_idle:
                continue
            least, most = earliest - last, latest - first
            if least < collective.predicted_us < most:
                unknown.add(collective.cost)
            us = min(max(collective.predicted_us, least), most)
            sums[collective.cost] = sums.get(collective.cost, 0.0) + max(0.0, us)
        return {cost: us for cost, us in sums.items() if cost not in unknown}


def end_us(collective: LaunchedCollective, reading: Reading, begun_us: float) -> tuple[float, float]:
    """Bound the end of a collective.

    It is known exactly if the backend told of it or a wait stood still for it; else it lies between begin and wait.
    """
    if collective.launch in reading.ends:
        end = reading.ends[collective.launch]
        return end, end
    times = reading.pool if collective.on_pool else reading.main
    if collective.wait not in times:
        return begun_us, math.inf
    start, end = times[collective.wait]
    return (end, end) if end - start > BLOCKED_US else (min(begun_us, end), end)


def predict_costs(program: Program) -> PredictedCosts:
    """Read a program's final graph and its prediction."""
    spans = {span.task.name: span.end_us - span.start_us for span in program.timeline.spans}
    pieces = cut(program.graph)
    calls = {node: (call, line) for node, call, line in timed_lines(pieces)}
    lines: dict[Call, Cost] = {}
    predicted: dict[Cost, float] = {}
    tasks: dict[str, Cost] = {}
    elements: dict[Cost, int] = {}

    def predict(cost: Cost, task: str, *, is_idle: bool = False) -> None:
        tasks[task] = cost
        if not is_idle:
            predicted[cost] = predicted.get(cost, 0.0) + spans.get(task, 0.0)

    for piece in pieces:
        if isinstance(piece, Region):
            cost = lines[piece.name, 0] = Cost(CostKind.UPDATE if piece.updates else CostKind.COMPUTE)
            predict(cost, piece.name.replace("_", " "))
            continue
        call, line = calls.get(piece, (None, None))
        if call is None or line is None or line.cost is None:
            continue
        if line.cost in COMPRESSING:
            cost, compressed = Cost(line.cost, _compressor(piece)), compressed_elements(piece)
            elements[cost] = max(elements.get(cost, 0), compressed)
            predict(cost, piece.name, is_idle=not compressed)
            if compressed:
                lines[call] = cost
            continue
        cost = lines[call] = Cost(line.cost)
        predict(cost, f"start {piece.name}" if line.cost is CostKind.START else piece.name)
        if line.cost is CostKind.START:
            predict(_collective(piece), piece.name, is_idle=_moves_nothing(piece))
    launches = [(node, call) for node, (call, line) in calls.items() if line.cost is CostKind.START]
    collectives = [_launched(node, call, calls, spans.get(node.name, 0.0)) for node, call in launches]
    return PredictedCosts(program, lines, tuple(collectives), predicted, tasks, elements)


def _launched(
    node: Node, call: Call, calls: Mapping[Node, tuple[Call, Line]], predicted_us: float
) -> LaunchedCollective:
    wait = next((calls[user][0] for user in node.users if user in calls and calls[user][0][0] == "wait"), None)
    on_pool = any(info(source).stream in (*POOL, Stream.D2H) for source in node.all_input_nodes)
    stream = info(node).stream or Stream.INTER
    return LaunchedCollective(_collective(node), call, wait, predicted_us, stream, on_pool, _moves_nothing(node))


def _moves_nothing(launch: Node) -> bool:
    """Tell a collective among ranks that are no root: another level's first ranks hold the bucket."""
    return value_bytes(launch.args[0]) == 0 and value_bytes(launch) == 0


def _collective(node: Node) -> Cost:
    size = info(node).sent_bytes
    what = f"{collective_kind(node).value}@{level_of(node).value}"
    return Cost(CostKind.COLLECTIVE, what, sent_bytes(node) if size is None else size)


def _compressor(node: Node) -> str:
    device = Device.CPU if info(node).stream in POOL else Device.GPU
    return f"{compressor_at(node)}@{device.value}"
