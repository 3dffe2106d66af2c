"""Ranks talk through a store: what one knows all know, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fxcomp.errors import BadPlan, PeerFailed, ReplicasDiffer
from fxcomp.runtime.agree import Conversation
from fxcomp.runtime.members import Members


def on_threads(ranks: int, talk: Callable[[Conversation], Any], timeout_s: float = 60.0) -> list[Any]:
    """Return what each rank got, or the exception."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return talk(
                Conversation(store, "test", Members(tuple(range(ranks)), rank, ranks), timedelta(seconds=timeout_s))
            )
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def test_everyone_learns_everyones_result_in_rank_order():
    assert on_threads(3, lambda a: a.attempt("topic", lambda: a.rank * 10)) == [[0, 10, 20]] * 3


def test_one_failure_is_raised_everywhere():
    def talk(agreement: Conversation) -> Any:
        return agreement.attempt("thinking", lambda: 1 // (1 - agreement.rank))

    first, second, third = on_threads(3, talk)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert isinstance(error, PeerFailed)
        assert str(error).startswith("rank 1 failed in thinking: ZeroDivisionError")


def test_a_store_that_cannot_compare_tells_of_a_failure(monkeypatch: pytest.MonkeyPatch):
    def cannot(*_: object) -> bytes:
        raise NotImplementedError

    monkeypatch.setattr(dist.HashStore, "compare_set", cannot)
    test_one_failure_is_raised_everywhere()


def test_what_rank_0_computes_is_had_by_all_and_computed_once():
    calls: list[int] = []

    def compute() -> dict[str, int]:
        calls.append(1)
        return {"answer": 42}

    assert on_threads(3, lambda a: a.from_rank_0("question", compute)) == [{"answer": 42}] * 3
    assert len(calls) == 1


@pytest.mark.parametrize("error", [BadPlan("no such plan"), ZeroDivisionError("a mistake of ours")])
def test_rank_0_failing_is_told_at_once(error: Exception):
    def fail() -> None:
        raise error

    first, second = on_threads(2, lambda a: a.from_rank_0("the plan", fail))
    assert first is error
    assert isinstance(second, PeerFailed)
    assert str(error) in str(second)


def test_different_facts_are_named_with_both_values():
    for error in on_threads(2, lambda a: a.check_same("models", {"layers": 2 + a.rank, "width": 8})):
        assert isinstance(error, ReplicasDiffer)
        assert "layers is 3 on rank 1 and 2 on rank 0" in str(error)


def test_a_silent_rank_ends_the_wait_after_the_timeout():
    def talk(agreement: Conversation) -> Any:
        return agreement.attempt("meeting", lambda: 1) if agreement.rank == 0 else None

    error, _ = on_threads(2, talk, timeout_s=0.5)
    assert isinstance(error, PeerFailed)
    assert "rank 1 did not arrive at meeting within 0.5 s" in str(error)


def test_a_rank_that_gives_up_is_heard_at_whatever_comes_next():
    def talk(agreement: Conversation) -> Any:
        agreement.attempt("first", lambda: 1)
        if agreement.rank == 0:
            agreement.give_up("between", MemoryError("no more"))
            return None
        return agreement.from_rank_0("second", lambda: 2)

    _, one, two = on_threads(3, talk)
    for error in (one, two):
        assert isinstance(error, PeerFailed)
        assert str(error) == "rank 0 failed in between: MemoryError: no more"


def test_what_another_rank_said_first_is_passed_on_in_its_words():
    def talk(agreement: Conversation) -> Any:
        if agreement.rank == 2:
            agreement.attempt("a topic", lambda: 1 // 0)
        try:
            agreement.attempt("a topic", lambda: 1)
        except PeerFailed as error:
            agreement.give_up("later", error)
            raise

    for error in on_threads(3, talk)[:2]:
        assert str(error).startswith("rank 2 failed in a topic: ZeroDivisionError")


def test_ranks_at_different_topics_say_so():
    for error in on_threads(2, lambda a: a.attempt(f"topic {a.rank}", lambda: 1)):
        assert isinstance(error, PeerFailed)
        assert "is at topic" in str(error)
        assert "in the same order" in str(error)


def test_ranks_that_all_raised_at_a_topic_go_on_with_the_next_one():
    def talk(agreement: Conversation) -> list[Any]:
        with pytest.raises((ZeroDivisionError, PeerFailed)) as raised:
            agreement.attempt("thinking", lambda: 1 // (1 - agreement.rank))
        assert agreement.knows(raised.value)
        return agreement.attempt("going on", lambda: agreement.rank)

    assert on_threads(3, talk) == [[0, 1, 2]] * 3


def test_a_rank_that_others_gave_up_on_sees_so_when_it_comes():
    def talk(agreement: Conversation) -> Any:
        if agreement.rank == 0:
            agreement.attempt("meeting", lambda: 1)
        while agreement.rank and not agreement.was_missed:
            time.sleep(0.01)

    error, *others = on_threads(3, talk, timeout_s=0.2)
    assert isinstance(error, PeerFailed)
    assert others == [None, None]
