"""Expand a plan into the tasks of the emitted step, in issue order.

    region 0, pack 0, compress 0, all_gather 0      compute up to bucket 0's last gradient, then its first stage
    region 1, pack 1, all_reduce 1                  ...
    backward                                        the rest of backward, after every launch
    decompress 0, update 0, update 1                after the last collective, bucket by bucket

Launches follow `Plan.schedule()`, as in the emitted code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cost.piecewise import Curve, trace
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, step_time_us
from fxcomp.plan.kinds import POOL, CollectiveKind, ElementType, Stream, wire_of
from fxcomp.plan.legs import Encode, Send
from fxcomp.plan.lines import FP32, BucketLine, LineKind, lines_of
from fxcomp.plan.plan import Bucket, Plan, launch_order
from fxcomp.plan.prices import CollectivePrice, Measure, PriceQuestion, Prices, Size
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Strategy
from fxcomp.search.workload import Gradient, Workload

END_OF_BACKWARD = "backward"
BROADCAST = "broadcast buffers"
ROUNDING_US = 1e-6


@dataclass(frozen=True, slots=True)
class BucketTasks:
    """Tasks of a bucket: stages that start during backward, the tasks after them, and the update."""

    stages: tuple[tuple[Task, ...], ...]
    final: tuple[Task, ...]
    update: Task


class StepPrices:
    """Cached step times of one workload's plans, and price curves for the search."""

    def __init__(self, workload: Workload, costs: CostTable, cluster: Cluster) -> None:
        self.workload, self.costs, self.cluster = workload, costs, cluster
        self.broadcast = self._broadcast()
        """Broadcast task without its predecessors; None if there are no buffers."""
        self._writer = BucketWriter(workload, costs, cluster)
        self._buckets: dict[tuple[int, Bucket, float, int], BucketTasks] = {}
        self._curves: dict[PriceQuestion, tuple[Curve, ...]] = {}

    def step_us(self, plan: Plan) -> float:
        return step_time_us(self.tasks(plan), self.costs.processors)

    def tasks(self, plan: Plan) -> list[Task]:
        workload = self.workload.moved(plan.moved)
        members = zip(plan.buckets, members_of(plan, workload), strict=True)
        buckets = [self._bucket(k, bucket, each) for k, (bucket, each) in enumerate(members)]
        return assemble(workload, region_tasks(ready_times(workload, plan)), buckets, self.broadcast)

    def curves(self, question: PriceQuestion, largest: float) -> tuple[Curve, ...]:
        """Return the curve of a price in µs by size. A collective that uses processors has two more curves, of
        processor time and of time during compute.
        """
        known = self._curves.get(question)
        if known is None or known[0].sizes[-1] < largest:
            prices: list[Callable[[float], float]] = [partial(self._us, question)]
            if question.is_collective and not math.isinf(self.costs.processors.count):
                prices += [partial(self._processor_us, question), partial(self._beside_us, question)]
            known = self._curves[question] = tuple(trace(price, largest) for price in prices)
        return known

    def _bucket(self, k: int, bucket: Bucket, members: Sequence[Gradient]) -> BucketTasks:
        # The other buckets determine which part of a cut gradient includes its update.
        updates_us, joined = sum(each.update_us for each in members), sum(each.joined_bytes for each in members)
        key = k, bucket, updates_us, joined
        tasks = self._buckets.get(key)
        if tasks is None:
            tasks = self._buckets[key] = self._writer.bucket(k, members, bucket.strategy)
        return tasks

    def _broadcast(self) -> Task | None:
        size = self.workload.broadcast_bytes
        if not size or self.cluster.world_size == 1:
            return None
        price = self.costs.collective(CollectiveKind.BROADCAST, Level.WORLD, size, self.cluster)
        wire = wire_of(Level.WORLD, self.cluster.hosts)
        return Task(BROADCAST, wire, price.us, load=price.load, overlap_speed=price.overlap_speed)

    def _us(self, question: PriceQuestion, size: float) -> float:
        if question.method == "launch_us":
            return self.costs.launch_us
        if question.is_collective:
            return self._collective(question, size).us
        return getattr(self.costs, question.method)(*question.before, size, *question.after)

    def _processor_us(self, question: PriceQuestion, size: float) -> float:
        price = self._collective(question, size)
        return price.us * price.load

    def _beside_us(self, question: PriceQuestion, size: float) -> float:
        price = self._collective(question, size)
        return price.us / price.overlap_speed

    def _collective(self, question: PriceQuestion, size: float) -> CollectivePrice:
        kind, level = question.before
        return self.costs.collective(kind, level, size, self.cluster)


def plan_tasks(workload: Workload, plan: Plan, costs: CostTable, cluster: Cluster) -> tuple[Task, ...]:
    return tuple(StepPrices(workload, costs, cluster).tasks(plan))


def ready_times(workload: Workload, plan: Plan) -> list[float]:
    """Return the ready time of each bucket's last gradient, in µs."""
    position = {gradient.name: k for k, gradient in enumerate(workload.gradients)}
    return [workload.gradients[max(position[name] for name in bucket.names)].ready_us for bucket in plan.buckets]


def handing_out(host_us: float) -> list[Task]:
    """Return the host's task, if any: launching the step's kernels."""
    return [Task("hand out", Stream.HOST, host_us)] if host_us else []


def region_tasks(ready_us: Sequence[float]) -> list[Task]:
    """Return the compute tasks up to each bucket's last gradient."""
    tasks: list[Task] = []
    done_us = 0.0
    for k, ready in enumerate(ready_us):
        tasks.append(Task(f"region {k}", Stream.COMPUTE, max(0.0, ready - done_us)))
        done_us = max(done_us, ready)
    return tasks


def assemble(
    workload: Workload, regions: Sequence[Task], buckets: Sequence[BucketTasks], broadcast: Task | None
) -> list[Task]:
    tasks = handing_out(workload.host_us)
    done_us, entered = 0.0, -1
    for launch in launch_order(tuple(len(bucket.stages) for bucket in buckets)):
        while entered < launch.region:
            entered += 1
            region = regions[entered]
            if broadcast is not None and done_us + region.duration_us + ROUNDING_US >= workload.broadcast_ready_us:
                head, region = _cut(region, workload.broadcast_ready_us - done_us)
                tasks += [head, _after(broadcast, head)]
                done_us += head.duration_us
                broadcast = None
            tasks.append(region)
            done_us += region.duration_us
        tasks.extend(_asked_for(buckets[launch.bucket].stages[launch.stage], tasks))
    for region in regions[entered + 1 :]:  # with one rank there are no launches
        tasks.append(region)
        done_us += region.duration_us
    rest = Task(END_OF_BACKWARD, Stream.COMPUTE, max(0.0, workload.backward_us - done_us))
    tasks.append(rest)
    if broadcast is not None:
        tasks.append(_after(broadcast, rest))
    shares = any(task.name == BROADCAST for task in tasks)
    for bucket in buckets:
        tasks.extend(bucket.final)
        if not workload.updates_wait:
            tasks.append(bucket.update)
    buffers = Task("update buffers", Stream.COMPUTE, workload.buffers_us, after=(BROADCAST,))
    if shares and workload.commits:  # before a possible early return, which keeps the forward pass's changes
        tasks.append(buffers)
    if workload.updates_wait:
        arrived = tuple(name for bucket in buckets for name in bucket.update.after)
        tasks.append(Task("finish", Stream.COMPUTE, workload.finish_us, after=arrived))
        tasks.extend(bucket.update for bucket in buckets)
    if shares and not workload.commits:
        tasks.append(buffers)
    return tasks


def _cut(region: Task, first_us: float) -> tuple[Task, Task]:
    """Cut a region in two. The second part keeps the name, because other tasks wait for the region's end."""
    first_us = max(0.0, min(first_us, region.duration_us))
    head = Task(f"{region.name}, down to the buffers", region.stream, first_us)
    return head, Task(region.name, region.stream, region.duration_us - first_us)


def _asked_for(stage: Sequence[Task], tasks: Sequence[Task]) -> Sequence[Task]:
    first, *others = stage
    if first.stream not in POOL:
        return stage
    come_to = next(task.name for task in reversed(tasks) if task.stream is Stream.COMPUTE)
    return replace(first, after=(*first.after, come_to)), *others


def _after(task: Task, before: Task) -> Task:
    return replace(task, after=(before.name,))


def members_of(plan: Plan, workload: Workload) -> list[list[Gradient]]:
    by_name, parts = {gradient.name: gradient for gradient in workload.gradients}, plan.parts
    completed_in: dict[str, int] = {name: plan.bucket_of(name) for name, each in parts.items() if len(each) > 1}
    found: list[list[Gradient]] = []
    for k, bucket in enumerate(plan.buckets):
        members: list[Gradient] = []
        seen = Counter[str]()
        for name, extent in zip(bucket.names, bucket.extents, strict=True):
            gradient = by_name[name]
            seen[name] += 1
            if name in completed_in:
                gradient = gradient.part(extent, bears_update=completed_in[name] == k and seen[name] == 1)
            members.append(gradient)
        found.append(members)
    return found


class BucketWriter:
    """Builds the tasks of buckets from their operations (`plan/lines.py`)."""

    def __init__(self, workload: Workload, prices: Prices, cluster: Cluster) -> None:
        self.commits, self.saves_residuals = workload.commits, workload.saves_residuals
        self.prices, self.cluster = prices, cluster

    def bucket(self, k: int, gradients: Sequence[Gradient], strategy: Strategy) -> BucketTasks:
        """Return the tasks of bucket k, whose gradients have one type."""
        joining_us = [self.prices.pack_us(each.joined_bytes) if each.joined_bytes else 0.0 for each in gradients]
        update_us = sum(each.update_us + us for each, us in zip(gradients, joining_us, strict=True))
        if self.cluster.world_size == 1:
            return BucketTasks((), (), Task(f"update {k}", Stream.COMPUTE, update_us))
        kind = gradients[0].element_type if gradients else ElementType.F32
        self.k = k
        self.route = route_of(strategy, [each.shape for each in gradients], self.cluster, element_type=kind)
        self.lines = lines_of(self.route)
        self.previous = f"region {k}"
        self.names = Counter[str]()
        stages = tuple(self.stage(number) for number in range(strategy.started_stages))
        final = self.final(is_started=strategy.pool_takes_arrivals)
        return BucketTasks(stages, final, Task(f"update {k}", Stream.COMPUTE, update_us, after=(self.previous,)))

    def stage(self, number: int) -> tuple[Task, ...]:
        """Return a stage's tasks. They begin with a wait for the previous collective if the main thread waits."""
        awaited = self.lines[number - 1][-1] if number else None
        if awaited is None or awaited.stream is Stream.CPU:  # the pool waits
            first = []
        else:  # the main thread blocks until the wire is done
            first = [self._task(f"wait for {_name_of(awaited)}", Stream.COMPUTE, 0.0)]
        return (*first, *(task for line in self.lines[number] for task in _TASKS[line.kind](self, line)))

    def final(self, *, is_started: bool) -> tuple[Task, ...]:
        """Return the tasks after all stages. Pool tasks and copies to the device wait for the end of backward.

        With `is_started` the decompression after the last collective is already a stage.
        """
        lines = (*(() if is_started else self.lines[-2]), *self.lines[-1])
        return tuple(
            replace(task, after=(*task.after, END_OF_BACKWARD)) if task.stream in (*POOL, Stream.H2D) else task
            for line in lines
            for task in _TASKS[line.kind](self, line)
        )

    def pack(self, line: BucketLine) -> list[Task]:
        return [self._task(line.kind.value, line.stream, self.prices.pack_us(self._size(line)))]

    def copy(self, line: BucketLine) -> list[Task]:
        copy_us = self.prices.copy_us(self._size(line))
        return [self._task(line.kind.value, line.stream, copy_us)] if copy_us else []

    def propose(self, line: BucketLine) -> list[Task]:
        leg = line.encode
        return [self._task("propose", line.stream, self.prices.propose_us(leg.compressor, leg.elements, leg.device))]

    def compress(self, line: BucketLine) -> list[Task]:
        leg = line.encode
        us = self.prices.encode_us(leg.compressor, leg.elements, leg.device)
        saved = [*self._saved_residual(leg), *self._saved_state(leg)]
        compress = self._task("compress", line.stream, us, *[task.name for task in saved])
        return [*saved, compress, *self._saved_payload(line)]

    def _saved_residual(self, leg: Encode) -> list[Task]:
        if not self.saves_residuals or not leg.compressor.needs_error_feedback:
            return []
        return [Task(self._named("save residual"), Stream.COMPUTE, self.prices.pack_us(Size(FP32 * leg.elements)))]

    def _saved_state(self, leg: Encode) -> list[Task]:
        if not self.commits or not leg.compressor.has_state:
            return []
        us = self.prices.pack_us(self._state_size(leg))
        return [Task(f"save state {self.k}", Stream.COMPUTE, us)]  # waits for no task of the bucket

    def _saved_payload(self, line: BucketLine) -> list[Task]:
        """Copy a payload that is summed in place, for a rollback of the residual."""
        leg = line.encode
        if not self.commits or self.saves_residuals or not leg.compressor.needs_error_feedback:
            return []
        follows = next(each for each in self.route.legs if isinstance(each, Send) and each.slot == leg.slot)
        if not follows.kind.is_in_place:
            return []
        return [self._task("save", line.stream, self.prices.pack_us(self._made(leg, Measure.PAYLOAD, line.size)))]

    def decompress(self, line: BucketLine) -> list[Task]:
        leg, encoder = line.decode, line.of
        us = self.prices.decode_us(leg.compressor, leg.elements, leg.payloads, leg.device)
        if encoder is not None and leg.compressor.has_state and leg.compressor.facts.state_from_payload:
            us += self.prices.pack_us(self._state_size(encoder))
        return [self._task("decompress", line.stream, us)]

    def send(self, line: BucketLine) -> list[Task]:
        leg = line.send
        if leg.ranks == 1:
            return []
        what, name = (leg.kind, leg.level, self._size(line), self.cluster), _name_of(line)
        start = self._task(f"start {name}", line.stream, self.prices.launch_us)
        price, wire = self.prices.collective(*what), wire_of(leg.level, self.cluster.hosts)
        sent = Task(self._named(name), wire, price.us, (self.previous,), price.load, price.overlap_speed)
        self.previous = sent.name
        return [start, sent]

    def _task(self, what: str, stream: Stream, duration_us: float, *also_after: str) -> Task:
        load = self.prices.pool_load if stream in POOL else 0.0
        task = Task(self._named(what), stream, duration_us, (self.previous, *also_after), load)
        self.previous = task.name
        return task

    def _named(self, what: str) -> str:
        """Name a task by the bucket; a second task of the name gets the number (2)."""
        self.names[what] += 1
        again = self.names[what]
        return f"{what} {self.k}" if again == 1 else f"{what} ({again}) {self.k}"

    def _size(self, line: BucketLine) -> Size:
        if line.of is None:
            return Size(line.size)
        return self._made(line.of, Measure.PROPOSAL if line.kind is LineKind.AGREE else Measure.PAYLOAD, line.size)

    def _state_size(self, leg: Encode) -> Size:
        return self._made(leg, Measure.STATE, sum(map(leg.compressor.state_bytes, leg.segments)))

    def _made(self, leg: Encode, measure: Measure, size: int) -> Size:
        return Size(size, measure, leg.compressor, is_whole=leg.elements == len(self.route.whole))


_TASKS: dict[LineKind, Callable[[BucketWriter, BucketLine], list[Task]]] = {
    LineKind.PACK: BucketWriter.pack,
    LineKind.CAST: BucketWriter.pack,
    LineKind.TURN: BucketWriter.pack,
    LineKind.D2H: BucketWriter.copy,
    LineKind.H2D: BucketWriter.copy,
    LineKind.PROPOSE: BucketWriter.propose,
    LineKind.COMPRESS: BucketWriter.compress,
    LineKind.DECOMPRESS: BucketWriter.decompress,
    LineKind.AGREE: BucketWriter.send,
    LineKind.SEND: BucketWriter.send,
}


def _name_of(line: BucketLine) -> str:
    return line.kind.value if line.kind is LineKind.AGREE else line.send.kind.value
