"""Grow a plan bucket by bucket, as a longest path over streams, and compare what has grown.

A turn deals one bucket: its region and its first stage, then the second stage of the bucket before, the third of the
one before that. So says `launch_order`. When all is dealt, turns go on until no stage is left; then the rest of
backward runs, and bucket by bucket what follows the last collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.least_work import COMPUTE, STREAMS
from fxcomp.search.workload import Gradient, Workload
from helpers.optimum.blocks import POOLS, Blocks, Stage, stage_within


@dataclass(frozen=True, eq=False)
class Option:
    """A bucket: what is in it, how it travels, and what that costs."""

    blocks: Blocks
    strategy: Strategy
    members: tuple[tuple[Gradient, range], ...]
    lost: float
    """The squared error, in elements."""
    bursting: int
    """The elements that come in bursts."""
    updates_wait: bool
    """The update comes after all buckets have arrived, and not after its own."""

    @property
    def tail_us(self) -> float:
        """The compute after the last collective, with the update if that does not wait."""
        final_us = sum(us for stream, us in self.blocks.final if stream == COMPUTE)
        return final_us if self.updates_wait else final_us + self.blocks.update_us

    @property
    def ends_in_compute(self) -> bool:
        return all(stream == COMPUTE for stream, _ in self.blocks.final)


class Flying(NamedTuple):
    """A bucket on its way."""

    arrived_us: float
    """The end of its last block so far."""
    option: Option
    tail_us: float
    done: int
    """Stages."""

    @property
    def left(self) -> Sequence[Stage]:
        return self.option.blocks.stages[self.done :]


class Label:
    """A partial plan: the streams' clocks after its turns, and what is still to come of its buckets."""

    __slots__ = (
        "bound_us",
        "bursting",
        "clocks",
        "ends_us",
        "flying",
        "lost",
        "option",
        "parent",
        "tails_us",
        "waiting_us",
    )

    def __init__(self) -> None:
        self.clocks: Sequence[float] = (0.0,) * len(STREAMS)
        self.flying: Sequence[Flying] = ()
        """The youngest first. Those that are older have arrived, and are counted in two sums."""
        self.tails_us = 0.0
        """Their tails: compute's work after backward."""
        self.ends_us = 0.0
        """The end of their tails if backward took no time: what arrives late has its tail late."""
        self.waiting_us = 0.0
        """The updates that wait for all buckets."""
        self.lost, self.bursting = 0.0, 0
        self.bound_us = 0.0
        self.parent: Label | None = None
        self.option: Option | None = None

    def grown(self, region_us: float, option: Option) -> Label:
        """Deal one more bucket, whose last gradient is ready so long after that of the one before."""
        clocks = list(self.clocks)
        clocks[COMPUTE] += region_us
        dealt = Flying(clocks[COMPUTE], option, option.tail_us, 0)
        flying = [_run(each, clocks) if each.left else each for each in (dealt, *self.flying)]
        grown = Label()
        grown.clocks, grown.flying = clocks, flying
        grown.tails_us, grown.ends_us = self.tails_us, self.ends_us
        while flying and not flying[-1].left and flying[-1].option.ends_in_compute:
            grown.tails_us, grown.ends_us = _count(flying.pop(), grown.tails_us, grown.ends_us)
        grown.waiting_us = self.waiting_us + (option.blocks.update_us if option.updates_wait else 0.0)
        grown.lost, grown.bursting = self.lost + option.lost, self.bursting + option.bursting
        grown.parent, grown.option = self, option
        return grown

    def options(self) -> list[Option]:
        """List the buckets in order."""
        found: list[Option] = []
        label: Label | None = self
        while label is not None:
            if label.option is not None:
                found.append(label.option)
            label = label.parent
        return found[::-1]

    def end_us(self, workload: Workload) -> float:
        """Finish the step of a plan that is complete."""
        clocks, flying = list(self.clocks), list(self.flying)
        while any(each.left for each in flying):
            flying = [_run(each, clocks) if each.left else each for each in flying]
        backward_us = clocks[COMPUTE] + workload.backward_us - workload.gradients[-1].ready_us
        clocks[COMPUTE] = max(backward_us + self.tails_us, self.ends_us)
        for each in reversed(flying):
            clock = each.arrived_us
            for stream, us in each.option.blocks.final:
                clocks[stream] = clock = max(clock, clocks[stream], backward_us) + us
            update_us = 0.0 if each.option.updates_wait else each.option.blocks.update_us
            clocks[COMPUTE] = max(clock, clocks[COMPUTE]) + update_us
        return clocks[COMPUTE] + self.waiting_us + workload.finish_us

    def dominates(self, other: Label, *, limits: bool) -> bool:
        """Return whether whatever may follow `other` may follow this one, and ends no later.

        No clock is later here. Each bucket on its way is no later and fits into the one of the same age there, whatever
        it has still to do. A bucket that only `other` has on its way arrives there at this time at the earliest, and
        is counted as if it did.
        """
        if limits and (self.lost > other.lost or self.bursting > other.bursting):
            return False
        if len(self.flying) > len(other.flying) or self.waiting_us > other.waiting_us:
            return False
        if any(mine > theirs for mine, theirs in zip(self.clocks, other.clocks, strict=True)):
            return False
        tails_us, ends_us = other.tails_us, other.ends_us
        for each in reversed(other.flying[len(self.flying) :]):
            tails_us, ends_us = _count(each, tails_us, ends_us)
        if self.tails_us > tails_us or self.ends_us > ends_us:
            return False
        return all(_is_ahead(mine, theirs) for mine, theirs in zip(self.flying, other.flying, strict=False))


def plan_of(options: Sequence[Option]) -> Plan:
    """Write buckets, in the order in which they leave, as a plan."""
    buckets: list[Bucket] = []
    for option in options:
        names = tuple(gradient.name for gradient, _ in option.members)
        extents = [extent for _, extent in option.members]
        sizes, starts = tuple(map(len, extents)), tuple(extent.start for extent in extents)
        buckets.append(Bucket(names, sizes, option.strategy, starts, option.members[0][0].element_type))
    return Plan(tuple(buckets))


def _run(bucket: Flying, clocks: list[float]) -> Flying:
    """Run a bucket's next stage."""
    stage = bucket.left[0]
    clock = bucket.arrived_us
    if stage and stage[0][0] in POOLS:  # which begins when the main thread has come so far
        clock = max(clock, clocks[COMPUTE])
    for stream, us in stage:
        begun = clocks[stream]
        clock = (clock if clock > begun else begun) + us
        clocks[stream] = clock
    return Flying(clock, bucket.option, bucket.tail_us, bucket.done + 1)


def _count(bucket: Flying, tails_us: float, ends_us: float) -> tuple[float, float]:
    """Add a bucket's tail to those of older ones."""
    return tails_us + bucket.tail_us, max(ends_us, bucket.arrived_us) + bucket.tail_us


def _is_ahead(one: Flying, other: Flying) -> bool:
    if one.arrived_us > other.arrived_us:
        return False
    if one.option is other.option:
        return True
    left, theirs = one.left, other.left
    mine, blocks = one.option.blocks, other.option.blocks
    return (
        len(left) <= len(theirs)
        and mine.update_us <= blocks.update_us
        and stage_within(mine.final, blocks.final)
        and all(map(stage_within, left, theirs))
    )
