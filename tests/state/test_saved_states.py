"""States are checked when they are loaded: where they belong, and what is missing."""

from __future__ import annotations

import copy
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
from fxcomp.state.checkpoint import states_of
from fxcomp.state.checksums import sealed
from fxcomp.state.saved_state import read_together

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


def _sealed(given: Any) -> Any:
    if isinstance(given, list):
        return list(map(_sealed, given))
    return sealed(given) if isinstance(given, dict) else given


def refusals(given: list[Any], ranks: int = 2) -> list[str]:
    """Return what each rank is told, all of them errors."""

    def work(peer: Any) -> None:
        states = peer.attempt("reading a checkpoint", lambda: states_of(_sealed(given[peer.rank])))
        read_together(states, SIZES, peer.sharing())

    outcomes = try_virtual(ranks, work)
    assert all(isinstance(outcome, BadState | PeerFailed) for outcome in outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


# What does not belong together


def test_one_state_on_two_ranks_is_refused_on_all():
    job, _ = trained(compressed("int4"))
    first, second = job.saved()
    for text in refusals([first, [second, first]]):
        assert "rank 0 and rank 1 load the state of rank 0: its residuals would count twice" in text


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
        return {**state, "residuals": {**state["residuals"], name: [{**copy.deepcopy(held), **changes}]}}

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda _: {"steps": 3},
            r"not a saved state: it has no residuals.*\n.*the result of state_dict\(\) or checkpoint\(\)",
        ),
        (lambda _: "state.pt", "not a saved state"),
        (_without("ranks"), r"the state is not whole: ranks is missing.*\n.*as state_dict\(\) returned it"),
        (_with_residual("z"), r"residuals are of another model: they hold 'z', which this model does not have"),
        (_with_residual("a", size=31), r"another model: 'a' had 31 elements, and has 30 here.*\n.*the same model"),
        (_with_residual("a", start=1), r"another model: 'a' had 30 elements"),
        (_with_residual("a", values=None), "the state is not whole: .*values must be a flat tensor"),
        (lambda s: {**s, "owed": {"b": torch.zeros(9)}}, "'b' had 9 elements, and has 7 here"),
        (lambda s: {**s, "rank": 2}, "the state is of rank 2 of 2"),
        (
            lambda s: {**s, "version": 5},
            "this state has version 5; this fxcomp reads version 4.*\n.*saved it, or start",
        ),
        (
            lambda s: {**s, "version": 2},
            "this state has version 2; this fxcomp reads version 4.*\n.*saved it, or start",
        ),
        (
            _without("version"),
            r"this state has version unknown; this fxcomp reads version 4.*\n.*load None on every rank",
        ),
        (_without("compressors"), "the state is not whole: compressors is missing"),
        (_with_residual("a", weight=[1, 0]), r"the state is not whole: .*weight\[1\] must be a whole number from 1"),
    ],
)
def test_a_state_of_something_else_is_refused_on_all(change: Any, what: str):
    states = trained(compressed("int4"))[0].saved()
    one, other = refusals([states[0], change(states[1])])
    assert one.startswith("rank 1 failed in ")
    assert re.search(what, other)


# What is missing


def test_what_nobody_loads_is_told():
    job, _ = trained(compressed("int4", (1, 3)))
    states = job.saved()
    with pytest.warns(UserWarning, match=r"no rank loads the state of rank 1, 2 of 3: .*\[state, another\]"):
        compressed("topk(0.1)").load([states[0], None])


def test_what_was_left_out_of_a_parameter_that_is_frozen_now_is_dropped_with_a_warning():
    states = trained(compressed("int4"))[0].saved()
    job = compressed("int4")

    def work(peer: Any) -> None:
        from fxcomp.state.saved_state import restore

        kept = job.carried[peer.rank]
        agreed = read_together(states[peer.rank], SIZES, peer.sharing())
        assert agreed is not None
        restore(agreed, kept, {name: SIZES[name] for name in sorted({*SIZES} - {"a", "b"})}, peer.sharing("restoring"))

    with pytest.warns(UserWarning, match="'a' gets no gradient any more, and 1 others: the residuals are dropped"):
        assert not any(isinstance(outcome, Exception) for outcome in try_virtual(2, work))


def test_where_nobody_has_a_state_nothing_changes():
    job, books = trained(compressed("int4"))

    def work(peer: Any) -> Any:
        return read_together(None, SIZES, peer.sharing())

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
