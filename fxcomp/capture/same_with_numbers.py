"""Make sure that a step that was traced with symbols for sizes is the step that it is with numbers.

    isinstance(rows.shape[0], int)     False for a symbol: the other branch is traced
    cache.get(str(rows.shape[0]))      "s0" is no key

Most questions about a symbol are noted, and its guard asks them of other batches. These are not, and Python answers
them in one way for numbers and in another for symbols, whatever the size. So the step is traced once more with numbers:
where the graphs differ in more than how sizes are written, it has no symbols.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat


def same_with_numbers(
    symbolic: GraphModule, results: Sequence[Any], plain: GraphModule, expected: Sequence[Any]
) -> bool:
    """Compare a graph and its results with those that were traced with a number for each symbol."""
    nodes, others = ([node for node in gm.graph.nodes if not _is_size(node)] for gm in (symbolic, plain))
    if len(nodes) != len(others) or len(results) != len(expected):
        return False
    places = {node: place for each in (nodes, others) for place, node in enumerate(each)}

    def written(value: Any) -> Any:
        """An argument as it is with numbers; a node that stays is its place."""
        if isinstance(value, Node):
            return ("node", places[value]) if value in places else compat.hint(value.meta["val"])
        return compat.hint(value) if isinstance(value, compat.SYMBOLS) else value

    def same(node: Node, other: Node) -> bool:
        if node.op != other.op:
            return False
        if node.op in ("placeholder", "output"):
            return True
        if node.op == "get_attr":
            return _same_constant(getattr(symbolic, str(node.target)), getattr(plain, str(other.target)))
        arguments = [pytree.tree_leaves((each.args, each.kwargs), is_leaf=_is_leaf) for each in (node, other)]
        if node.target != other.target or len(arguments[0]) != len(arguments[1]):
            return False
        return all(_same_number(written(a), written(b)) for a, b in zip(*arguments, strict=True))

    pairs = [(written(a), written(b)) for a, b in zip(results, expected, strict=True)]
    return all(map(same, nodes, others)) and all(_same_number(a, b) for a, b in pairs)


def _is_size(node: Node) -> bool:
    """Tell nodes that read sizes or compute with them, which are there for symbols alone."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, compat.SYMBOLS) and not compat.unbacked_symbols(value)


def _is_leaf(value: Any) -> bool:
    return value is None


def _same_constant(mine: Any, other: Any) -> bool:
    if isinstance(mine, GraphModule) and isinstance(other, GraphModule):
        return same_with_numbers(mine, (), other, ())
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return type(mine) is type(other)
    with compat.plain_values():
        return mine is other or (mine.dtype is other.dtype and mine.equal(other))


def _same_number(mine: Any, other: Any) -> bool:
    if isinstance(mine, float) and isinstance(other, float):
        return math.isclose(mine, other, rel_tol=1e-12) or (mine != mine and other != other)
    return type(mine) is type(other) and mine == other
