"""Lay a plan out as the tasks of the emitted step, in the order in which they are issued.

    region 0, pack 0, compress 0, all_gather 0      compute down to bucket 0's last gradient; its first stage
    region 1, pack 1, all_reduce 1                  ...
    backward                                        the rest of backward, after every launch
    decompress 0, update 0, update 1                what follows the last collective, bucket by bucket

The order of launches is `Plan.schedule()`; the emitted code follows the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.plan import Bucket, Plan, launch_order
from fxcomp.plan.strategy import Collective, Compress, Decompress, Device, Propose, Step, Strategy
from fxcomp.plan.streams import Stream
from fxcomp.search.workload import Gradient, Workload

END_OF_BACKWARD = "backward"
BROADCAST = "broadcast buffers"
AGREE = "agree"
_ROUNDING_US = 1e-6


@dataclass(frozen=True, slots=True)
class BucketTasks:
    """The tasks of one bucket: those of each launch, those after the last collective, the update."""

    stages: tuple[tuple[Task, ...], ...]
    final: tuple[Task, ...]
    update: Task


def plan_tasks(workload: Workload, plan: Plan, costs: CostTable, cluster: Cluster) -> tuple[Task, ...]:
    """Write down the emitted step of a plan."""
    position = {gradient.name: k for k, gradient in enumerate(workload.gradients)}
    buckets = [bucket_tasks(k, bucket, workload, costs, cluster) for k, bucket in enumerate(plan.buckets)]
    last_gradients = [max(position[name] for name in bucket.names) for bucket in plan.buckets]
    ready_us = [workload.gradients[last].ready_us for last in last_gradients]
    return tuple(assemble(workload, region_tasks(ready_us), buckets, broadcast_task(workload, costs, cluster)))


def region_tasks(ready_us: Sequence[float]) -> list[Task]:
    """Make the compute down to each bucket's last gradient, given when that is ready."""
    tasks: list[Task] = []
    done_us = 0.0
    for k, ready in enumerate(ready_us):
        tasks.append(Task(f"region {k}", Stream.COMPUTE, max(0.0, ready - done_us)))
        done_us = max(done_us, ready)
    return tasks


def broadcast_task(workload: Workload, costs: CostTable, cluster: Cluster) -> Task | None:
    """Make the broadcast of buffers, without its predecessors."""
    if not workload.broadcast_bytes or cluster.world_size == 1:
        return None
    what = CollectiveKind.BROADCAST, Level.WORLD, workload.broadcast_bytes, cluster
    us, load, overlap_speed = costs.collective_us(*what), costs.load_of(*what), costs.overlap_speed(*what)
    return Task(BROADCAST, _stream(Level.WORLD, cluster), us, load=load, overlap_speed=overlap_speed)


def assemble(
    workload: Workload, regions: Sequence[Task], buckets: Sequence[BucketTasks], broadcast: Task | None
) -> list[Task]:
    """Put the regions and the buckets' tasks in the order in which they are issued."""
    tasks: list[Task] = []
    done_us, entered = 0.0, -1
    for launch in launch_order(tuple(len(bucket.stages) for bucket in buckets)):
        while entered < launch.region:
            entered += 1
            region = regions[entered]
            if broadcast is not None and done_us + region.duration_us + _ROUNDING_US >= workload.broadcast_ready_us:
                head, region = _cut(region, workload.broadcast_ready_us - done_us)
                tasks += [head, _after(broadcast, head)]
                done_us += head.duration_us
                broadcast = None
            tasks.append(region)
            done_us += region.duration_us
        tasks.extend(buckets[launch.bucket].stages[launch.stage])
    for region in regions[entered + 1 :]:  # nothing is launched in a world of one rank
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
    if shares and workload.commits:  # before the step may return early: what the forward pass changed stays
        tasks.append(buffers)
    if workload.updates_wait:
        arrived = tuple(name for bucket in buckets for name in bucket.update.after)
        tasks.append(Task("finish", Stream.COMPUTE, workload.finish_us, after=arrived))
        tasks.extend(bucket.update for bucket in buckets)
    if shares and not workload.commits:
        tasks.append(buffers)
    return tasks


def _cut(region: Task, first_us: float) -> tuple[Task, Task]:
    """Cut a region in two, the second under its name: others wait for its end."""
    first_us = max(0.0, min(first_us, region.duration_us))
    head = Task(f"{region.name}, down to the buffers", region.stream, first_us)
    return head, Task(region.name, region.stream, region.duration_us - first_us)


def _after(task: Task, before: Task) -> Task:
    return replace(task, after=(before.name,))


def bucket_tasks(k: int, bucket: Bucket, workload: Workload, costs: CostTable, cluster: Cluster) -> BucketTasks:
    """Price bucket k of a plan. The result depends on nothing else in the plan."""
    by_name = {gradient.name: gradient for gradient in workload.gradients}
    return price_bucket(k, [by_name[name] for name in bucket.names], bucket.strategy, workload, costs, cluster)


def price_bucket(
    k: int,
    gradients: Sequence[Gradient],
    strategy: Strategy,
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
) -> BucketTasks:
    """Make the tasks of a bucket of these gradients, numbered k."""
    update_us = sum(gradient.update_us for gradient in gradients)
    if cluster.world_size == 1:
        return BucketTasks((), (), Task(f"update {k}", Stream.COMPUTE, update_us))
    writer = _Writer(k, [gradient.shape for gradient in gradients], strategy, workload, costs, cluster)
    stages = tuple(writer.stage(number) for number in range(len(writer.stages) - 1))
    final = writer.final()
    return BucketTasks(stages, final, Task(f"update {k}", Stream.COMPUTE, update_us, after=(writer.previous,)))


class _Writer:
    """Writes one bucket's tasks from its first step to its last, and tracks the tensor's state between them."""

    def __init__(
        self,
        k: int,
        shapes: Sequence[Sequence[int]],
        strategy: Strategy,
        workload: Workload,
        costs: CostTable,
        cluster: Cluster,
    ) -> None:
        self.commits = workload.commits
        self.k, self.strategy, self.costs, self.cluster = k, strategy, costs, cluster
        self.bound = strategy.bound(shapes, cluster)
        self.velocity, self.accumulated = workload.keeps_velocity, False
        self.stages = strategy.stages
        self.segments = tuple(map(math.prod, shapes))
        self.proposal_bytes: int | None = None  # None but for what the ranks are agreeing on
        self.payload_bytes: int | None = None  # None while the tensor is dense
        self.on_pool = False
        """The host's pool holds the tensor now, launches its collectives and waits for them."""
        self.ranks = 1  # whose payloads lie here
        self.previous = f"region {k}"
        self.gathered = False

    def stage(self, number: int) -> tuple[Task, ...]:
        """Write the steps down to a collective, after the main thread's packing or waiting."""
        if number == 0:
            first = [self._task("pack", Stream.COMPUTE, self.costs.pack_us(self.dense_bytes))]
        elif self.on_pool:  # the pool waits
            first = []
        else:  # the main thread blocks until the previous wire is done
            is_agreement = any(isinstance(step, Propose) for step in self.stages[number - 1])
            kind = AGREE if is_agreement else self.strategy.collectives[number - 1].kind.value
            first = [self._task(f"wait for {kind}", Stream.COMPUTE, 0.0)]
        return (*first, *(task for step in self.stages[number] for task in self._step(step)))

    def final(self) -> tuple[Task, ...]:
        return tuple(task for step in self.stages[-1] for task in self._step(step))

    @property
    def compressor(self) -> Compressor:
        assert self.bound is not None, "a strategy decompresses what it compressed"
        return self.bound

    @property
    def elements(self) -> int:
        return sum(self.segments)

    @property
    def dense_bytes(self) -> int:
        return 4 * self.elements

    def _step(self, step: Step) -> list[Task]:
        if isinstance(step, Collective):
            return self._collective(step)
        if isinstance(step, Propose):
            return self._propose(step)
        return self._compress(step) if isinstance(step, Compress) else self._decompress(step)

    def _propose(self, step: Propose) -> list[Task]:
        us = self.costs.propose_us(self.compressor, self.elements, step.device)
        self.proposal_bytes = self.compressor.proposal_bytes(self.segments)
        before = [*self._to_host(step.device), *self._accumulate(step.device)]
        return [*before, self._task("propose", _device_stream(step.device), us)]

    def _compress(self, step: Compress) -> list[Task]:
        us = self.costs.encode_us(self.compressor, self.elements, step.device)
        self.payload_bytes = self.compressor.payload_bytes(self.segments)
        moved = [*self._to_host(step.device), *self._accumulate(step.device)]
        saved = self._saved_state()
        compress = self._task("compress", _device_stream(step.device), us, *[task.name for task in saved])
        return [*moved, *saved, compress, *self._saved_payload(step)]

    def _saved_state(self) -> list[Task]:
        if not self.commits or not self.compressor.has_state:
            return []
        us = self.costs.pack_us(self.compressor.state_bytes(self.segments))
        return [Task(f"save state {self.k}", Stream.COMPUTE, us)]  # as it is by now, whatever the bucket waits for

    def _saved_payload(self, step: Compress) -> list[Task]:
        """Save a payload that is summed in place: rolling a residual back needs it."""
        if not self.commits or not self.compressor.is_linear or not self.compressor.needs_error_feedback:
            return []
        us = self.costs.pack_us(self.compressor.payload_bytes(self.segments))
        return [self._task("save", _device_stream(step.device), us)]

    def _accumulate(self, device: Device) -> list[Task]:
        """Accumulate the velocity, once, before the ranks see anything of each other's buckets."""
        if self.accumulated or not self.velocity:
            return []
        self.accumulated = True
        saved: list[Task] = []
        if self.commits:
            saved = [self._task("save velocity", Stream.COMPUTE, self.costs.pack_us(self.dense_bytes))]
        us = self.costs.accumulate_us(self.dense_bytes)
        return [*saved, self._task("accumulate", _device_stream(device), us)]

    def _mask(self) -> list[Task]:
        """Mask the velocity, while the payload travels on without waiting."""
        compressor, device = self.strategy.compressor, self.strategy.device
        if not self.velocity or compressor is None or device is None or not compressor.sends_values:
            return []
        us, stream = self.costs.mask_us(self.dense_bytes), _device_stream(device)
        load = self.costs.pool_load if stream is Stream.CPU else 0.0
        return [Task(f"mask {self.k}", stream, us, (f"compress {self.k}",), load)]

    def _to_host(self, device: Device) -> list[Task]:
        """Copy the tensor if the compressor runs where it is not yet."""
        is_there, self.on_pool = self.on_pool, device is Device.CPU
        copy_us = 0.0 if is_there or device is Device.GPU else self.costs.copy_us(self.dense_bytes)
        return [self._task("d2h", Stream.D2H, copy_us)] if copy_us else []

    def _decompress(self, step: Decompress) -> list[Task]:
        compressor = self.compressor
        us = self.costs.decode_us(compressor, self.elements, self.ranks, step.device)
        if compressor.has_state and compressor.facts.state_from_payload:
            us += self.costs.keep_us(compressor.state_bytes(self.segments))
        self.payload_bytes, self.on_pool = None, False
        if step.device is Device.GPU:
            return [self._task("decompress", Stream.COMPUTE, us)]
        # The last one is asked of the pool when the main thread has nothing left to launch.
        is_last = step in self.stages[-1]
        task = self._task("decompress", Stream.CPU, us, *([END_OF_BACKWARD] if is_last else []))
        copy_us = self.costs.copy_us(self.dense_bytes)
        return [task, self._task("h2d", Stream.H2D, copy_us)] if copy_us else [task]

    def _collective(self, step: Collective) -> list[Task]:
        """Price a collective over the tensor as it is now, and note what it is then."""
        if self.proposal_bytes is not None:
            size, self.proposal_bytes = self.proposal_bytes, None
            return self._sent(AGREE, step, size)
        before: list[Task] = []
        alongside = self._mask() if self.payload_bytes is not None else []
        if self.payload_bytes is None and step.kind is CollectiveKind.ALL_REDUCE:
            before = self._accumulate(Device.GPU)
        if step.kind is CollectiveKind.REDUCE_SCATTER:
            before = [self._task("pad", Stream.COMPUTE, self.costs.pack_us(self.dense_bytes))]
            ranks = self.cluster.ranks_at(step.level)
            self.segments = tuple(-(-size // ranks) for size in self.segments)
            size = self.dense_bytes * ranks
        else:
            size = self.dense_bytes if self.payload_bytes is None else self.payload_bytes
        if self.payload_bytes is not None and step.kind is CollectiveKind.ALL_GATHER:
            self.ranks = self.cluster.ranks_at(step.level)
        # A strategy may gather twice: between hosts, then inside them.
        is_second = self.gathered and step.kind is CollectiveKind.ALL_GATHER
        self.gathered |= step.kind is CollectiveKind.ALL_GATHER
        return [*before, *self._sent(str(step) if is_second else step.kind.value, step, size), *alongside]

    def _sent(self, name: str, step: Collective, size: int) -> list[Task]:
        us = self.costs.collective_us(step.kind, step.level, size, self.cluster)
        launcher = Stream.CPU if self.on_pool else Stream.COMPUTE
        start = self._task(f"start {name}", launcher, self.costs.launch_us)
        load = self.costs.load_of(step.kind, step.level, size, self.cluster)
        beside = self.costs.overlap_speed(step.kind, step.level, size, self.cluster)
        sent = Task(f"{name} {self.k}", _stream(step.level, self.cluster), us, (self.previous,), load, beside)
        self.previous = sent.name
        return [start, sent]

    def _task(self, what: str, stream: Stream, duration_us: float, *also_after: str) -> Task:
        """Make a task after the bucket's previous one."""
        load = self.costs.pool_load if stream is Stream.CPU else 0.0
        task = Task(f"{what} {self.k}", stream, duration_us, (self.previous, *also_after), load)
        self.previous = task.name
        return task


def _device_stream(device: Device) -> Stream:
    return Stream.COMPUTE if device is Device.GPU else Stream.CPU


def _stream(level: Level, cluster: Cluster) -> Stream:
    """Return a collective's stream: a flat one is limited by the links between hosts, if there are several."""
    if level is Level.INTRA or (level is Level.WORLD and cluster.hosts == 1):
        return Stream.INTRA
    return Stream.INTER
