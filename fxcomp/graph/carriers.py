"""Choose the collectives of a step that take a few bits along, for ranks to compare.

One that joins all ranks serves alone; else one at each level, which together join them. An all_reduce takes bits along
without a copy, so the first one is chosen, and its bits arrive before most updates; else the smallest gather.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.cluster.cluster import Level
from fxcomp.graph.edit import value_bytes
from fxcomp.graph.info import Role, info
from fxcomp.graph.lines import line_of
from fxcomp.runtime.moves import Pattern, pattern_of


def carriers_of(gm: GraphModule) -> frozenset[str]:
    """Name the lines that carry the bits; none in a step that sends nothing."""
    found: dict[str, tuple[int, str]] = {}
    for node in gm.graph.nodes:
        line = line_of(node)
        if line is None or line.method != "launch":
            continue
        kind, _, cut, level, *_ = line.arguments(node)
        copied = _copied_bytes(node, kind, cut)
        if copied is not None and (level not in found or copied < found[level][0]):
            found[level] = copied, node.name
    world = found.get(Level.WORLD.value)
    return frozenset(name for _, name in ([world] if world is not None else found.values()))


def _copied_bytes(node: Node, kind: str, cut: Any) -> int | None:
    """Count what is copied if a collective carries; None for those that cannot."""
    if kind == "all_reduce":
        # A count of elements arrives before anything changes.
        return -1 if info(node).role is Role.COUNT else 0
    if cut == 1 or pattern_of(kind) is not Pattern.ALL_GATHER:
        return None
    return max(1, value_bytes(node))
