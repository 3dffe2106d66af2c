"""List the timelines of a report, with each task's bucket and the source of its duration."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from fxcomp.cluster.cluster import Level
from fxcomp.cost.table import collective_source
from fxcomp.cost.timeline import Task, Timeline
from fxcomp.plan.kinds import POOL, WIRES, CollectiveKind, Stream
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Collective, Device
from fxcomp.report.document import members
from fxcomp.report.explanation import Explanation, bucket_of, kind_of
from fxcomp.report.links import links_in_sources

LANES = {
    Stream.HOST: "host",
    Stream.COMPUTE: "compute",
    Stream.D2H: "to host",
    Stream.CPU: "cpu pool",
    Stream.CPU_ARRIVING: "arriving",
    Stream.INTRA: "in host",
    Stream.INTER: "between",
    Stream.H2D: "to device",
}
"""Names of streams in drawings, from top to bottom."""


@dataclass(frozen=True, slots=True)
class Track:
    """One step, predicted or measured."""

    name: str
    timeline: Timeline
    plan: Plan
    is_measured: bool = False


def tracks_of(explanation: Explanation) -> list[Track]:
    """Return the predicted steps, then the measured step of median length, if any."""
    found = predicted_tracks(explanation)
    measured = explanation.measured
    if measured:
        middle = statistics.median_low(timeline.step_time_us for timeline in measured.values())
        step = next(step for step, timeline in measured.items() if timeline.step_time_us == middle)
        found.append(measured_track(explanation, step))
    return found


def predicted_tracks(explanation: Explanation) -> list[Track]:
    """Return the predicted steps of the dense plan, if plans were compared, and of this plan."""
    dense, choice = explanation.dense_timeline, explanation.choice
    above = [] if dense is None or choice is None else [Track("dense", dense, choice.dense)]
    name = "chosen" if explanation.is_chosen else "this plan"
    return [*above, Track(name, explanation.timeline, explanation.plan)]


def measured_track(explanation: Explanation, step: int) -> Track:
    return Track(f"measured, step {step}", explanation.measured[step], explanation.plan, is_measured=True)


class Grounds(Enum):
    MEASURED = "measured"
    FORMULA = "formula"
    """Computed from the links' latency and bandwidth."""
    ESTIMATED = "estimated"
    ASSUMED = "assumed"
    NONE = ""
    """The task takes no time."""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """A task's bucket, and the source of its time."""

    bucket: int | None
    """Index of the task's bucket; None for compute that serves several buckets."""
    of: str
    """Strategy and tensors of the bucket, as text."""
    grounds: Grounds
    source: str


def facts_of(explanation: Explanation, track: Track) -> Mapping[str, TaskFacts]:
    by_link = dict(links_in_sources(track.plan, explanation.cluster, explanation.costs))
    buckets, found = track.plan.buckets, dict[str, TaskFacts]()
    seen = Counter[tuple[int | None, CollectiveKind | None]]()
    for task in (span.task for span in track.timeline.spans):
        number = None if kind_of(task.name) == "compute" else bucket_of(task.name)
        bucket = buckets[number] if number is not None and number < len(buckets) else None
        of = f"{explanation.short(bucket.strategy)}: {members(track.plan.labels(bucket))}" if bucket is not None else ""
        if track.is_measured:
            found[task.name] = TaskFacts(number, of, Grounds.MEASURED, "between two looks at the clock")
        elif not task.duration_us:
            found[task.name] = TaskFacts(number, of, Grounds.NONE, "")
        elif task.stream in WIRES:
            kind = next((kind for kind in CollectiveKind if task.name.startswith(kind.value)), None)
            step = _step_of(bucket, kind, seen[number, kind])
            seen[number, kind] += 1
            source = collective_source(explanation.costs, step.kind, step.level, explanation.cluster)
            source = source if bucket is None or kind is None else by_link.get(str(step), source)
            found[task.name] = TaskFacts(number, of, _grounds(source), source)
        else:
            source = _source(task, bucket, explanation)
            found[task.name] = TaskFacts(number, of, _grounds(source), source)
    return found


def _step_of(bucket: Bucket | None, kind: CollectiveKind | None, place: int) -> Collective:
    """Return the collective at index `place` among a strategy's collectives of one kind."""
    alike = [each for each in bucket.strategy.collectives if each.kind is kind] if bucket is not None else []
    if alike:
        return alike[min(place, len(alike) - 1)]
    return Collective(kind or CollectiveKind.ALL_REDUCE, Level.WORLD)


def _source(task: Task, bucket: Bucket | None, explanation: Explanation) -> str:
    """Return the source of the duration of a task that is no collective."""
    costs, kind = explanation.costs, kind_of(task.name)
    if task.stream in (Stream.D2H, Stream.H2D):
        return f"{costs.source}, copied at {costs.copy_gb_per_s or 0.0:.4g} GB/s"
    if task.name.startswith("start "):
        return f"{costs.source}, {costs.launch_us:.3g} us to start a collective"
    if kind == "compute" and task.stream not in POOL:
        return explanation.compute_source
    if kind == "compression" and bucket is not None and bucket.strategy.compressor is not None:
        device = Device.CPU if task.stream in POOL else Device.GPU
        sources = {costs.compressor_source(each, device): str(each) for each in bucket.strategy.compressors}
        if len(sources) == 1:
            return next(iter(sources))
        return "; ".join(f"{source} ({name})" for source, name in sources.items())
    return f"{costs.source}, {costs.pack_gb_per_s:.4g} GB/s to fill memory"


def _grounds(source: str) -> Grounds:
    if "estimate" in source:  # from a data sheet and assumptions
        return Grounds.ESTIMATED
    if "assumed" in source:
        return Grounds.ASSUMED
    is_measured = "measured" in source and not source.startswith("the cluster's link")
    return Grounds.MEASURED if is_measured else Grounds.FORMULA
