"""State of gradients on one rank for a plan and a cluster: residuals of compression, and states of compressors."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.legs import Encode, row_shards
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Device
from fxcomp.runtime.arena import Arena, Key, Part, SlotLayout, parts_in
from fxcomp.runtime.compressor_states import CompressorStates, StateLayout
from fxcomp.site import Site
from fxcomp.state.handover import Holding, Sharing, hand_over


def residual_layout(
    plan: Plan,
    cluster: Cluster,
    rank: int,
    feedback: ErrorFeedback = CLASSIC,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[Key, SlotLayout]:
    """Return the layout of the residual of each slot (compression of a bucket) with error feedback.

    `shapes` are needed only for buckets that end as shards, which are cut by rows.
    """
    found: dict[Key, SlotLayout] = {}
    for number, bucket, whole in _buckets(plan):
        parts = whole
        if bucket.strategy.ends_as_shards:
            assert shapes is not None, "rows are cut by shapes"
            parts = _by_rows(bucket, bucket.shapes(shapes), cluster.world_size)
        route = route_of(bucket.strategy, [(part.length,) for part in parts], cluster, rank)
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


def state_layout(
    plan: Plan, shapes: Mapping[str, Sequence[int]], cluster: Cluster, rank: int
) -> dict[Key, StateLayout]:
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
    """Return, for each part, the slot's compressor with settings for the part's parameter."""
    numbers = sorted({part.index for part in parts})
    return [leg.compressor.of_segment(numbers.index(part.index)) for part in parts]


def _by_rows(bucket: Bucket, shapes: Sequence[Sequence[int]], ranks: int) -> tuple[Part, ...]:
    """Return all ranks' parts of a bucket cut by rows. Parts may extend beyond a parameter's end."""
    return tuple(
        Part(bucket.names[index], extent.start, len(extent), bucket.sizes[index], index)
        for index, extent in row_shards(shapes, ranks)
    )


def _buckets(plan: Plan) -> Iterator[tuple[int, Bucket, tuple[Part, ...]]]:
    whole = plan.sizes
    for number, bucket in enumerate(plan.buckets):
        held = zip(bucket.names, bucket.starts, bucket.sizes, strict=True)
        parts = tuple(Part(name, start, size, whole[name], index) for index, (name, start, size) in enumerate(held))
        yield number, bucket, parts


def share_memories(kept: CompressorStates, reset: Collection[str], sharing: Sharing) -> set[str]:
    """Fill shared compressor states that this rank lacks from a rank that has them. Every rank calls it.

    Ranks that compress equal values must draw equal random bits, or their payloads would differ, so they share states
    with equal labels. Returns the labels of states that all ranks lack.
    """
    shared = kept.shared()
    lacking = [label for label in shared if label in reset]
    wanted = set(itertools.chain(*sharing.gather("lacking compressor states", lacking)))
    if not wanted:
        return set()

    def giving() -> dict[str, Any]:
        return {label: value.tolist() for label, value in shared.items() if label in wanted and label not in reset}  # pyright: ignore[reportUnknownMemberType]

    givers = sharing.gather("joining", sharing.attempt("handing on compressor states", giving))

    def taking() -> set[str]:
        missing: set[str] = set()
        for label in lacking:
            given = next((giver[label] for giver in givers if label in giver), None)
            if given is None:
                missing.add(label)
            else:
                shared[label].copy_(torch.tensor(given, dtype=shared[label].dtype))
        return missing

    return sharing.attempt("taking over compressor states", taking)


Shapes = Mapping[str, Sequence[int]]


@dataclass(slots=True)
class GradientState:
    """Gradient state that a rank keeps between steps, laid out for one plan."""

    residuals: Arena
    compressor_states: CompressorStates
    owed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Flat residuals without a slot in this plan, by parameter. The next step adds them to the gradients."""
    rates: dict[int, float] = field(default_factory=dict[int, float])
    """Learning rate to which residuals are scaled, by parameter group."""

    @classmethod
    def fresh(cls, plan: Plan, shapes: Shapes, site: Site, feedback: ErrorFeedback, seed: int = 0) -> GradientState:
        """Return an empty state. Random streams derive from `seed`, which all ranks share."""
        return cls(
            Arena(residual_layout(plan, site.cluster, site.rank, feedback, shapes), site.device),
            CompressorStates(state_layout(plan, shapes, site.cluster, site.rank), site.device, seed),
        )

    @property
    def keeps_something(self) -> bool:
        return bool(self.residuals.layout) or not self.compressor_states.is_empty

    def compressor_states_for(self, plan: Plan, shapes: Shapes, site: Site, seed: int) -> CompressorStates:
        """Return compressor states for a plan with other compressor settings, without communication."""
        states = CompressorStates(state_layout(plan, shapes, site.cluster, site.rank), site.device, seed)
        if states.is_empty:
            return self.compressor_states
        states.take_over(self.compressor_states)
        return states

    def carry_to(self, fresh: GradientState, sizes: Mapping[str, int], sharing: Sharing) -> None:
        """Move all residuals and compressor states to another plan's fresh state. Every rank calls it.

        `sizes` has each parameter with a gradient, in the same order on all ranks.
        """
        residuals = Holding.of(sharing.peers.world_size, self.residuals.slices, self.owed)
        fresh.owed = hand_over(residuals, fresh.residuals, sizes, sharing)
        if fresh.compressor_states.is_empty:  # kept for a compressed plan that may follow a dense one
            fresh.compressor_states = self.compressor_states
        else:
            before, now = self.compressor_states, fresh.compressor_states
            reset = sharing.attempt("going on with compressor states", lambda: now.take_over(before))
            share_memories(now, reset, sharing)
        fresh.rates = dict(self.rates)

    def owed_here(self, sizes: Mapping[str, int], ranks: int) -> dict[str, Tensor]:
        """Return flat tensors, by parameter, that replace the residuals if this state is dropped.

        The rank adds these tensors to its next gradients. Residuals are multiplied by `ranks`, because a rank's
        gradient has the weight 1/ranks in the mean.
        """
        owed = {name: value.clone() for name, value in self.owed.items()}
        for name in self.residuals.covered:
            whole = owed.setdefault(name, torch.zeros(sizes[name], device=self.residuals.device))
            for piece in self.residuals.slices.get(name, ()):
                piece.add_to(whole, times=ranks)
        return owed

    def also_owe(self, others: Mapping[str, Tensor]) -> None:
        for name, value in others.items():
            known = self.owed.get(name)
            self.owed[name] = value if known is None else known + value

    def settle(self) -> None:
        """Clear `owed` after a step that has added it to its gradients."""
        self.owed.clear()

    def multiply(self, factor: float | Tensor) -> None:
        """Rescale residuals after the loss scale changed."""
        kept = [piece.values for pieces in self.residuals.slices.values() for piece in pieces]
        for value in (*kept, *self.owed.values()):
            value.mul_(factor.to(value.device) if isinstance(factor, Tensor) else factor)

    def change_unit(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply some parameters' residuals by flat factors, one per element."""
        for name, factor in factors.items():
            for piece in self.residuals.slices.get(name, ()):
                piece.values.mul_(factor[piece.start : piece.extent.stop].to(piece.values.device))
            if name in self.owed:
                self.owed[name].mul_(factor)

    def scale_to_rates(self, rates: Mapping[int, float], names: Mapping[int, Sequence[str]]) -> None:
        """Rescale residuals by lr_old / lr_new, unless lr_new is 0. `names` has each group's parameters."""
        for group, rate in rates.items():
            if rate <= 0:
                continue
            before = self.rates.get(group, rate)
            self.rates[group] = rate
            if before == rate:
                continue
            for name in names.get(group, ()):
                for piece in self.residuals.slices.get(name, ()):
                    piece.values.mul_(before / rate)
                if name in self.owed:
                    self.owed[name].mul_(before / rate)
