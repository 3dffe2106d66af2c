"""Measure the job's own step: its emitted program, region by region, with all ranks running."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.codegen.load import rebound
from fxcomp.codegen.program import Program
from fxcomp.cost.roofline import Measured
from fxcomp.graph.regions import Region, regions
from fxcomp.graph.work import is_free
from fxcomp.passes.annotate_costs import cost_key
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning.measure_links import meet
from fxcomp.runtime.clock import Clock, clock_of
from fxcomp.runtime.host_pool import OnHost
from fxcomp.runtime.moves import Cut
from fxcomp.runtime.runtime import HostFlight, Runtime
from fxcomp.runtime.transport import Flight, Transport


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """A step as it was run, in µs: as a whole, and each region."""

    step_us: float
    spread: float
    region_us: Mapping[str, float]
    pack_us: float
    """Filling all buckets."""
    launch_us: float | None
    """Starting a collective, the median; None if there are none."""
    pack_gb_per_s: float | None
    """The rate of filling buckets; None if there are none."""
    node_us: Mapping[str, float]
    """The time of each operator by itself; regions' times are shared out in proportion."""
    between_us: float = 0.0
    """The rest of the step: what the emitted code does between regions, buckets and collectives."""

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
    """Run a program on copies of its arguments, and time its regions, over each transport in turns.

    Every rank calls it with the same `repeats`; one that is alone may stop when the next one would pass `budget_us`.
    Random numbers, parameters and optimizer state are as before afterwards. In turns, because machines drift: what
    differs between two transports is then theirs; ranks begin each together. The first step over each, which
    allocates, and the last one time every operator by itself; the shorter time counts, because a hiccup makes one long.
    Where one step passes the budget, the first one alone says how a region's time is shared out.
    """
    device = program.captured.device
    scratch = tuple([_copy(value) for value in values] for values in arguments)
    runs = [_MeasuredRun(_LinesTimed(transport, device)) for transport in transports]
    nodes = _NodeTimes(program.graph, device)
    one_by_one = rebound(program.module, nodes.timed)
    current: list[_MeasuredRun] = [runs[0]]
    meeting = transports[min(1, len(transports) - 1)]  # the first is NullTransport
    whole = rebound(program.module, lambda name, run: _timed(name, run, lambda: current[0]))
    try:
        cuda = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(cuda):  # pyright: ignore[reportUnknownMemberType]  # untyped
            for run in runs:
                one_by_one(run.runtime, *scratch)
            if cuda:  # Inductor's regions have not run yet
                whole(runs[0].runtime, *scratch)
                runs[0].forget()
            for done in range(repeats):
                if done and sum(runs[0].totals) + runs[0].totals[-1] > budget_us:
                    break
                for run in runs:
                    current[0] = run
                    meet(meeting, device)  # who ends a turn early would wait for the others in the next
                    start = run.runtime.clock.look()
                    whole(run.runtime, *scratch)
                    end = run.runtime.clock.look()
                    compat.synchronize(device)
                    run.collect(start, end)
            if sum(runs[0].totals) <= budget_us:
                one_by_one(runs[0].runtime, *scratch)
    finally:
        for run in runs:
            run.runtime.close()
    return [run.measurement(nodes.us) for run in runs]


FEEDS = 5
"""The number of timings of feeding a step; the first one fills caches and does not count."""


def feed_us(measured: StepMeasurement, feed: Callable[[], object]) -> float:
    """Return what a step takes beside its regions, buckets and collectives: around the program, and inside it.

    `feed` does what comes before each run of the program. `measured` is a step without a network.
    """
    feed()
    times: list[float] = []
    for _ in range(FEEDS):
        start = time.perf_counter()
        feed()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times) + measured.between_us


@dataclass(slots=True)
class _MeasuredRun:
    """The times over one transport."""

    runtime: _LinesTimed
    totals: list[float] = field(default_factory=list[float])
    regions: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    marks: list[tuple[str, Any, Any]] = field(default_factory=list[tuple[str, Any, Any]])
    """The begin and end of each region in the present step."""

    def forget(self) -> None:
        """Leave out what has run so far."""
        self.marks.clear()
        self.runtime.collect(keep=False)

    def collect(self, start: Any, end: Any) -> None:
        """Read the clock about a step that a device has finished."""
        self.totals.append(_us(self.runtime.clock, start, end))
        for name, begun, ended in self.marks:
            self.regions.setdefault(name, []).append(_us(self.runtime.clock, begun, ended))
        self.marks.clear()
        self.runtime.collect()

    def measurement(self, node_us: Mapping[str, float]) -> StepMeasurement:
        step_us = statistics.median(self.totals)
        region_us = {name: statistics.median(found) for name, found in self.regions.items()}
        told_us = sum(region_us.values()) + self.runtime.pack_us + self.runtime.starts_us
        return StepMeasurement(
            step_us=step_us,
            spread=(max(self.totals) - min(self.totals)) / step_us,
            region_us=region_us,
            pack_us=self.runtime.pack_us,
            launch_us=self.runtime.launch_us,
            pack_gb_per_s=self.runtime.pack_gb_per_s(),
            node_us=node_us,
            between_us=max(0.0, step_us - told_us),
        )


class _NodeTimes:
    """Runs regions operator by operator, and keeps what each took."""

    def __init__(self, graph: GraphModule, device: torch.device) -> None:
        self.us: dict[str, float] = {}
        self._graph, self._device, self._clock = graph, device, clock_of(device)
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


class _LinesTimed(Runtime):
    """A runtime that notes how long it fills each bucket and starts each collective; the first of each is left out."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        super().__init__(transport, device)
        self._packs: dict[str, list[float]] = {}
        self._launches: dict[str, list[float]] = {}
        self._sizes: dict[str, int] = {}
        self._marks: list[tuple[str, Any, Any]] = []

    def pack(
        self,
        name: str,
        parameters: Sequence[str],
        gradients: Sequence[Tensor],
        scale: float,
        starts: Sequence[int] = (),
        *,
        dtype: torch.dtype | None = None,
        factor: Tensor | None = None,
    ) -> Tensor:
        start = self.clock.look()
        bucket = super().pack(name, parameters, gradients, scale, starts, dtype=dtype, factor=factor)
        self._marks.append((name, start, self.clock.look()))
        self._sizes[name] = bucket.nbytes
        return bucket

    def collect(self, *, keep: bool = True) -> None:
        """Read the clock about a step that a device has finished."""
        for name, start, end in self._marks if keep else ():
            self._packs.setdefault(name, []).append(_us(self.clock, start, end))
        self._marks.clear()

    def launch(
        self, name: str, kind: str, value: Tensor | OnHost, cut: Cut, level: str, how: str = "sum"
    ) -> Flight | HostFlight:
        start = time.perf_counter()
        flight = super().launch(name, kind, value, cut, level, how)
        if kind != CollectiveKind.BROADCAST.value:  # of buffers, whose start is in the region that made them
            self._launches.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
        return flight

    def all_finite(self, values: Sequence[Tensor]) -> bool:
        """Look, and let updates run on the copies whatever is found: a step that is left out has none to time."""
        super().all_finite(values)
        self.counters.skipped = False
        return True

    @property
    def pack_us(self) -> float:
        return _sum_of_medians(self._packs)

    @property
    def launch_us(self) -> float | None:
        later = [us for found in self._launches.values() for us in found[1:] or found]
        return statistics.median(later) if later else None

    @property
    def starts_us(self) -> float:
        """Starting all collectives of a step."""
        return _sum_of_medians(self._launches)

    def pack_gb_per_s(self) -> float | None:
        return 1e-3 * sum(self._sizes.values()) / self.pack_us if self._packs else None


def _sum_of_medians(times: Mapping[str, Sequence[float]]) -> float:
    return sum(statistics.median(found[1:] or found) for found in times.values())


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _timed(name: str, run: Callable[..., Any], of: Callable[[], _MeasuredRun]) -> Callable[..., Any]:
    def measured(*inputs: Any) -> Any:
        current = of()
        start = current.runtime.clock.look()
        result = run(*inputs)
        current.marks.append((name, start, current.runtime.clock.look()))
        return result

    return measured


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
