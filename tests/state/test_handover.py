"""Whatever lies where and however many ranks there are: what was applied and what is owed are all gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from books import CLUSTERS, CPU, EVERYWHERE, SIZES, Books, Job, dealt, some_plan
from torch import Tensor
from virtual_ranks import VirtualRank, run_virtual

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.arena import BucketLayout, Residuals, Slice, Velocities
from fxcomp.state.handover import Holding, hand_over
from fxcomp.state.layouts import velocity_layout

NOTHING_OWED = {name: torch.zeros(size) for name, size in SIZES.items()}
ROUNDING = 3e-6
"""Of sums of some ten gradients of size one, in fp32."""


def play(seed: int) -> tuple[float, list[str]]:
    """The worst the books were off in a random history, and what happened in it."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cluster = draw.choice(EVERYWHERE)
    job, books, events, worst = Job(cluster, some_plan(draw, cluster)), Books.empty(), list[str](), 0.0
    for _ in range(12):
        event = draw.choice(["step", "step", "step", "load", "roll back", "replan", "give up", "ranks"])
        if event == "step":
            books.train(job, generator)
        elif event == "roll back":
            states = job.saved()
            if draw.random() < 0.5:
                job.follow(some_plan(draw, job.cluster))
            copy.deepcopy(books).train(job, generator)
            job.load(dealt(draw, states, job.cluster.world_size))
        elif event == "replan":
            job.follow(some_plan(draw, job.cluster))
        elif event == "give up":
            dense = [Strategy.flat(None), Strategy.hierarchical(None)][: 1 + job.cluster.has_levels]
            job.follow(job.plan.with_strategies([draw.choice(dense) for _ in job.plan.buckets]))
        else:
            states = job.saved()
            cluster = job.cluster if event == "load" else draw.choice(EVERYWHERE)
            plan = job.plan if event == "load" and draw.random() < 0.3 else some_plan(draw, cluster)
            job = Job(cluster, plan)
            job.load(dealt(draw, states, cluster.world_size))
        events.append(f"{event} {job.cluster.shape} [{'; '.join(str(b.strategy) for b in job.plan.buckets)}]")
        worst = max(worst, books.off_by(job.owed()))
        if worst > ROUNDING:
            return worst, events
    job.follow(job.plan.with_strategies([Strategy.flat(None) for _ in job.plan.buckets]))
    books.train(job, generator, size=0.0)
    return max(worst, books.off_by(NOTHING_OWED)), [*events, "all that was owed arrives"]


@pytest.mark.filterwarnings("ignore:fxcomp. what compressors remember")
def test_over_any_history_what_was_applied_and_what_is_owed_are_all_gradients():
    for seed in range(50):
        worst, events = play(seed)
        assert worst <= ROUNDING, f"seed {seed}: off by {worst:.3g} after\n" + "\n".join(events)


# What lies as it did

A = {0: BucketLayout(("a", "b"), (3, 4)), 1: BucketLayout(("c",), (5,))}
B = {0: BucketLayout(("c", "a"), (5, 3), divisor=3), 1: BucketLayout(("b",), (4,))}
SMALL = {"a": 3, "b": 4, "c": 5}


def sharded(shard: int, divisor: int = 1) -> dict[int, BucketLayout]:
    return {0: BucketLayout(("c", "a", "b"), (5, 3, 4), shards=5, shard=shard, divisor=divisor)}


def filled(arena: Residuals | Velocities, rank: int) -> Any:
    arena.arena.normal_(generator=torch.Generator().manual_seed(rank))
    return arena


def moved(layouts: Sequence[tuple[Any, Any]]) -> list[tuple[Residuals, Residuals]]:
    """On each rank, residuals of one layout handed over to another."""

    def work(peer: VirtualRank) -> tuple[Residuals, Residuals]:
        before, after = (Residuals(layout, CPU) for layout in layouts[peer.rank])
        filled(before, peer.rank)
        assert hand_over(Holding.of(len(layouts), before.slices), after.slices, SMALL, peer.exchange()) == {}
        return before, after

    return run_virtual(len(layouts), work)


def test_under_the_same_layout_residuals_stay_bit_for_bit():
    thirds = {0: BucketLayout(("a", "b"), (3, 4), divisor=3), 1: BucketLayout(("c",), (5,), divisor=3)}
    for layouts in ([(thirds, thirds)] * 3, [(sharded(rank, 3), sharded(rank, 3)) for rank in range(5)]):
        for before, after in moved(layouts):
            for name in SMALL:
                assert torch.equal(before.of_parameter(name), after.of_parameter(name))


def test_in_other_buckets_each_rank_keeps_its_own_in_their_unit():
    for before, after in moved([(A, B)] * 2):
        for name, divisor in (("a", 3), ("b", 1), ("c", 3)):
            torch.testing.assert_close(after.of_parameter(name) * divisor, before.of_parameter(name))
        assert torch.equal(after.of_parameter("b"), before.of_parameter("b"))


def test_of_what_moves_on_one_rank_all_ranks_get_the_mean():
    swapped = [(sharded(0), sharded(1)), (sharded(1), sharded(0)), *[(sharded(k), sharded(k)) for k in (2, 3, 4)]]
    kept = moved(swapped)
    for (_, mine), (theirs, _) in ((kept[0], kept[1]), (kept[1], kept[0])):
        torch.testing.assert_close(mine.of_bucket(0), theirs.of_bucket(0))


def test_three_ranks_that_become_two_owe_what_they_owed():
    """The example in the module's text: 3, 6 and 9 are owed as 6, and are held as 6 and 6."""

    def work(peer: VirtualRank) -> list[float]:
        held = [Slice(torch.full((1,), value), 0, 1) for value in ([3.0, 9.0], [6.0])[peer.rank]]
        slot = Slice(torch.zeros(1), 0, 1)
        hand_over(Holding(3, {"a": held}), {"a": slot}, {"a": 1}, peer.exchange())
        return slot.values.tolist()

    assert run_virtual(2, work) == [[6.0], [6.0]]


def test_what_waits_on_one_rank_waits_on_all():
    """Ranks that expect different things of the next step would do different things in it."""

    def work(peer: VirtualRank) -> dict[str, list[float]]:
        waiting = {"a": torch.full((2,), 3.0), "b": torch.ones(1)} if peer.rank == 0 else {"b": torch.ones(1)}
        holding = Holding.of(2, {}, waiting)
        found = hand_over(holding, {}, {"a": 2, "b": 1, "c": 1}, peer.exchange())
        return {name: value.tolist() for name, value in found.items()}

    assert run_virtual(2, work) == [{"a": [1.5, 1.5], "b": [1.0]}] * 2


# Velocities


@pytest.mark.filterwarnings("ignore:fxcomp. what compressors remember")
@pytest.mark.parametrize(("before", "after"), [("1x2", "2x1"), ("2x2", "2x2"), ("2x2", "1x3"), ("2x1", "2x2")])
def test_the_mean_velocity_goes_on_whatever_the_buckets_and_the_ranks(before: str, after: str):
    """Saved by one plan on one cluster, loaded by another plan on another."""
    clusters = [Cluster.parse(shape, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1)) for shape in (before, after)]
    draw = random.Random(3)
    for _ in range(5):
        plans = [some_plan(draw, cluster) for cluster in clusters]
        jobs = [Job(cluster, plan) for cluster, plan in zip(clusters, plans, strict=True)]
        for job in jobs:
            for rank, kept in enumerate(job.carried):
                kept.velocities = filled(Velocities(velocity_layout(job.plan, job.cluster, rank), CPU), rank)
                kept.velocities.arena.mul_(0 if job is jobs[1] else 1)
        means = mean_velocities(jobs[0])
        jobs[1].load(dealt(draw, jobs[0].saved(), clusters[1].world_size))
        for name, mean in mean_velocities(jobs[1]).items():
            torch.testing.assert_close(mean, means[name])


def mean_velocities(job: Job) -> dict[str, Tensor]:
    means = {name: torch.zeros(size) for name, size in SIZES.items()}
    for kept in job.carried:
        assert kept.velocities is not None
        for name, piece in kept.velocities.slices.items():
            piece.add_to(means[name], len(job.carried))
    return means


def test_a_stage_with_other_divisors_takes_over_velocities_in_its_own_unit():
    before, after = filled(Velocities(A, CPU), 0), Velocities(B, CPU)
    after.take_over(before)
    torch.testing.assert_close(after.of_parameter("c") * 3, before.of_parameter("c"))
    assert torch.equal(after.of_parameter("b"), before.of_parameter("b"))


def test_a_state_without_velocities_starts_them_at_zero_and_says_so():
    cluster = CLUSTERS[1, 2]
    plan = some_plan(random.Random(0), cluster)
    job, other = Job(cluster, plan), Job(cluster, plan)
    for rank, kept in enumerate(job.carried):
        kept.velocities = filled(Velocities(velocity_layout(plan, cluster, rank), CPU), rank)
    states = job.saved()
    with pytest.warns(UserWarning, match="velocities of momentum correction, which this step does not use"):
        other.load(states)
    with pytest.warns(UserWarning, match="without momentum correction: velocities start at zero"):
        job.load(other.saved())
    assert all(kept.velocities is not None and not kept.velocities.arena.any() for kept in job.carried)
