"""Objects made without collecting are not searched later either, and those that others froze stay frozen."""

from __future__ import annotations

import gc

from ranks import run_alone

from fxcomp.gc_paused import gc_paused


def test_what_is_made_meanwhile_is_old_at_once():
    gc.unfreeze()  # what the command froze in other tests
    with gc_paused():
        assert not gc.isenabled()
        made: list[list[int]] = [[] for _ in range(10)]
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


def frozen_before_and_after() -> tuple[int, int]:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with gc_paused():
        _ = [[] for _ in range(10)]
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
