"""Find the model's buffers that a step writes, and where their new values are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.info import InputKind, Role, info

_aten = torch.ops.aten

_BATCH_NORMS = (
    _aten.native_batch_norm.default,
    _aten.cudnn_batch_norm.default,
    _aten.miopen_batch_norm.default,
)
"""They change their running statistics without declaring it."""


@dataclass(frozen=True, slots=True)
class Write:
    """The last write of a buffer in a step."""

    node: Node
    value: Node
    """The value that is copied into the buffer, or the buffer itself."""

    @property
    def ready(self) -> Node:
        """The node after which the value is known."""
        return self.node if self.value.op == "placeholder" else self.value


def written_parameters(gm: GraphModule) -> frozenset[str]:
    """The names of parameters that the forward pass itself writes, as a limit on an embedding's norm does."""
    copies = [node.args[0] for node in gm.graph.nodes if node.target is _aten.copy_.default]
    sources = [info(place).source for place in copies if isinstance(place, Node) and place.op == "placeholder"]
    return frozenset(source.name for source in sources if source and source.kind is InputKind.PARAMETER)


def buffers(gm: GraphModule) -> dict[str, Node]:
    """The inputs that are buffers, by name, in the model's order."""
    sources = [(node, info(node).source) for node in gm.graph.nodes if node.op == "placeholder"]
    return {s.name: node for node, s in sources if s is not None and s.kind is InputKind.BUFFER}


def last_writes(gm: GraphModule) -> dict[Node, Write]:
    """The buffers that forward and backward write."""
    own = set(buffers(gm).values())
    writes: dict[Node, Write] = {}
    for node in gm.graph.nodes:
        for buffer in written(node):
            if buffer in own:
                writes[buffer] = Write(node, _value_of(node, buffer))
    return writes


def is_known_early(gm: GraphModule) -> bool:
    """Tell whether all new values are known before the first gradient is."""
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    first = min((order[n] for n in order if info(n).role is Role.GRADIENT), default=len(order))
    return all(order[write.ready] < first for write in last_writes(gm).values())


def _value_of(node: Node, buffer: Node) -> Node:
    value = node.args[1] if node.target is _aten.copy_.default else None
    if not isinstance(value, Node) or value.op != "call_function":
        return buffer
    copied, there = value.meta["val"], buffer.meta["val"]
    return value if copied.dtype is there.dtype and copied.shape == there.shape else buffer


def written(node: Node) -> Iterator[Node]:
    """Find the nodes that a node writes into."""
    target = node.target
    if target in _BATCH_NORMS and node.args[5]:
        yield from (argument for argument in node.args[3:5] if isinstance(argument, Node))
    if compat.is_operator(target) and compat.is_in_place(target):
        places = compat.places_of_arguments(target)
        for name in compat.written_arguments(target):
            place = places[name]
            argument = node.args[place] if place < len(node.args) else node.kwargs.get(name)
            if isinstance(argument, Node):
                yield argument
