"""Objects made without collecting are not searched later either, and those that others froze stay frozen."""

from __future__ import annotations

import gc

import pytest
from helpers.ranks import run_alone

from fxcomp.gc_paused import MANY, gc_paused


def test_what_is_made_meanwhile_is_old_at_once():
    gc.unfreeze()  # what the command froze in other tests
    with gc_paused():
        assert not gc.isenabled()
        made: list[list[int]] = [[] for _ in range(MANY + 1)]
    assert gc.isenabled()
    oldest = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in oldest for each in made)
    assert not gc.get_freeze_count()


def test_garbage_is_still_found():
    class Node:
        other: Node

    with gc_paused():
        first, second = Node(), Node()
        first.other, second.other = second, first
        del first, second
    assert gc.collect() > 0
    assert not [each for each in gc.get_objects() if type(each) is Node]


def test_a_few_objects_are_not_worth_counting_what_is_frozen(monkeypatch: pytest.MonkeyPatch):
    def counted() -> int:
        raise AssertionError("a walk through all that is frozen")

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    gc.collect()
    with gc_paused():
        _ = [[] for _ in range(MANY // 2)]
    assert gc.isenabled()


def frozen_before_and_after() -> tuple[int, int]:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with gc_paused():
        _ = [[] for _ in range(MANY + 1)]
    return frozen, gc.get_freeze_count()


def test_what_the_caller_froze_stays_frozen():
    before, after = run_alone(frozen_before_and_after)
    assert before == after > 0


def test_a_caller_without_a_collector_keeps_it_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
