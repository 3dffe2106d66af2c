"""Run passes over a copy of a graph: all at once, or a few (a turn) between two training steps.

Invariants are checked after the last pass, or after each pass if a history is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

from fxcomp.gc_paused import gc_paused
from fxcomp.graph.edit import clone, gradients, is_collective, with_parts
from fxcomp.graph.happens_before import races
from fxcomp.graph.info import InputKind, Role, has_info, info
from fxcomp.graph.ops import WAIT
from fxcomp.graph.regions import regions
from fxcomp.graph.work import is_sequence


def check(gm: GraphModule) -> list[str]:
    """Return the broken invariants of a labelled graph, as `%node: problem`."""
    labelled = [node for node in gm.graph.nodes if has_info(node)]
    if len(labelled) < len(gm.graph.nodes):
        return []  # not labelled yet
    found = [*_unawaited(gm), *_reduced_twice(gm), *_lost_state(gm), *_early_updates(gm)]
    if any(info(node).stream is None for node in labelled):
        return found  # no streams yet
    return [*found, *_torn_apart(gm), *(f"%{race.second}: {race.problem}" for race in races(gm))]


def _unawaited(gm: GraphModule) -> list[str]:
    """Check that each collective has one wait, and no other user."""
    found: list[str] = []
    for node in filter(is_collective, gm.graph.nodes):
        waits = [user for user in node.users if user.target is WAIT]
        if len(waits) != 1:
            found.append(f"%{node.name}: awaited {len(waits)} times")
        found += [f"%{user.name}: uses %{node.name} before it is awaited" for user in node.users if user not in waits]
    return found


def _reduced_twice(gm: GraphModule) -> list[str]:
    """Check that each element of a gradient is reduced on exactly one path."""
    found: list[str] = []
    for name, node in gradients(gm).items():
        users = [(part, user) for part in with_parts(node) for user in part.users]
        syncs = [_extent(part) for part, user in users if info(user).role in (Role.COLLECTIVE, Role.PACK)]
        times = max((sum(start in other for other in syncs) for start in (part.start for part in syncs)), default=0)
        if times > 1:
            found.append(f"%{node.name}: the gradient of {name} is reduced {times} times")
        updates = [user for _, user in users if info(user).role in (Role.UPDATE, Role.CLIP)]
        if syncs and updates:
            found.append(f"%{node.name}: the gradient of {name} is also used without being reduced")
    return found


def _extent(part: Node) -> range:
    """Return the range of elements in a gradient or part. An empty part counts as one, so duplicates are found."""
    start = info(part).start
    return range(start, start + max(1, part.meta["val"].numel()))


def _lost_state(gm: GraphModule) -> list[str]:
    """Check that every residual and compressor state that enters the graph is returned."""
    entering = [n for n in gm.graph.nodes if _is_carried(n)]
    returned: Any = gm.graph.output_node().args[0]
    leaving = len(returned[2]) if is_sequence(returned) and len(returned) > 2 else 0
    if len(entering) != leaving:
        return [f"%output: {len(entering)} residuals and states come in, {leaving} go out"]
    return []


def _is_carried(node: Node) -> bool:
    source = info(node).source
    return source is not None and source.kind in _CARRIED


_CARRIED = (InputKind.RESIDUAL, InputKind.COMPRESSOR_STATE)


def _early_updates(gm: GraphModule) -> list[str]:
    """Check that no update precedes forward or backward, since updates write parameters in place."""
    updated = False
    found: list[str] = []
    for node in gm.graph.nodes:
        updated = updated or (info(node).role is Role.UPDATE and node.op == "call_function")
        if updated and info(node).role in _BEFORE_UPDATES and node.op == "call_function":
            found.append(f"%{node.name}: computes with parameters that have been updated already")
    return found


def _torn_apart(gm: GraphModule) -> list[str]:
    """Check that regions return only tensors and numbers."""
    torn = [(region, node) for region in regions(gm) for node in region.outputs if is_sequence(node.meta.get("val"))]
    return [
        f"%{node.name}: its results are taken apart outside of {region.name}, which makes them" for region, node in torn
    ]


_BEFORE_UPDATES = (Role.COMPUTE, Role.ARRIVE, Role.EXCHANGE, Role.RANDOM_STATE, Role.GRADIENT, Role.PART)

T = TypeVar("T")

Turns = Generator[None, None, T]

Passes = tuple[tuple[partial[GraphModule], ...], ...]
"""Passes of each turn, in order."""


def run(graph: GraphModule, passes: Passes, history: dict[str, GraphModule] | None = None) -> GraphModule:
    """Run all passes. `history` receives the graph after each pass, by name."""
    gm = clone(graph)
    for turn in passes:
        gm = _run_turn(gm, turn, history)
    return assert_whole(gm, "one of the passes")


def run_in_turns(graph: GraphModule, passes: Passes, then: Callable[[GraphModule], T]) -> Turns[T]:
    """Run one turn of passes per iteration. The check and `then` take one iteration each."""
    gm = clone(graph)
    for turn in passes:
        gm = _run_turn(gm, turn, None)
        yield
    assert_whole(gm, "one of the passes")
    yield
    return then(gm)


@gc_paused()
def finished(turns: Turns[T]) -> T:
    """Run all turns and return the result."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def assert_whole(gm: GraphModule, made_by: str) -> GraphModule:
    gm.graph.lint()
    violations = check(gm)
    assert not violations, f"{made_by} broke the graph: " + "; ".join(violations)
    return gm


def _run_turn(
    gm: GraphModule, turn: tuple[partial[GraphModule], ...], history: dict[str, GraphModule] | None
) -> GraphModule:
    for pass_ in turn:
        gm = pass_(gm if history is None else clone(gm))
        if history is not None:
            history[pass_.func.__name__] = assert_whole(gm, pass_.func.__name__)
    return gm
