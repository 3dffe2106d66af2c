"""Measure the job's own step: its emitted program, region by region, with all ranks running."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.codegen.load import rebound
from fxcomp.codegen.program import Program
from fxcomp.cost.roofline import Measured
from fxcomp.graph.captured import written_nodes
from fxcomp.graph.edit import collective_kind, is_collective, value_bytes
from fxcomp.graph.info import ARGUMENTS, InputKind, info
from fxcomp.graph.lines import line_of
from fxcomp.graph.regions import Region, cut, regions
from fxcomp.graph.work import is_free
from fxcomp.passes.annotate_costs import cost_key
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning.measure_links import meet
from fxcomp.runtime.clock import Clock
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.stopwatch import Call, Stopwatch
from fxcomp.runtime.transport import Transport


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """A step as it was run, in µs: as a whole, and each region."""

    step_us: float
    spread: float
    region_us: Mapping[str, float]
    pack_us: float
    """Filling all buckets."""
    launch_us: float | None
    """Time of compute for starting a collective, the median; None if there are none."""
    pack_gb_per_s: float | None
    """The rate of filling buckets; None if there are none."""
    node_us: Mapping[str, float]
    """The time of each operator by itself; regions' times are shared out in proportion."""
    between_us: float = 0.0
    """The host's time between regions, buckets and collectives; on a device that works later, for the whole step."""
    starting_us: float = 0.0
    """The host's time for starting all collectives, where a device hides it."""

    @property
    def compute_us(self) -> float:
        """The main thread's compute, packing included."""
        return sum(self.region_us.values()) + self.pack_us


def measure_step(
    program: Program,
    arguments: Sequence[Sequence[Any]],
    transports: Sequence[Transport],
    repeats: int,
    budget_us: float = math.inf,
) -> list[StepMeasurement]:
    """Run a program, and time its regions, over each transport in turns.

    Every rank calls it with the same `repeats`; one that is alone may stop when the next one would pass `budget_us`.
    Random numbers and arguments are as before afterwards: what trained parameters and optimizer state were is kept on
    the host, so that a device holds no second copy. In turns, because machines drift: what differs between two
    transports is then theirs; ranks begin each together. The first step over each, which allocates, and the last one
    time every operator by itself; the shorter time counts, because a hiccup makes one long. Where one step passes the
    budget, the first one alone says how a region's time is shared out.
    """
    device = program.captured.device
    arguments, written = _lent(program, arguments)
    before = [(value, value.detach().to("cpu", copy=True)) for value in written]
    runs = [_MeasuredRun(program, Runtime(transport, device)) for transport in transports]
    nodes = _NodeTimes(program.graph, device)
    one_by_one = rebound(program.module, nodes.timed)
    meeting = transports[min(1, len(transports) - 1)]  # the first is NullTransport
    try:
        cuda = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(cuda):  # pyright: ignore[reportUnknownMemberType]  # untyped
            for run in runs:
                one_by_one(run.lines, *arguments)
            if cuda:  # Inductor's regions have not run yet
                runs[0].step(runs[0].lines, *arguments)
            for done in range(repeats):
                if done and sum(runs[0].totals) + runs[0].totals[-1] > budget_us:
                    break
                for run in runs:
                    meet(meeting, device)  # who ends a turn early would wait for the others in the next
                    run.time(arguments)
            if sum(runs[0].totals) <= budget_us:
                one_by_one(runs[0].lines, *arguments)
    finally:
        with torch.no_grad():
            for value, was in before:
                value.copy_(was)
        for run in runs:
            run.runtime.close()
    return [run.measurement(nodes.us) for run in runs]


FEEDS = 5
"""The number of timings of feeding a step; the first one fills caches and does not count."""


def feed_costs(device: torch.device, us: float) -> dict[str, float]:
    """Charge the host's time before compute, or overlapping it on a device that works later: fields of a cost table."""
    return {"feed_us": 0.0, "host_us": us} if compat.works_later(device) else {"feed_us": us}


def feed_us(measured: StepMeasurement, feed: Callable[[], object]) -> float:
    """Return what a step takes beside its regions, buckets and collectives: around the program, and inside it.

    `feed` does what comes before each run of the program. `measured` is a step without a network. On a device that
    works later it is all that the host does.
    """
    feed()
    times: list[float] = []
    for _ in range(FEEDS):
        start = time.perf_counter()
        feed()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times) + measured.between_us


class _MeasuredRun:
    """The times over one transport by the device's clock; starts by the host's, too, where that is another."""

    def __init__(self, program: Program, runtime: Runtime) -> None:
        self.runtime, self._device = runtime, program.captured.device
        self.totals: list[float] = []
        self._handed: list[float] = []
        self._watch = Stopwatch(runtime, ("pack", "launch"), runtime.clock)
        self._starts = Stopwatch(cast(Runtime, self._watch.lines), ("launch",), Clock())
        self.step = rebound(program.module, self._watch.region)
        self.lines: Any = self._starts.lines
        self.lines.all_finite = self._let_pass
        self._nodes = _calls(program.graph)
        self._us: dict[Call, list[float]] = {}
        self._starting_us: dict[Call, list[float]] = {}
        """By the host's clock."""

    def time(self, arguments: Sequence[Sequence[Any]]) -> None:
        """Run and time one step."""
        clock = self.runtime.clock
        self._watch.start()
        self._starts.start()
        start, begun = clock.look(), time.perf_counter()
        self.step(self.lines, *arguments)
        self._handed.append(1e6 * (time.perf_counter() - begun))
        end = clock.look()
        self._starts.stop()
        self._watch.stop()
        compat.synchronize(self._device)
        self.totals.append(_us(clock, start, end))
        for watch, found in ((self._watch, self._us), (self._starts, self._starting_us)):
            reading = watch.reading()
            assert reading is not None, "a device that was waited for knows its times"
            for call, (begun, ended) in reading.main.items():
                found.setdefault(call, []).append(ended - begun)

    def measurement(self, node_us: Mapping[str, float]) -> StepMeasurement:
        step_us = statistics.median(self.totals)
        packs = {self._nodes[call]: us for call, us in self._us.items() if call[0] == "pack"}
        starts = [us for call, us in self._us.items() if call[0] == "launch" and not _is_broadcast(self._nodes[call])]
        region_us = {call[0]: statistics.median(us) for call, us in self._us.items() if call not in self._nodes}
        pack_us = _sum_of_medians(packs.values())
        told_us = sum(region_us.values()) + pack_us + _sum_of_medians(starts)
        works_later = compat.works_later(self._device)
        return StepMeasurement(
            step_us=step_us,
            spread=(max(self.totals) - min(self.totals)) / step_us,
            region_us=region_us,
            pack_us=pack_us,
            launch_us=statistics.median(chain.from_iterable(starts)) if starts else None,
            pack_gb_per_s=1e-3 * sum(map(value_bytes, packs)) / pack_us if packs else None,
            node_us=node_us,
            between_us=statistics.median(self._handed) if works_later else max(0.0, step_us - told_us),
            starting_us=_sum_of_medians(self._starting_us.values()) if works_later else 0.0,
        )

    def _let_pass(self, values: Sequence[Tensor]) -> bool:
        """Look, and let updates run whatever is found: a step that is left out has none to time."""
        self.runtime.all_finite(values)
        self.runtime.counters.skipped = False
        return True


def _calls(graph: GraphModule) -> dict[Call, Node]:
    """Find the lines that fill a bucket or start a collective, as the stopwatch numbers them."""
    found: dict[Call, Node] = {}
    for piece in cut(graph):
        line = line_of(piece) if isinstance(piece, Node) else None
        if isinstance(piece, Node) and line is not None and line.method in ("pack", "launch"):
            found[line.method, sum(method == line.method for method, _ in found)] = piece
    return found


def _is_broadcast(launch: Node) -> bool:
    """Buffers travel by it, whose start is in the region that made them."""
    return is_collective(launch) and collective_kind(launch) is CollectiveKind.BROADCAST


class _NodeTimes:
    """Runs regions operator by operator, and keeps what each took."""

    def __init__(self, graph: GraphModule, device: torch.device) -> None:
        self.us: dict[str, float] = {}
        self._graph, self._device, self._clock = graph, device, Clock(device)
        self._regions = {region.name: region for region in regions(graph)}

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Make a stand-in for a region's function."""
        if name not in self._regions:
            return run
        region = self._regions[name]
        dead = _dead_after(region)
        constants = {n: getattr(self._graph, str(n.target)) for n in _constants(region)}

        def step_by_step(*inputs: Any) -> Any:
            values: dict[Node, Any] = {**constants, **dict(zip(region.inputs, inputs, strict=True))}
            for node in region.nodes:
                values[node] = self._run(node, values)
                for used in dead[node]:
                    del values[used]
            outputs = tuple(values[node] for node in region.outputs)
            return outputs[0] if len(outputs) == 1 else outputs

        return step_by_step

    def _run(self, node: Node, values: Mapping[Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
        compat.synchronize(self._device)
        start = self._clock.look()
        result = target(*args, **kwargs)
        end = self._clock.look()
        compat.synchronize(self._device)
        us = _us(self._clock, start, end)
        self.us[node.name] = min(us, self.us.get(node.name, us))
        return result


def _constants(region: Region) -> dict[Node, None]:
    return dict.fromkeys(n for node in region.nodes for n in node.all_input_nodes if n.op == "get_attr")


def _dead_after(region: Region) -> dict[Node, list[Node]]:
    """List the values that nobody needs after each node."""
    needed = set(region.outputs)
    dead: dict[Node, list[Node]] = {}
    for node in reversed(region.nodes):
        last_used = [used for used in dict.fromkeys((*node.all_input_nodes, node)) if used not in needed]
        needed.update(last_used)
        dead[node] = last_used
    return dead


def _sum_of_medians(times: Iterable[Sequence[float]]) -> float:
    return sum(map(statistics.median, times))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _lent(program: Program, arguments: Sequence[Sequence[Any]]) -> tuple[list[Sequence[Any]], list[Tensor]]:
    """Prepare arguments for steps that nobody asked for, and list what must be put back after them.

    What is trained is written in place; so are tensors outside the model. The rest is copied, as it may be memory that
    is read-only or shared by elements, but for frozen parameters that the step only reads.
    """
    places = {_memory(place) for node in program.graph.graph.nodes for place in written_nodes(node)}
    sources = {info(place).source for place in places if place.op == "placeholder"}
    written: list[Tensor] = [getattr(program.graph, str(place.target)) for place in places if place.op == "get_attr"]
    lent: list[Sequence[Any]] = []
    for kind, values in zip(ARGUMENTS, arguments, strict=True):
        if kind in (InputKind.PARAMETER, InputKind.STATE):
            pairs = zip(values, (source for source in program.inputs if source.kind is kind), strict=True)
            lent.append([_lent_one(value, source in sources, written) for value, source in pairs])
        elif kind in (InputKind.BUFFER, InputKind.BATCH):
            lent.append(list(map(_copy, values)))
        else:  # numbers, and memory of our own
            written += [value for value in values if isinstance(value, Tensor)]
            lent.append(values)
    return lent, written


def _lent_one(value: Any, is_written: bool, written: list[Tensor]) -> Any:
    is_frozen = isinstance(value, nn.Parameter) and not value.requires_grad
    if is_frozen != is_written and isinstance(value, Tensor):
        written += [] if is_frozen else [value]
        return value
    return _copy(value)


def _memory(node: Node) -> Node:
    """Find the value whose memory a view shows."""
    while compat.is_operator(node.target) and compat.is_view(node.target) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _us(clock: Clock, start: Any, end: Any) -> float:
    """From one look to another, of a device that is done."""
    us = clock.us(start, end)
    assert us is not None, "a device that was waited for knows its times"
    return us


def apportion(program: Program, step: StepMeasurement, source: str) -> dict[str, Measured]:
    """Share each region's time out to its nodes, by what each took alone.

    A key that occurs more than once gets the mean, so that the sum over the step stays what was measured.
    """
    found: dict[str, list[float]] = {}
    for region in (region for region in regions(program.graph) if region.name in step.region_us):
        working = [node for node in region.nodes if not is_free(node)]
        alone = sum(step.node_us[node.name] for node in working)
        for node in working:
            share = step.node_us[node.name] / alone if alone else 1 / len(working)
            found.setdefault(cost_key(node), []).append(share * step.region_us[region.name])
    return {key: Measured(statistics.fmean(us), step.spread, source) for key, us in found.items()}
