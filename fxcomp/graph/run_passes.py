"""Run passes over a copy of a graph: at once, or in turns between the steps of a running job.

Passes are data: a tuple of turns, each a tuple of passes with their arguments. What must hold of a graph is checked
after the last one; where the result of each pass is kept, after each, and every pass works on a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar

from torch.fx import GraphModule

from fxcomp.graph.check import check
from fxcomp.graph.edit import clone

T = TypeVar("T")

Turns = Generator[None, None, T]
"""Work that is done a part at a time, between the steps of a running job."""

Passes = tuple[tuple[partial[GraphModule], ...], ...]
"""The passes of each turn, in order, with their arguments."""


def run(graph: GraphModule, passes: Passes, history: dict[str, GraphModule] | None = None) -> GraphModule:
    """Run all passes at once. A history gets what each one returns, by the pass's name."""
    gm = clone(graph)
    for turn in passes:
        gm = _run_turn(gm, turn, history)
    return assert_whole(gm, "one of the passes")


def run_in_turns(graph: GraphModule, passes: Passes, then: Callable[[GraphModule], T]) -> Turns[T]:
    """Run the passes of a turn at a time; checking the graph and what follows take a turn each."""
    gm = clone(graph)
    for turn in passes:
        gm = _run_turn(gm, turn, None)
        yield
    assert_whole(gm, "one of the passes")
    yield
    return then(gm)


def finished(turns: Turns[T]) -> T:
    """Take all turns at once."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def assert_whole(gm: GraphModule, made_by: str) -> GraphModule:
    """Check what must hold of every graph that a pass returns."""
    gm.graph.lint()
    violations = check(gm)
    assert not violations, f"{made_by} broke the graph: " + "; ".join(map(str, violations))
    return gm


def _run_turn(
    gm: GraphModule, turn: tuple[partial[GraphModule], ...], history: dict[str, GraphModule] | None
) -> GraphModule:
    for pass_ in turn:
        gm = pass_(gm if history is None else clone(gm))
        if history is not None:
            history[pass_.func.__name__] = assert_whole(gm, pass_.func.__name__)
    return gm
