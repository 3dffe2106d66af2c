"""Fit a plan to DDP's buffers, so that the plan's buckets are contiguous there and need no copy.

    DDP's buffer   2.bias  2.weight  0.bias  0.weight
    chosen         0.weight 2.weight: dense       0.bias 2.bias: dense
    fitted         2.bias 2.weight 0.bias 0.weight: dense

Gradients take the order of the buffer. A vector joins an adjacent matrix with the same strategy, which may save a
message. A bucket that spans two buffers is split if each part has LEAST_BYTES. Values do not change, because
compressors work per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fxcomp.frontends.hook_program import Layout
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.search.decision import Decision
from fxcomp.search.runners import Runner

LEAST_BYTES = 256 << 10
"""Minimum size of a split bucket's parts: copying this much takes about as long as one more message (assumed)."""


@dataclass(frozen=True, slots=True)
class _PlanPart:
    """Elements of a parameter, and their position in DDP's buffers."""

    ddp_bucket: int
    place: int
    name: str
    start: int
    size: int
    is_vector: bool
    owner: int
    """Bucket index in the plan."""


def fitted(decision: Decision, layout: Layout) -> Decision:
    plan, choice = fit(decision.plan, layout), decision.choice
    if choice is None:
        return replace(decision, plan=plan)
    runners: dict[Plan, Runner] = {}
    for each in choice.runners:
        runner = replace(each, plan=fit(each.plan, layout))
        runners.setdefault(runner.plan, runner)
    choice = replace(
        choice,
        plan=plan,
        dense=fit(choice.dense, layout),
        fastest=fit(choice.fastest, layout),
        alternatives=choice.alternatives if plan == choice.plan else ((),) * len(plan.buckets),
        runners=tuple(runners.values()),
    )
    return replace(decision, plan=plan, choice=choice)


def fit(plan: Plan, layout: Layout) -> Plan:
    """Reorder a plan's buckets like DDP's buffers, and move vectors to the buckets of adjacent matrices."""
    parts = sorted(_parts(plan, layout), key=lambda part: (part.ddp_bucket, part.place))
    owned: dict[int, list[_PlanPart]] = {}
    for number, part in enumerate(parts):
        owned.setdefault(_owner(plan, parts, number), []).append(part)
    found = [
        (max(part.ddp_bucket for part in together), owner, _bucket(plan.buckets[owner], together))
        for owner, mine in owned.items()
        for together in _split(plan.buckets[owner], mine)
    ]
    found.sort(key=lambda each: each[:2])
    return Plan(tuple(bucket for *_, bucket in found))


def _split(bucket: Bucket, parts: Sequence[_PlanPart]) -> list[list[_PlanPart]]:
    found = [list(group) for _, group in groupby(parts, lambda part: part.ddp_bucket)]
    least = min(sum(part.size for part in group) for group in found) * bucket.element_type.itemsize
    return found if least >= LEAST_BYTES else [list(parts)]


def _parts(plan: Plan, layout: Layout) -> Iterator[_PlanPart]:
    places = {name: (k, start) for k, bucket in enumerate(layout) for name, start in bucket.starts.items()}
    vectors = {
        name for bucket in layout for name, shape in zip(bucket.names, bucket.shapes, strict=True) if len(shape) <= 1
    }
    for owner, bucket in enumerate(plan.buckets):
        for name, start, size in zip(bucket.names, bucket.starts, bucket.sizes, strict=True):
            ddp_bucket, first = places[name]
            yield _PlanPart(ddp_bucket, first + start, name, start, size, name in vectors, owner)


def _owner(plan: Plan, parts: Sequence[_PlanPart], number: int) -> int:
    """Return the index of a part's bucket: for a vector, possibly the bucket of an adjacent matrix."""
    part = parts[number]
    if not part.is_vector:
        return part.owner
    mine = plan.buckets[part.owner]
    for others in (reversed(parts[:number]), parts[number + 1 :]):
        beside = next((other for other in others if not other.is_vector or other.ddp_bucket != part.ddp_bucket), None)
        if beside is not None and beside.ddp_bucket == part.ddp_bucket:
            theirs = plan.buckets[beside.owner]
            if (theirs.strategy, theirs.element_type) == (mine.strategy, mine.element_type):
                return beside.owner
    return part.owner


def _bucket(bucket: Bucket, parts: Sequence[_PlanPart]) -> Bucket:
    names, sizes, starts = zip(*((part.name, part.size, part.start) for part in parts), strict=True)
    return replace(bucket, names=names, sizes=sizes, starts=starts)
