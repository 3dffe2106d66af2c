"""Lay out what a rank keeps from step to step, by plan and cluster: a slot for each time that a strategy compresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.legs import Encode
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Compress, Device, Propose
from fxcomp.runtime.arena import Key, SlotLayout
from fxcomp.runtime.compressor_states import StateLayout
from fxcomp.runtime.parts import Part, parts_in


def residual_layout(
    plan: Plan, cluster: Cluster, rank: int, feedback: ErrorFeedback = CLASSIC
) -> dict[Key, SlotLayout]:
    """Lay out residuals, for each slot that is fed back: the rest needs none."""
    found: dict[Key, SlotLayout] = {}
    for number, bucket, parts in _buckets(plan):
        route = route_of(bucket.strategy, [(size,) for size in bucket.sizes], cluster, rank)
        fed_back = [leg for leg in route.slots if feedback.surrounds(leg.compressor)]
        for leg in fed_back:
            found[number, leg.slot] = SlotLayout(
                parts,
                leg.pieces,
                leg.slot,
                leg.place,
                *leg.unit,
                takes_over=leg is fed_back[0],
                on_host=leg.device is Device.CPU,
            )
    return found


def velocity_layout(plan: Plan, cluster: Cluster, rank: int) -> dict[Key, SlotLayout]:
    """Lay out velocities: every bucket has one, where the splits that it begins with end."""
    found: dict[Key, SlotLayout] = {}
    for number, bucket, parts in _buckets(plan):
        strategy = bucket.strategy
        route = route_of(strategy, [(size,) for size in bucket.sizes], cluster, rank)
        held, following = strategy.held[strategy.leading_splits], strategy.steps[strategy.leading_splits]
        place = cluster.place_along(Level.WORLD.axes - held.summed, rank)
        on_host = isinstance(following, Propose | Compress) and following.device is Device.CPU
        found[number, 0] = SlotLayout(parts, (route.first,), 0, place, *route.first_unit, on_host=on_host)
    return found


def state_layout(
    plan: Plan, shapes: Mapping[str, Sequence[int]], cluster: Cluster, rank: int
) -> dict[Key, StateLayout]:
    """Lay out what compressors remember, for each slot whose compressor remembers something."""
    layout: dict[Key, StateLayout] = {}
    for number, bucket, parts in _buckets(plan):
        if not any(compressor.has_state for compressor in bucket.strategy.compressors):
            continue
        for leg in route_of(bucket.strategy, bucket.shapes(shapes), cluster, rank).slots:
            if leg.compressor.has_state:
                kept = parts_in(parts, leg.pieces)
                makers = _makers(leg, kept)
                layout[number, leg.slot] = StateLayout(
                    leg.compressor, tuple(zip(kept, makers, strict=True)), leg.place, leg.slot, leg.device is Device.CPU
                )
    return layout


def _makers(leg: Encode, parts: Sequence[Part]) -> list[Compressor]:
    """Bind the compressor of a slot to each part: it knows the parameters here that are not empty, by their order."""
    numbers = sorted({part.index for part in parts})
    return [leg.compressor.of_segment(numbers.index(part.index)) for part in parts]


def _buckets(plan: Plan) -> Iterator[tuple[int, Bucket, tuple[Part, ...]]]:
    """Number the buckets, each with the parts of parameters that it holds."""
    whole = plan.sizes
    for number, bucket in enumerate(plan.buckets):
        held = zip(bucket.names, bucket.starts, bucket.sizes, strict=True)
        parts = tuple(Part(name, start, size, whole[name], index) for index, (name, start, size) in enumerate(held))
        yield number, bucket, parts
