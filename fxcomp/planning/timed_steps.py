"""Time training steps of the emitted program line by line, and compute the cost of each part.

    OVERLAPPED    compute and the network slow each other
    HELD          collectives start at compute's first wait, so that compute and the network run separately
    ONE_BY_ONE    as HELD, and each operator is timed

Steps send the same bits and train equally in all three ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.codegen.load import rebound
from fxcomp.codegen.program import Program
from fxcomp.cost.contention import FittedContention, SeenStep, fit_contention
from fxcomp.cost.roofline import Measured
from fxcomp.cost.table import CostTable
from fxcomp.graph.edit import collective_kind, is_collective, value_bytes
from fxcomp.graph.lines import timed_lines
from fxcomp.graph.regions import Region, cut, regions
from fxcomp.graph.work import is_free
from fxcomp.passes.annotate_costs import cost_key
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.runtime.clock import Clock
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.stopwatch import Call, Reading, Stopwatch
from fxcomp.search.plan_tasks import handing_out
from fxcomp.search.read_workload import graph_tasks

METHODS = ("pack", "launch", "wait")
"""Lines that are timed besides regions. The remaining time counts as the host's."""

FEEDS = 5
"""Number of timings in `around_us`."""


class Way(Enum):
    OVERLAPPED = "overlapped"
    HELD = "held"
    ONE_BY_ONE = "one by one"


class HeldCollectives:
    """A runtime whose waits start all pending collectives, in line order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._held: list[tuple[int, Callable[[], Any]]] = []
        self._results: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def launch(self, *arguments: Any, **options: Any) -> int:
        self._held.append((len(self._results), lambda: self._runtime.launch(*arguments, **options)))
        self._results.append(None)
        return self._held[-1][0]

    def wait(self, number: int) -> Any:
        started = [(held, launch()) for held, launch in self._held]
        self._held.clear()
        for held, flight in started:
            self._results[held] = self._runtime.wait(flight)
        return self._results[number]


class TimedStep:
    def __init__(self, program: Program, runtime: Runtime, way: Way, methods: Sequence[str] = METHODS) -> None:
        self.program, self.way = program, way
        self._runtime, self._clock = runtime, runtime.clock
        lines: Any = runtime if way is Way.OVERLAPPED else HeldCollectives(runtime)
        self._watch = Stopwatch(lines, methods, self._clock)
        self.node_us: dict[str, float] = {}
        """Time of each operator, in µs; empty if regions ran whole."""
        around = self._watch.region if way is not Way.ONE_BY_ONE else OneByOne(program, self.node_us).region
        self._step = rebound(program.module, around)
        self._begin: Any = None
        self._end: Any = None
        self.handed_us = 0.0
        """Host time of running the program, in µs."""

    def run(self, arguments: Sequence[Sequence[Any]]) -> Any:
        begun = time.perf_counter()
        self._begin = self._clock.look()
        self._watch.start()
        try:
            return self._step(self._watch.lines, *arguments)
        finally:
            self._watch.stop()
            self._end = None if self._runtime.counters.skipped else self._clock.look()
            self.handed_us = 1e6 * (time.perf_counter() - begun)

    @property
    def us(self) -> float | None:
        """Time of the program, in µs; None if the device has not finished it or the step was skipped."""
        return None if self._end is None else self._clock.us(self._begin, self._end)

    def reading(self) -> Reading | None:
        """Return the times of the step's lines; None if `us` is None."""
        return None if self.us is None else self._watch.reading()


class OneByOne:
    """Runs regions operator by operator, and records each operator's time."""

    def __init__(self, program: Program, us: dict[str, float]) -> None:
        self._graph, self._device, self._us = program.graph, program.captured.device, us
        self._clock = Clock(self._device)
        self._regions = {region.name: region for region in regions(self._graph)}

    def region(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
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
        us = self._clock.us(start, end)
        assert us is not None, "a device that was waited for knows its times"
        self._us[node.name] = us
        return result


def _constants(region: Region) -> dict[Node, None]:
    return dict.fromkeys(n for node in region.nodes for n in node.all_input_nodes if n.op == "get_attr")


def _dead_after(region: Region) -> dict[Node, list[Node]]:
    needed = set(region.outputs)
    dead: dict[Node, list[Node]] = {}
    for node in reversed(region.nodes):
        last_used = [used for used in dict.fromkeys((*node.all_input_nodes, node)) if used not in needed]
        needed.update(last_used)
        dead[node] = last_used
    return dead


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Median times, in µs, of steps that ran in the same `Way`."""

    step_us: float
    spread: float
    region_us: Mapping[str, float]
    pack_us: float
    launch_us: float | None
    """Median time to launch a collective; None without collectives."""
    pack_gb_per_s: float | None
    """Rate of filling buckets, in GB/s; None without buckets."""
    wait_us: float = 0.0
    """Time waiting for collectives. In a held step, this is the collectives' time without compute."""
    between_us: float = 0.0
    """Host time outside of regions, packs and collectives. On an asynchronous device, the program's total host time."""

    @property
    def compute_us(self) -> float:
        return sum(self.region_us.values()) + self.pack_us

    def times(self, factor: float, step_us: float) -> StepMeasurement:
        """Return a copy with compute scaled by `factor`, and with `step_us`."""
        scaled = {name: us * factor for name, us in self.region_us.items()}
        return replace(self, step_us=step_us, region_us=scaled, pack_us=self.pack_us * factor)


def measurement(steps: Sequence[TimedStep]) -> StepMeasurement:
    """Return the measurement of finished steps of one program that ran in the same way.

    Sums are taken per step, because the sum of medians is less than the median of sums.
    """
    program = steps[0].program
    nodes = {call: node for node, call, _ in timed_lines(cut(program.graph))}
    found: dict[Call, list[float]] = {}
    readings: list[dict[str, float]] = []
    """Total time of each method and of all regions, by step."""
    for step in steps:
        reading = step.reading()
        assert reading is not None, "a device that was waited for knows its times"
        readings.append(dict.fromkeys((*METHODS, "regions"), 0.0))
        for call, (start, end) in reading.main.items():
            found.setdefault(call, []).append(end - start)
            readings[-1][call[0] if call[0] in METHODS else "regions"] += end - start
    totals = [step.us or 0.0 for step in steps]
    between = [us - sum(reading.values()) for us, reading in zip(totals, readings, strict=True)]
    step_us = statistics.median(totals)
    pack_us, regions_us = (_median_of(readings, name) for name in ("pack", "regions"))
    packs = {nodes[call]: us for call, us in found.items() if call[0] == "pack"}
    starts = [
        us for call, us in found.items() if call in nodes and call[0] == "launch" and not _is_broadcast(nodes[call])
    ]
    region_us = {call[0]: statistics.median(us) for call, us in found.items() if call[0] not in METHODS}
    alone_us = sum(region_us.values()) or 1.0
    works_later = compat.works_later(program.captured.device)
    return StepMeasurement(
        step_us=step_us,
        spread=(max(totals) - min(totals)) / step_us,
        region_us={name: us / alone_us * regions_us for name, us in region_us.items()},
        pack_us=pack_us,
        launch_us=statistics.median(chain.from_iterable(starts)) if starts else None,
        pack_gb_per_s=1e-3 * sum(map(value_bytes, packs)) / pack_us if pack_us else None,
        wait_us=_median_of(readings, "wait"),
        between_us=statistics.median([step.handed_us for step in steps] if works_later else between),
    )


def _is_broadcast(launch: Node) -> bool:
    """Return True if a launch broadcasts buffers. The broadcast starts in the region that made them."""
    return is_collective(launch) and collective_kind(launch) is CollectiveKind.BROADCAST


def _median_of(readings: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(reading[name] for reading in readings)


# Costs


def apportion(
    program: Program, step: StepMeasurement, node_us: Mapping[str, float], source: str
) -> dict[str, Measured]:
    """Split each region's time among its operators in proportion to `node_us`, or equally if unknown.

    Operators with the same cost key get their mean time, which preserves the sum.
    """
    found: dict[str, list[float]] = {}
    for region in (region for region in regions(program.graph) if region.name in step.region_us):
        working = [node for node in region.nodes if not is_free(node)]
        alone = sum(node_us.get(node.name, 0.0) for node in working)
        for node in working:
            share = node_us.get(node.name, 0.0) / alone if alone else 1 / len(working)
            found.setdefault(cost_key(node), []).append(share * step.region_us[region.name])
    return {key: Measured(statistics.fmean(us), step.spread, source) for key, us in found.items()}


def feed_costs(device: torch.device, us: float) -> dict[str, float]:
    """Return cost-table fields for host time before compute. On an asynchronous device, host time overlaps compute."""
    return {"feed_us": 0.0, "host_us": us} if compat.works_later(device) else {"feed_us": us}


def around_us(feed: Callable[[], object], repeats: int = FEEDS) -> float:
    """Return the median time of `feed`, in µs, after a first call that fills caches."""
    feed()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        feed()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def contention_of(
    costs: CostTable, graph: GraphModule, held: StepMeasurement, overlapped: StepMeasurement
) -> FittedContention:
    """Fit contention and link speed to dense steps; the result includes the prediction's error.

    The annotations of `graph` are times without contention. The host's time (`costs.host_us`) is simulated too, so
    that host-bound steps are not attributed to the network. Links that were given are not fitted.
    """
    tasks = (*handing_out(costs.host_us), *graph_tasks(graph))
    slowed_us = max(0.0, overlapped.compute_us - held.compute_us)
    wire_us = held.wait_us if costs.collectives else None
    return fit_contention(SeenStep(tasks, overlapped.step_us, slowed_us, wire_us), costs.processors)
