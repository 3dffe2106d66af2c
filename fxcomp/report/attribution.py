"""Attribute a predicted step's time to kinds of work and to buckets, by the names of the timeline's tasks."""

from __future__ import annotations

import re

from fxcomp.cost.timeline import Timeline, critical_path, exposed_by_task
from fxcomp.plan.streams import Stream

_NAMES = {
    # The graph says corrected, proposal and mean for what the search calls accumulate, propose and decompress.
    "compute": ("region", "arrive", "backward", "update", "finish", "accumulate", "corrected"),
    "compression": ("mask", "propose", "proposal", "compress", "next", "decompress", "mean"),
    "exchanges": ("exchange",),  # the loss function's own collectives
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}


def kind_of(task: str) -> str:
    """The kind of work of a task on the compute stream; packing includes starting collectives."""
    return _KINDS.get(re.split(r"[ _]", task)[0], "packing")


def bucket_of(task: str) -> int | None:
    """`all_reduce 3`, `start all_gather_3_intra` and `d2h_3` belong to bucket 3."""
    match = re.search(r"(?<![A-Za-z\d])\d+", task)
    return int(match[0]) if match else None


def parts_us(timeline: Timeline) -> dict[str, float]:
    """Split the step into compute, packing, compression, the loss function's exchanges, contention with the network's
    software, and exposed communication."""
    parts: dict[str, float] = {"compute": 0.0, "packing": 0.0, "compression": 0.0}
    for span in timeline.spans:
        if span.task.stream is Stream.COMPUTE:
            kind = kind_of(span.task.name)
            parts[kind] = parts.get(kind, 0.0) + span.task.duration_us
    return {**parts, "contention": timeline.slowed_us(Stream.COMPUTE), "exposed": timeline.exposed_us}


def exposed_by_bucket(timeline: Timeline) -> dict[int | None, float]:
    """Split the exposed time, in µs, by the bucket that compute waits for. None is the broadcast of buffers."""
    waits: dict[int | None, float] = {}
    for name, us in exposed_by_task(timeline).items():
        bucket = bucket_of(name)
        waits[bucket] = waits.get(bucket, 0.0) + us
    return waits


def critical_shares(timeline: Timeline) -> list[tuple[str, float]]:
    """The critical path as names and µs; consecutive compute of one kind is one entry."""
    shares: list[tuple[str, float]] = []
    for span in critical_path(timeline):
        name = kind_of(span.task.name) if span.task.stream is Stream.COMPUTE else span.task.name
        us = span.end_us - span.start_us
        if shares and shares[-1][0] == name:
            shares[-1] = (name, shares[-1][1] + us)
        elif us:
            shares.append((name, us))
    return shares
