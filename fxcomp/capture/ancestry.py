"""Find the part of a trace that a value was made by, with everything that was written into its memory before.

%sum    = sum(%batch_0)
add_(%count, 1)               count is a buffer: what it holds from here on is more than what came in
%view   = view(%count, [1])
%ge     = ge(%view, 3)        made by: add_, view, ge
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from fxcomp import compat


def ancestry(end: Node) -> list[Node]:
    """List the nodes that a node's value follows from, itself included, in order.

    While tracing: operators write in place, and nodes carry fakes that share memory as the real tensors do.
    """
    needed: set[Node] = {end}
    memory: set[StorageWeakRef] = set()
    found: list[Node] = []
    node = end
    while node.op != "root":
        if node in needed or any(place in memory for place in written(node)):
            found.append(node)
            for made_of in node.all_input_nodes:
                needed.add(made_of)
                memory.update(storages(made_of))
        node = node.prev
    return found[::-1]


def storages(node: Node) -> Iterator[StorageWeakRef]:
    """Name the memory of a node's value."""
    return _storages_of(node.meta.get("val"))


def written(node: Node) -> Iterator[StorageWeakRef]:
    """Name the memory that a node writes."""
    target: Any = node.target
    if node.op != "call_function" or not compat.is_operator(target) or not compat.is_in_place(target):
        return
    named = compat.named_arguments(target, node.args, node.kwargs)
    for name in compat.written_arguments(target):
        for argument in pytree.tree_leaves(named.get(name)):
            if isinstance(argument, Node):
                yield from storages(argument)


def _storages_of(value: Any) -> Iterator[StorageWeakRef]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield StorageWeakRef(leaf.untyped_storage())
