"""Report on the plan of a fully_shard model, by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.cluster.cluster import Cluster
from fxcomp.plan.plan import Plan
from fxcomp.report.document import Section, Table, count
from fxcomp.search.by_module import ModuleTime


@dataclass(frozen=True, slots=True)
class ScatterFacts:
    plan: Plan
    modules: Sequence[str]
    """Module name of each bucket."""
    times: Sequence[ModuleTime]
    """Predicted times of each bucket's module; empty if the user gave the plan."""
    step_us: float
    dense_us: float
    cluster: Cluster
    mode: str
    kept_bytes: int
    """Bytes of residuals on each rank."""
    notes: Sequence[str]
    measured_ms: float | None


_COLUMNS = ("module", "elements", "ready ms", "dense ms", "own ms", "travels")


def headline(facts: ScatterFacts) -> str:
    cluster = facts.cluster
    return f"gradients of fully_shard, {cluster.world_size} ranks on {count(cluster.hosts, 'host')}"


def sections(facts: ScatterFacts) -> list[Section]:
    said = [_verdict(facts), *([] if facts.measured_ms is None else [f"Measured: {facts.measured_ms:.4g} ms a pass."])]
    said.append(
        f"Error feedback keeps {facts.kept_bytes / 1e6:.4g} MB on each rank: fp32 for each element of whole gradients."
        if facts.kept_bytes
        else "Nothing is fed back, so nothing is kept."
    )
    rows = [_row(facts, number) for number in range(len(facts.plan.buckets))]
    found = [
        Section("Step", said),
        Section("Modules, in the order in which they are ready", [Table(_COLUMNS, rows, text=("module", "travels"))]),
    ]
    if facts.times:
        found.append(Section("", ["'own' is the time of a module alone: packing, compressing, the collective, and"
                                  " decompressing; 'dense' is the same without compression."]))  # fmt: skip
    return [*found, *([Section("Notes", list(facts.notes))] if facts.notes else [])]


def _verdict(facts: ScatterFacts) -> str:
    if not facts.times:
        return "The plan was given; nothing was predicted."
    compressed = sum(not bucket.strategy.is_dense for bucket in facts.plan.buckets)
    return (
        f"Mode {facts.mode}: {compressed} of {len(facts.plan.buckets)} modules are compressed. Predicted:"
        f" {facts.step_us / 1e3:.4g} ms, and {facts.dense_us / 1e3:.4g} ms dense."
    )


def _row(facts: ScatterFacts, number: int) -> list[str]:
    bucket, times = facts.plan.buckets[number], facts.times[number] if facts.times else None
    us = ("", "", "") if times is None else (times.ready_us, times.dense_us, times.own_us)
    by = bucket.strategy.compressor
    numbers = [each if isinstance(each, str) else f"{each / 1e3:.4g}" for each in us]
    return [facts.modules[number], f"{bucket.elements:,}", *numbers, "dense" if by is None else str(by)]
