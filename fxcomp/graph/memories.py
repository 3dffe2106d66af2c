"""Find the memory of each value: a runtime buffer, an input, or an allocation."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.captured import written_nodes
from fxcomp.graph.edit import collective_kind, is_collective
from fxcomp.graph.info import Role, info
from fxcomp.graph.lines import line_of
from fxcomp.graph.ops import D2H, H2D, IN_PLACE, KEEP, MOVES, ROLL_BACK, WAIT
from fxcomp.plan.kinds import POOL, CollectiveKind

Names = frozenset[str]
"""Names of the memories that may hold a value. A memory is named after a graph node."""

_NOTHING: Names = frozenset()

_MAY_BE_VIEWS = (
    *(torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default, torch.ops.aten._to_copy.default),
    *(torch.ops.aten._reshape_alias.default, torch.ops.aten._unsafe_view.default),
)
"""Operators that return a view where possible, otherwise a copy."""

_REPLACED: dict[Any, int] = {KEEP: 0, ROLL_BACK: 0, IN_PLACE: 0, WAIT: 0}
"""Index of the argument whose memory holds the operator's result."""


class Memories:
    """Memories of one graph's values.

    `is_asynchronous`: the device has its own memory; otherwise copies to and from the host share memory.
    """

    def __init__(self, gm: GraphModule, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self._graph = gm.graph
        self.inputs = list(gm.graph.find_nodes(op="placeholder"))
        self._known: dict[Node, Names] = {}
        self.passing: set[str] = set()
        """Temporary memories: allocated by regions and by lines without a buffer."""
        for node in gm.graph.nodes:
            self._known[node] = self._find(node)

    def of(self, node: Node) -> Names:
        return self._known.get(node, _NOTHING)

    def of_all(self, nodes: Iterable[Node]) -> Names:
        return frozenset(memory for node in nodes for memory in self.of(node))

    def written_by(self, node: Node) -> Names:
        if info(node).role is Role.COMPRESS:
            replaced = [part for part in node.users if part.args[1] != 0]
            return self.of_all([*replaced, *(part for part in node.users if part.args[1] == 0)])
        if node.target is IN_PLACE:
            return self.of(node) if node.args[-1] != 1.0 else _NOTHING
        if node.target is ROLL_BACK:
            return self.of_all(cast("tuple[Node, ...]", node.args[:2]))
        return self.of(node)

    def lies_on_host(self, value: object) -> bool:
        """Return True if a value is only in inputs that the pool reads, which are in host memory."""
        mine = self.of(value) if isinstance(value, Node) else _NOTHING
        return self.is_asynchronous and bool(mine) and mine <= self._of_pool

    @cached_property
    def _of_pool(self) -> Names:
        lines = [node for node in self._graph.nodes if info(node).stream in POOL and node.op == "call_function"]
        return self.of_all(source for node in lines for source in node.all_input_nodes if source.op == "placeholder")

    def _find(self, node: Node) -> Names:
        if node.op in ("placeholder", "get_attr"):
            return frozenset([node.name])
        if node.op != "call_function":
            return _NOTHING
        if node.target is operator.getitem:
            return self._part(node)
        line = line_of(node)
        if line is None:
            return self._plain(node)
        replaced = _REPLACED.get(node.target)
        if replaced is not None:
            return self.of(cast("Node", node.args[replaced]))
        if node.target in (D2H, H2D) and not self.is_asynchronous:
            return self.of(cast("Node", node.args[0]))
        if is_collective(node) and _works_in_place(node):
            return self.of(cast("Node", node.args[0]))
        if line.method == "restore":
            return self.of(cast("Node", node.args[0]))
        if line.has_buffer:
            return frozenset([node.name])
        return self._made(node)

    def _part(self, node: Node) -> Names:
        source, index = cast("tuple[Node, int]", node.args)
        if info(source).role is not Role.COMPRESS or source.target is operator.getitem:
            return self.of(source)
        if index == 0:
            return frozenset([node.name])
        return self.of(cast("Node", source.args[1] if index == 1 else source.kwargs["state"]))

    def _plain(self, node: Node) -> Names:
        target: Any = node.target
        places = [place for place in written_nodes(node) if place in self._known]
        if places:
            return self.of_all(places)
        sources = node.all_input_nodes  # empty for operators of numbers
        if sources and compat.is_operator(target) and compat.is_view(target):
            return self.of(sources[0])
        own = self._made(node)
        return own | self.of(sources[0]) if sources and target in _MAY_BE_VIEWS else own

    def _made(self, node: Node) -> Names:
        self.passing.add(node.name)
        return frozenset([node.name])


def _works_in_place(collective: Node) -> bool:
    kind = collective_kind(collective)
    return kind.is_in_place or (kind is CollectiveKind.BROADCAST and collective.target not in MOVES)
