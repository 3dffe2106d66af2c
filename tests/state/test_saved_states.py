"""States are checked when they are loaded: where they belong, what is missing, and what an earlier version saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.books import CLUSTERS, SIZES, Books, Job
from helpers.virtual_ranks import try_virtual

from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadState, PeerFailed
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.state.saved_state import Here, read_together

State = dict[str, Any]


def plan_of(strategy: Strategy) -> Plan:
    return Plan((Bucket(tuple(SIZES), tuple(SIZES.values()), strategy),))


def compressed(name: str, shape: tuple[int, int] = (1, 2), *, by_level: bool = False) -> Job:
    kind = Strategy.hierarchical if by_level else Strategy.flat
    return Job(CLUSTERS[shape], plan_of(kind(parse_compressor(name))))


def trained(job: Job, steps: int = 2, seed: int = 0) -> tuple[Job, Books]:
    books, generator = Books.empty(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        books.train(job, generator)
    return job, books


def refusals(given: list[Any], ranks: int = 2) -> list[str]:
    """Return what each rank is told, all of them errors."""

    def work(peer: Any) -> None:
        read_together(given[peer.rank], Here(SIZES, sorted(SIZES), {"a plan"}), peer.sharing())

    outcomes = try_virtual(ranks, work)
    assert all(isinstance(outcome, BadState | PeerFailed) for outcome in outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


# What does not belong together


def test_one_state_on_two_ranks_is_refused_on_all():
    job, _ = trained(compressed("int4"))
    first, second = job.saved()
    for text in refusals([first, [second, first]]):
        assert "rank 0 and rank 1 load the state of rank 0: what that rank owes would count twice" in text


def test_states_of_other_steps_or_of_another_number_of_ranks_are_refused_on_all():
    two, more = trained(compressed("int4"))[0].saved(), trained(compressed("int4"), 3)[0].saved()
    for text in refusals([two[0], more[1]]):
        assert "they differ in number of steps (3 and 2)" in text
    three = trained(compressed("int4", (1, 3)))[0].saved()
    for text in refusals([two[0], three[1]]):
        assert "they differ in number of ranks (3 and 2)" in text


def _without(key: str) -> Callable[[State], State]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def _with_residual(name: str, **changes: Any) -> Callable[[State], State]:
    def change(state: State) -> State:
        (held,) = state["residuals"]["a"]
        return {**state, "residuals": {**state["residuals"], name: [{**held, **changes}]}}

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda _: {}, r"not a saved state: it has no residuals.*\n.*what state_dict\(\) or checkpoint\(\) returned"),
        (lambda _: "state.pt", "not a saved state"),
        (_without("ranks"), r"the state is not whole: KeyError: 'ranks'.*\n.*as state_dict\(\) returned it"),
        (_with_residual("z"), r"residuals are of another model: they hold 'z', which this model does not have"),
        (_with_residual("a", size=31), r"another model: 'a' had 31 elements, and has 30 here.*\n.*the same model"),
        (_with_residual("a", start=1), r"another model: 'a' had 30 elements"),
        (_with_residual("a", values=None), "the state is not whole: AttributeError"),
        (lambda s: {**s, "owed": {"b": torch.zeros(9)}}, "'b' had 9 elements, and has 7 here"),
        (lambda s: {**s, "rank": 2}, "says that it is of rank 2 of 2"),
        (lambda s: {**s, "version": 4}, "this state has version 4; this fxcomp reads versions 1 to 3.*\n.*saved it"),
        (_with_residual("a", weight=[1, 0]), "the state is not whole: ZeroDivisionError"),
    ],
)
def test_a_state_of_something_else_is_refused_on_all(change: Any, what: str):
    states = trained(compressed("int4"))[0].saved()
    one, other = refusals([states[0], change(states[1])])
    assert one.startswith("rank 1 failed in a topic: reading: BadState")
    assert re.search(what, other)


# What is missing


def test_what_nobody_loads_is_told():
    job, _ = trained(compressed("int4", (1, 3)))
    states = job.saved()
    with pytest.warns(UserWarning, match=r"nobody loads what rank 1, 2 of 3 saved: .*\[state, another\]"):
        compressed("topk(0.1)").load([states[0], None])


def test_what_was_left_out_of_a_parameter_that_is_frozen_now_is_dropped_with_a_warning():
    states = trained(compressed("int4"))[0].saved()
    job = compressed("int4")

    def work(peer: Any) -> None:
        from fxcomp.state.saved_state import restore

        kept = job.carried[peer.rank]
        here = Here(SIZES, sorted({*SIZES} - {"a", "b"}), set())
        agreed = read_together(states[peer.rank], here, peer.sharing())
        assert agreed is not None
        restore(agreed, kept, here, peer.sharing("restoring"))

    with pytest.warns(UserWarning, match="'a' gets no gradient any more, and 1 others: what compression left out"):
        assert not any(isinstance(outcome, Exception) for outcome in try_virtual(2, work))


def test_where_nobody_has_a_state_nothing_changes():
    job, books = trained(compressed("int4"))

    def work(peer: Any) -> Any:
        return read_together(None, Here(SIZES, sorted(SIZES), set()), peer.sharing())

    assert try_virtual(2, work) == [None, None]
    assert books.off_by(job.owed()) < 1e-5


# Memory: counted in elements


def test_only_buckets_that_are_fed_back_take_memory():
    dense, int8 = Strategy.flat(None), Strategy.flat(parse_compressor("int4"))
    names = sorted(SIZES)
    plan = Plan(tuple(Bucket((n,), (SIZES[n],), int8 if n in "ac" else dense) for n in names))
    for kept in Job(CLUSTERS[1, 2], plan).carried:
        assert kept.residuals.arena.numel() == SIZES["a"] + SIZES["c"]
    for kept in Job(CLUSTERS[1, 2], plan_of(dense)).carried:
        assert kept.residuals.arena.numel() == 0
    saved = Job(CLUSTERS[1, 2], plan_of(dense)).saved()
    assert [state["residuals"] for state in saved] == [{}, {}], "a dense plan's state is empty"


def test_where_hosts_share_a_bucket_a_rank_keeps_its_shard_alone():
    job = compressed("int4", (2, 2), by_level=True)
    assert [kept.residuals.arena.numel() for kept in job.carried] == [sum(SIZES.values()) // 2] * 4


def test_a_dense_state_is_loaded_into_a_compressed_plan_and_starts_it_without_a_word():
    dense = trained(Job(CLUSTERS[1, 2], plan_of(Strategy.flat(None))))[0].saved()
    job = trained(compressed("powersgd(2)"))[0]
    job.load(dense)
    assert job.steps == 2
    assert not any(kept.residuals.arena.any() for kept in job.carried)


# States of earlier versions


def of_version_1(state: State, job: Job, rank: int) -> State:
    """Save as the first version did: whole parameters, zero outside of the shard, and no number of ranks."""
    whole: dict[str, Any] = {name: torch.zeros(size) for name, size in SIZES.items()}
    shards: dict[str, int] = {}
    divisors: dict[str, int] = {}
    for name, (piece,) in job.carried[rank].residuals.slices.items():
        whole[name][piece.start : piece.extent.stop] = piece.values
        divisors |= dict.fromkeys(SIZES, int(piece.total))
        shards |= dict.fromkeys(SIZES, int(job.cluster.world_size * piece.weight / piece.total))
    old = {key: state[key] for key in ("plan", "rank", "steps", "learning_rates", "compressors", "compressor_layout")}
    return {**old, "layout": "0123456789abcdef", "residuals": whole, "divisors": divisors, "shards": shards}


def aged(job: Job) -> list[State]:
    return [of_version_1(state, job, rank) for rank, state in enumerate(job.saved())]


def of_version_2(rank: int, shards: int, generator: torch.Generator) -> State:
    """Save as ranks 0 to 3 of 2x2 did: with two shards, the halves of 98 values; divided by 3, say."""
    residuals: State = {}
    first, offset = 49 * (rank % shards), 0
    for name, size in SIZES.items():
        start = min(max(first - offset, 0), size) if shards > 1 else 0
        stop = max(start, min(first + 49 - offset, size)) if shards > 1 else size
        values = torch.randn(stop - start, generator=generator)
        residuals[name] = {"values": values, "start": start if stop > start else 0, "size": size, "shards": shards,
                           "divisor": 3}  # fmt: skip
        offset += size
    facts = {"version": 2, "rank": rank, "ranks": 4, "steps": 7, "learning_rates": {}, "plan": "of another"}
    return {**facts, "residuals": residuals, "owed": {}, "compressors": {}, "compressor_layout": ""}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (1, 1)])
def test_a_state_of_version_2_owes_what_it_owed(shards: int, shape: tuple[int, int]):
    generator = torch.Generator().manual_seed(0)
    states = [of_version_2(rank, shards, generator) for rank in range(4)]
    due = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for state in states:
        for name, kept in state["residuals"].items():
            due[name][kept["start"] :][: len(kept["values"])] += shards * 3 * kept["values"].double() / 4
    job = compressed("int4", shape) if shape != (1, 1) else Job(CLUSTERS[shape], Plan(()))
    ranks = job.cluster.world_size
    job.load([*states[: ranks - 1], states[ranks - 1 :]])
    assert job.steps == 7
    for name, value in job.owed().items():
        torch.testing.assert_close(value, due[name], atol=1e-6, rtol=0)


def test_a_whole_bucket_of_version_2_stays_bit_for_bit():
    generator, job = torch.Generator().manual_seed(0), compressed("powersgd(2)", (2, 2))
    states = [of_version_2(rank, 1, generator) for rank in range(4)]
    for state in states:
        for kept in state["residuals"].values():
            kept["divisor"] = 4
    job.load(states)
    for state, kept in zip(states, job.carried, strict=True):
        for name in SIZES:
            assert torch.equal(kept.residuals.slices[name][0].values, state["residuals"][name]["values"])


@pytest.mark.parametrize("by_level", [False, True])
def test_a_state_of_version_1_goes_on_where_it_was_saved(by_level: bool):
    job, books = trained(compressed("int4", (2, 2), by_level=by_level))
    again = compressed("int4", (2, 2), by_level=by_level)
    again.load(aged(job))
    assert books.off_by(again.owed()) < 1e-5
    for one, other in zip(job.carried, again.carried, strict=True):
        assert by_level or torch.equal(one.residuals.arena, other.residuals.arena), "a whole bucket stays as it was"


def test_a_state_of_version_1_of_a_whole_bucket_goes_on_by_level():
    job, books = trained(compressed("topk(0.1)", (2, 2)))
    again = compressed("int4", (2, 2), by_level=True)
    again.load(aged(job))
    assert books.off_by(again.owed()) < 1e-5


def test_a_state_of_version_1_that_does_not_say_enough_is_refused():
    job, _ = trained(compressed("int4"))
    first, second = aged(job)
    one, other = refusals([second, first])
    assert "this is the state of rank 1, this is rank 0: an earlier fxcomp saved it" in one
    assert "save it again, and load that here" in other
    by_level, _ = trained(compressed("int4", (2, 2), by_level=True))
    for text in refusals(aged(by_level), ranks=4):
        assert (
            "did not say which part of 'a' is this rank's.\n  Load it where it was saved, under the same plan" in text
        )
