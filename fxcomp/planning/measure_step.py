"""Measure what a plan is judged by, on the job itself: the emitted dense step, all ranks running, and live links."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.codegen.load import rebound
from fxcomp.codegen.program import Program
from fxcomp.compressors import Compressor, kernels_available
from fxcomp.compressors.kernels import fingerprint
from fxcomp.cost.collectives import wire_bytes
from fxcomp.cost.measure import measure_collectives, measure_compressors, measure_copy, measure_memory
from fxcomp.cost.table import CostTable, Measured
from fxcomp.cost.table import Transport as TransportCost
from fxcomp.graph.regions import Region, regions
from fxcomp.graph.work import is_free, work_key
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.strategy import Device
from fxcomp.runtime.clock import Clock, clock_of
from fxcomp.runtime.runtime import Flight, HostFlight, OnHost, Runtime
from fxcomp.runtime.transport import Transport, Work
from fxcomp.step.compiled_step import CompiledStep

SLOW_STEP_S = 2.0
"""A step slower than this is measured fewer times."""


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
    """How fast buckets were filled; None if there are none."""
    node_us: Mapping[str, float]
    """What each operator took by itself: what regions' times are shared out by."""

    @property
    def compute_us(self) -> float:
        """What the main thread computes, packing included."""
        return sum(self.region_us.values()) + self.pack_us


# The machine


def machine_costs(compressors: Sequence[Compressor], device: torch.device) -> CostTable:
    """Compressors and memory of this machine, from the user's cache or measured now (about a second each)."""

    def complete(known: CostTable | None) -> CostTable:
        table = known or costs_of_memory(device)
        if table.threads != torch.get_num_threads():
            table = replace(table, threads=torch.get_num_threads())
        missing = [c for c in dict.fromkeys(compressors) if not all(table.has_measured(c, place) for place in Device)]
        if not missing:
            return table
        points = measure_compressors(missing, on=device)
        if device.type == "cpu":  # the pool is the device
            points |= {
                key.replace(f"@{Device.GPU.value}", f"@{Device.CPU.value}"): cost for key, cost in points.items()
            }
        else:
            points |= measure_compressors(missing, device=Device.CPU)
        return replace(table, compressors={**table.compressors, **points})

    return CostTable.cached(hardware(device), versions(), complete)


def costs_of_memory(device: torch.device) -> CostTable:
    """A table of this machine without compressors: its memory and its roofline, measured."""
    pack, roofline = measure_memory(device)
    return CostTable(
        hardware=hardware(device),
        versions=versions(),
        date=date.today().isoformat(),
        source="measured",
        roofline=roofline,
        pack_gb_per_s=pack,
        copy_gb_per_s=measure_copy(device),
        threads=torch.get_num_threads(),
    )


def hardware(device: torch.device) -> str:
    """What measured numbers belong to: processor or GPU, and the threads that torch may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{compat.processor_name()}, {torch.get_num_threads()} threads"


def versions() -> str:
    """What else changes the numbers: torch, Python, and which kernels are built."""
    kernels = f"kernels {fingerprint()}" if kernels_available() else "no kernels"
    return f"torch {torch.__version__}, python {platform.python_version()}, {kernels}"


# The links


def with_live_links(costs: CostTable, transport: Transport, cluster: Cluster, device: torch.device) -> CostTable:
    """Add what collectives take on the running process groups, in about 4 s at most. Every rank takes part.

    Where compute's own processors carry the network's software, this adds what that takes of them: this process's
    processor time while the main thread only waits, and how much longer a collective takes while the main thread works.
    """
    link = _LiveLink(transport, cluster, device)
    fits = measure_collectives(link.seconds, cluster)
    costs = replace(costs, collectives=fits, launch_us=link.launch_us(costs.launch_us))
    if math.isinf(costs.processors.count):
        return costs
    taken = link.processor_times()
    if not costs.processors.has_spare:
        taken = {kind: replace(each, **link.beside_compute(kind)) for kind, each in taken.items()}
    return replace(costs, transport=taken)


class _LiveLink:
    """Times collectives, and notes what those over all ranks take of this rank's processors."""

    def __init__(self, transport: Transport, cluster: Cluster, device: torch.device) -> None:
        self._transport, self._cluster, self._device = transport, cluster, device
        self._worked: dict[CollectiveKind, list[tuple[int, float]]] = {}
        """(bytes, µs) of processor time."""
        self._launches_us: list[float] = []
        self._square = torch.ones(192, 192, device=device)
        self._product = torch.zeros_like(self._square)

    def seconds(self, kind: CollectiveKind, level: Level, size: int) -> float:
        """One collective, on the slowest rank."""
        start, cpu, launched, work = self._launch(kind, level, size)
        work.wait()
        compat.synchronize(self._device)
        passed, worked = time.perf_counter() - start, time.process_time() - cpu
        if level is Level.WORLD:
            self._worked.setdefault(kind, []).append((size, 1e6 * max(0.0, worked - launched)))
            self._launches_us.append(1e6 * launched)
        return _slowest(self._transport, passed, self._device)

    def launch_us(self, assumed: float) -> float:
        """What starting one takes the thread that does it."""
        return statistics.median(self._launches_us) if self._launches_us else assumed

    def processor_times(self) -> dict[CollectiveKind, TransportCost]:
        """The smallest collectives' time for each, and the largest's for each MB beyond."""
        times: dict[CollectiveKind, TransportCost] = {}
        for kind, samples in self._worked.items():
            small = [us for size, us in samples if size <= SMALL_BYTES]
            largest = max(size for size, _ in samples)
            fixed = statistics.median(small) if small else 0.0
            most = statistics.median([us for size, us in samples if size == largest])
            sent_mb = wire_bytes(kind, self._cluster.world_size, largest) / 1e6
            times[kind] = TransportCost(fixed, max(0.0, most - fixed) / sent_mb)
        return times

    def beside_compute(self, kind: CollectiveKind) -> dict[str, float]:
        """How much longer collectives take while the main thread works: `speed` and `more_us` of a TransportCost."""
        sizes = self._beside_sizes(kind)
        if len(sizes) == 1:  # a slow link, where a small one takes long: what delays it once is little
            alone_us, beside_us = self._alone_and_beside_us(kind, sizes[0])
            return {"speed": alone_us / beside_us}
        small, large = (self._alone_and_beside_us(kind, size) for size in sizes)
        slope = (large[1] - small[1]) / (large[0] - small[0]) if large[0] > small[0] else 1.0
        slope = min(1.0 / SLOWEST_BESIDE, max(1.0, slope))
        return {"speed": 1.0 / slope, "more_us": max(0.0, (small[1] + large[1] - slope * (small[0] + large[0])) / 2)}

    def _beside_sizes(self, kind: CollectiveKind) -> tuple[int, ...]:
        """A small one, and the largest that takes less than `BESIDE_S`, if another; by numbers that all share."""
        size = SMALL_BESIDE_BYTES
        while size < LARGEST_BESIDE_BYTES and 4 * self.seconds(kind, Level.WORLD, size) < BESIDE_S:
            size *= 4
        return tuple(dict.fromkeys((SMALL_BESIDE_BYTES, size)))

    def _alone_and_beside_us(self, kind: CollectiveKind, size: int) -> tuple[float, float]:
        """What one of several in a row takes alone, and beside work.

        Several, launched at once, are waited for: at once, and after work of about as long. What is not done when the
        work ends is done at full speed behind it, so both times together tell how fast they were beside it. Several,
        because what delays the first one's start is not what delays them all.
        """
        count = min(MOST_BESIDE, max(1, math.ceil(BESIDE_S / 2 / self.seconds(kind, Level.WORLD, size))))
        alone_s = statistics.median([self._behind_work_s(kind, size, count, 0.0) for _ in range(BESIDE_REPEATS)])
        worked_s = 0.9 * alone_s
        total_s = statistics.median([self._behind_work_s(kind, size, count, worked_s) for _ in range(BESIDE_REPEATS)])
        speed = min(1.0, max(SLOWEST_BESIDE, 1.0 - (total_s - alone_s) / worked_s))
        return 1e6 * alone_s / count, 1e6 * alone_s / count / speed

    def _behind_work_s(self, kind: CollectiveKind, size: int, count: int, worked_s: float) -> float:
        """Some collectives that are waited for after so much work: all of it, on the slowest rank."""
        start, _, _, work = self._launch(kind, Level.WORLD, size)
        works = [work, *(self._start(kind, Level.WORLD, size) for _ in range(count - 1))]
        while time.perf_counter() - start < worked_s:
            torch.mm(self._square, self._square, out=self._product)
        compat.synchronize(self._device)
        for each in works:
            each.wait()
        return _slowest(self._transport, time.perf_counter() - start, self._device)

    def _launch(self, kind: CollectiveKind, level: Level, size: int) -> tuple[float, float, float, Work]:
        """Start one behind a barrier: its start by the clock and by the processor, how long that took, and its work."""
        value, out = self._tensors(kind, level, size)
        _barrier(self._transport, self._device)
        start, cpu = time.perf_counter(), time.process_time()
        work = self._started(kind, level, value, out)
        return start, cpu, time.perf_counter() - start, work

    def _start(self, kind: CollectiveKind, level: Level, size: int) -> Work:
        return self._started(kind, level, *self._tensors(kind, level, size))

    def _tensors(self, kind: CollectiveKind, level: Level, size: int) -> tuple[Tensor, Tensor]:
        ranks, elements = self._cluster.ranks_at(level), max(1, size // 4)
        value = torch.zeros(elements, device=self._device)
        gathers = kind is CollectiveKind.ALL_GATHER
        return value, torch.empty(ranks * elements, device=self._device) if gathers else value

    def _started(self, kind: CollectiveKind, level: Level, value: Tensor, out: Tensor) -> Work:
        if kind is CollectiveKind.ALL_GATHER:
            return self._transport.all_gather(value, out, level.value, "main")
        return self._transport.all_reduce(value, level.value, "main")


SMALL_BYTES = 4096
"""A collective of so few bytes costs the processor what starting one costs."""

SMALL_BESIDE_BYTES, LARGEST_BESIDE_BYTES = 1 << 18, 1 << 22
"""Between these sizes of buckets lies what is timed beside compute."""

BESIDE_S, BESIDE_REPEATS, MOST_BESIDE = 0.08, 5, 8
"""How long the larger of them may take alone, how often each is timed, alone and beside, and how many in a row."""

SLOWEST_BESIDE = 0.05
"""Slower than this is noise: a fair scheduler gives more."""


def _barrier(transport: Transport, device: torch.device) -> None:
    transport.all_reduce(torch.zeros(1, device=device), "world", "main").wait()
    compat.synchronize(device)


def _slowest(transport: Transport, seconds: float, device: torch.device) -> float:
    """The same number on every rank: the ranks' largest."""
    mine = torch.tensor([seconds], dtype=torch.float32, device=device)
    everyone = torch.zeros(dist.get_world_size(), dtype=torch.float32, device=device)
    transport.all_gather(mine, everyone, "world", "main").wait()
    return float(everyone.max().item())


# The step


def measure_step(
    step: CompiledStep,
    program: Program,
    transports: Sequence[Transport],
    leaves: Sequence[Any],
    repeats: int,
    budget_us: float = math.inf,
) -> list[StepMeasurement]:
    """Run an emitted step on copies of everything it changes, and time its regions, over each transport in turns.

    Every rank calls it with the same `repeats`; one that is alone may stop when the next one would pass `budget_us`.
    Random numbers, parameters and optimizer state are as before afterwards. In turns, because machines drift: what
    differs between two transports is then theirs; ranks begin each together. The first step over each, which
    allocates, and the last one time every operator by itself; the shorter time counts, because a hiccup makes one long.
    """
    device = step.training.device
    scratch = tuple([_copy(value) for value in values] for values in step.feed(program, leaves))
    runs = [_Run(_LinesTimed(transport, device)) for transport in transports]
    nodes = _NodeTimes(program.graph, device)
    one_by_one = rebound(program.module, nodes.timed)
    current: list[_Run] = [runs[0]]
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
                    _barrier(meeting, device)  # who ends a turn early would wait for the others in the next
                    start = run.runtime.clock.look()
                    whole(run.runtime, *scratch)
                    end = run.runtime.clock.look()
                    compat.synchronize(device)
                    run.collect(start, end)
            one_by_one(runs[0].runtime, *scratch)
    finally:
        for run in runs:
            run.runtime.close()
    return [run.measurement(nodes.us) for run in runs]


@dataclass(slots=True)
class _Run:
    """What was timed over one transport."""

    runtime: _LinesTimed
    totals: list[float] = field(default_factory=list[float])
    regions: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    marks: list[tuple[str, Any, Any]] = field(default_factory=list[tuple[str, Any, Any]])
    """When each region began and ended in the present step."""

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
        return StepMeasurement(
            step_us=step_us,
            spread=(max(self.totals) - min(self.totals)) / step_us,
            region_us={name: statistics.median(found) for name, found in self.regions.items()},
            pack_us=self.runtime.pack_us,
            launch_us=self.runtime.launch_us,
            pack_gb_per_s=self.runtime.pack_gb_per_s(),
            node_us=node_us,
        )


class _NodeTimes:
    """Runs regions operator by operator, and keeps what each took."""

    def __init__(self, graph: GraphModule, device: torch.device) -> None:
        self.us: dict[str, float] = {}
        self._graph, self._device, self._clock = graph, device, clock_of(device)
        self._regions = {region.name: region for region in regions(graph)}

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of a region's function."""
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
    """The values that nobody needs behind each node."""
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

    def pack(self, name: str, parameters: Sequence[str], gradients: Sequence[Tensor], scale: float) -> Tensor:
        start = self.clock.look()
        bucket = super().pack(name, parameters, gradients, scale)
        self._marks.append((name, start, self.clock.look()))
        self._sizes[name] = bucket.nbytes
        return bucket

    def collect(self, *, keep: bool = True) -> None:
        """Read the clock about a step that a device has finished."""
        for name, start, end in self._marks if keep else ():
            self._packs.setdefault(name, []).append(_us(self.clock, start, end))
        self._marks.clear()

    def launch(
        self, name: str, kind: str, value: Tensor | OnHost, ranks: int, level: str, how: str = "sum"
    ) -> Flight | HostFlight:
        start = time.perf_counter()
        flight = super().launch(name, kind, value, ranks, level, how)
        if kind != CollectiveKind.BROADCAST.value:  # of buffers, whose start is in the region that made them
            self._launches.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
        return flight

    @property
    def pack_us(self) -> float:
        return _sum_of_medians(self._packs)

    @property
    def launch_us(self) -> float | None:
        later = [us for found in self._launches.values() for us in found[1:] or found]
        return statistics.median(later) if later else None

    def pack_gb_per_s(self) -> float | None:
        return 1e-3 * sum(self._sizes.values()) / self.pack_us if self._packs else None


def _sum_of_medians(times: Mapping[str, Sequence[float]]) -> float:
    return sum(statistics.median(found[1:] or found) for found in times.values())


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _timed(name: str, run: Callable[..., Any], of: Callable[[], _Run]) -> Callable[..., Any]:
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
            found.setdefault(work_key(node), []).append(share * step.region_us[region.name])
    return {key: Measured(statistics.fmean(us), step.spread, source) for key, us in found.items()}
