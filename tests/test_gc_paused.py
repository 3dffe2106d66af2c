"""What is made without collecting is not searched later either, and what others froze stays frozen."""

from __future__ import annotations

import gc
import subprocess
import sys

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


def test_what_the_caller_froze_stays_frozen():
    code = """
import gc
from fxcomp.gc_paused import gc_paused
gc.freeze()
frozen = gc.get_freeze_count()
with gc_paused():
    made = [[] for _ in range(10)]
assert gc.get_freeze_count() == frozen > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_caller_without_a_collector_keeps_it_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
