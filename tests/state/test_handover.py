"""Whatever lies where and however many ranks there are: what was applied and what is owed are all gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from helpers.books import CLUSTERS, CPU, EVERYWHERE, EXACT, SIZES, Books, Job, dealt, some_plan
from helpers.virtual_ranks import VirtualRank, run_virtual
from torch import Tensor

from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.arena import Arena, Key, Part, Slice, SlotLayout
from fxcomp.state.handover import Holding, hand_over

Layout = Mapping[Key, SlotLayout]
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


@pytest.mark.filterwarnings("ignore:fxcomp. the compressor state")
def test_over_any_history_what_was_applied_and_what_is_owed_are_all_gradients():
    for seed in range(30):
        worst, events = play(seed)
        assert worst <= ROUNDING, f"seed {seed}: off by {worst:.3g} after\n" + "\n".join(events)


# What lies as it did

SMALL = {"a": 3, "b": 4, "c": 5}
TWO_SHOTS = "compress({0}) > all_to_all@world > decompress > compress({1}) > all_gather@world > decompress"


def whole(*names: str, **facts: Any) -> SlotLayout:
    """A bucket that is kept as a whole, on rank 0 of those that keep something for it."""
    parts = tuple(Part(name, 0, SMALL[name], SMALL[name], index) for index, name in enumerate(names))
    return SlotLayout(parts, (range(sum(SMALL[name] for name in names)),), **facts)


def sharded(rank: int) -> Layout:
    """One of five shards: each value has one owner."""
    bucket = whole("c", "a", "b")
    return {(0, 0): replace(bucket, pieces=(range(rank * 12 // 5, (rank + 1) * 12 // 5),))}


def a_and_b(rank: int) -> Layout:
    unit = {"place": rank, "weight": Fraction(1, 2)}
    return {(0, 0): whole("a", "b", **unit), (1, 0): whole("c", **unit)}


def c_and_a(rank: int) -> Layout:
    """Of two ranks that sum on the wire what was divided before, in the first bucket."""
    summed = whole("c", "a", place=rank, weight=Fraction(1), total=Fraction(2))
    return {(0, 0): summed, (1, 0): whole("b", place=rank, weight=Fraction(1, 2))}


def filled(arena: Arena, rank: int) -> Any:
    arena.arena.normal_(generator=torch.Generator().manual_seed(rank))
    return arena


def values_of(arena: Arena, name: str) -> Tensor:
    return torch.cat([torch.empty(0), *(piece.values for piece in arena.slices.get(name, ()))])


def moved(layouts: Sequence[tuple[Layout, Layout]]) -> list[tuple[Arena, Arena]]:
    """On each rank, residuals of one layout handed over to another."""

    def work(peer: VirtualRank) -> tuple[Arena, Arena]:
        before, after = (Arena(layout, CPU) for layout in layouts[peer.rank])
        filled(before, peer.rank)
        assert hand_over(Holding.of(len(layouts), before.slices, {}), after, SMALL, peer.sharing()) == {}
        return before, after

    return run_virtual(len(layouts), work)


def test_under_the_same_layout_residuals_stay_bit_for_bit():
    for layouts in ([(a_and_b(rank), a_and_b(rank)) for rank in (0, 1)], [(sharded(k), sharded(k)) for k in range(5)]):
        for before, after in moved(layouts):
            assert torch.equal(before.arena, after.arena)


def test_in_other_buckets_each_rank_keeps_its_own_in_their_unit():
    for before, after in moved([(a_and_b(rank), c_and_a(rank)) for rank in (0, 1)]):
        for name, weight in (("a", 2), ("b", 1), ("c", 2)):
            torch.testing.assert_close(values_of(after, name) * weight, values_of(before, name))
        assert torch.equal(values_of(after, "b"), values_of(before, "b"))


def test_of_what_moves_on_one_rank_all_ranks_get_the_mean():
    swapped = [(sharded(0), sharded(1)), (sharded(1), sharded(0)), *[(sharded(k), sharded(k)) for k in (2, 3, 4)]]
    kept = moved(swapped)
    for (_, mine), (theirs, _) in ((kept[0], kept[1]), (kept[1], kept[0])):
        torch.testing.assert_close(mine.of(0), theirs.of(0))


def test_three_ranks_that_become_two_owe_what_they_owed():
    """The example in the module's text: 3, 6 and 9 are owed as 6, and are held as 6 and 6."""

    def work(peer: VirtualRank) -> list[float]:
        held = [Slice(torch.full((1,), value), 0, 1, weight=Fraction(1, 3)) for value in ([3.0, 9.0], [6.0])[peer.rank]]
        into = Arena({(0, 0): SlotLayout((Part("a", 0, 1, 1),), (range(1),), place=peer.rank)}, CPU)
        hand_over(Holding(3, {"a": held}, {}), into, {"a": 1}, peer.sharing())
        return into.of(0).tolist()

    assert run_virtual(2, work) == [[6.0], [6.0]]


# Two shots keep two residuals


def job_of(text: str, shape: tuple[int, int] = (1, 3)) -> Job:
    """All parameters in one bucket."""
    return Job(CLUSTERS[shape], Plan((Bucket(tuple(SIZES), tuple(SIZES.values()), Strategy.parse(text)),)))


def follow(job: Job, text: str) -> None:
    job.follow(job.plan.with_strategies([Strategy.parse(text)]))


def test_the_owners_residual_moves_to_all_ranks_as_the_mean():
    """A worker's residual counts a third of it, the owner's all: s on one of three ranks becomes s on each."""
    job = job_of(TWO_SHOTS.format("topk(0.3)", "sign"))
    for rank, kept in enumerate(job.carried):
        kept.residuals.of(0, 0).fill_(3.0 * rank)
        kept.residuals.of(0, 1).fill_(5.0)
    follow(job, "compress(int4) > all_gather@world > decompress")
    for kept in job.carried:
        torch.testing.assert_close(kept.residuals.of(0), torch.full((sum(SIZES.values()),), 8.0))


def test_a_second_residual_begins_at_zero_and_the_first_stays():
    job, generator = job_of("compress(topk(0.1)) > all_gather@world > decompress"), torch.Generator().manual_seed(0)
    Books.empty().train(job, generator)
    before = [kept.residuals.of(0).clone() for kept in job.carried]
    follow(job, TWO_SHOTS.format("int4", "sign"))
    for kept, first in zip(job.carried, before, strict=True):
        assert torch.equal(kept.residuals.of(0, 0), first)
        assert not kept.residuals.of(0, 1).any()
        kept.residuals.of(0, 1).fill_(1.0)
    follow(job, TWO_SHOTS.format("sign", "int4"))
    assert all(kept.residuals.of(0, 1).eq(1.0).all() for kept in job.carried), "what lies as it did stays"


def test_what_the_first_slot_does_not_feed_back_goes_to_the_second():
    job = job_of("compress(sign) > all_gather@world > decompress")
    for kept in job.carried:
        kept.residuals.of(0).fill_(2.0)
    follow(job, TWO_SHOTS.format(EXACT, "sign"))
    assert [kept.residuals.slices["a"][0].slot for kept in job.carried[:1]] == [1]
    assert all(kept.residuals.arena.eq(2.0).all() for kept in job.carried)


def test_ranks_that_compress_the_same_sum_go_on_with_the_same_residual():
    """Each had its own before, of the same weight: kept as they were, the means of the two ranks would differ."""
    job, generator = job_of("compress(topk(0.1)) > all_gather@world > decompress", (2, 2)), torch.Generator()
    Books.empty().train(job, generator.manual_seed(0))
    follow(job, "all_reduce@intra > compress(topk(0.1)) > all_gather@inter > decompress")
    first, second, *_ = (kept.residuals.of(0) for kept in job.carried)
    assert first.any()
    assert torch.equal(first, second)


def test_ranks_that_compress_the_same_sum_hold_the_same_where_one_brings_nothing():
    """The first rank alone still has what both held: kept as it is there, the two would compress different sums."""
    summed_inside = "all_reduce@intra > compress(topk(0.1)) > all_gather@inter > decompress"
    job, generator = job_of(summed_inside, (2, 2)), torch.Generator().manual_seed(0)
    books = Books.empty()
    books.train(job, generator)
    states, before = job.saved(), job.carried
    owed = {name: sum(float(piece.weight) * piece.values.double() for rank in (0, 2, 3)
                      for piece in before[rank].residuals.slices[name]) for name in SIZES}  # fmt: skip
    job = job_of(summed_inside, (2, 2))
    with pytest.warns(UserWarning, match="no rank loads the state of rank 1 of 4:"):
        job.load([states[0], None, *states[2:]])
    held = [kept.residuals.of(0) for kept in job.carried]
    assert held[0].any()
    assert torch.equal(held[0], held[1])
    assert torch.equal(held[2], held[3])
    for name, value in job.owed().items():
        torch.testing.assert_close(value, owed[name], rtol=0, atol=ROUNDING)
    books.train(job, generator)  # fails if ranks end with other means


AT_RANDOM = ("int4(stochastic=true)", "int8(stochastic=true)")
SUMMED_INSIDE = "all_reduce@intra > compress({0}) > all_gather@inter > decompress"
FROM_OTHER_PLACES = [
    "compress({0}) > all_gather@world > decompress",
    "all_reduce@inter > compress({0}) > all_gather@intra > decompress",
    "reduce_scatter@intra > compress({0}) > all_gather@inter > decompress > all_gather@intra",
    "compress(sign) > all_gather@world > decompress",
]


@pytest.mark.parametrize("compressor", AT_RANDOM)
@pytest.mark.parametrize("before", FROM_OTHER_PLACES)
def test_ranks_that_compress_the_same_sum_draw_alike_after_another_plan(before: str, compressor: str):
    """A rank that drew for itself goes on with the stream of the first rank of its host, which it now doubles."""
    job, books = job_of(before.format(compressor), (2, 2)), Books.empty()
    generator = torch.Generator().manual_seed(0)
    books.train(job, generator)
    follow(job, SUMMED_INSIDE.format(compressor))
    first, second, third, fourth = (kept.compressor_states.of(0) for kept in job.carried)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third), "the hosts' errors average out"
    books.train(job, generator)  # fails if ranks end with other means


def test_a_stream_that_one_rank_goes_on_with_goes_on_on_all_that_share_it():
    job, generator = job_of(FROM_OTHER_PLACES[0].format("int4(stochastic=true)"), (2, 2)), torch.Generator()
    Books.empty().train(job, generator.manual_seed(0))
    follow(job, SUMMED_INSIDE.format("int4(stochastic=true)"))
    steps = [kept.compressor_states.of(0)[1::2].tolist() for kept in job.carried]
    assert steps[0] == steps[1] == [1] * len(SIZES)


def test_of_a_parameter_in_two_buckets_waits_the_part_that_is_not_fed_back():
    def work(peer: VirtualRank) -> tuple[list[float], list[float]]:
        held = Slice(torch.tensor([1.0, 2.0, 3.0, 4.0]), 0, 4, place=peer.rank, weight=Fraction(1, 2))
        into = Arena({(1, 0): SlotLayout((Part("a", 2, 2, 4),), (range(2),), place=peer.rank)}, CPU)
        waiting = hand_over(Holding.of(2, {"a": [held]}, {}), into, {"a": 4}, peer.sharing())
        return waiting["a"].tolist(), into.of(1).tolist()

    assert run_virtual(2, work) == [([1.0, 2.0, 0.0, 0.0], [3.0, 4.0])] * 2


# What no slot feeds back


def test_what_waits_on_one_rank_waits_on_all():
    """Ranks that expect different things of the next step would do different things in it."""

    def work(peer: VirtualRank) -> dict[str, list[float]]:
        waiting = {"a": torch.full((2,), 3.0), "b": torch.ones(1)} if peer.rank == 0 else {"b": torch.ones(1)}
        holding = Holding.of(2, {}, waiting)
        found = hand_over(holding, Arena({}, CPU), {"a": 2, "b": 1, "c": 1}, peer.sharing())
        return {name: value.tolist() for name, value in found.items()}

    assert run_virtual(2, work) == [{"a": [1.5, 1.5], "b": [1.0]}] * 2
