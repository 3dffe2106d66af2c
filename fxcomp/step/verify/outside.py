"""What a step writes outside of the model: statistics of a teacher, states of generators."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat


@contextmanager
def unwritten(captured: GraphModule) -> Generator[None]:
    """Put back what the forward and backward pass write outside of the model and the batch."""
    tensors = [(tensor, tensor.detach().clone()) for tensor in _written(captured)]
    generators = [(generator, generator.get_state()) for generator in _generators(captured)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)
        for generator, state in generators:
            generator.set_state(state)


def _written(captured: GraphModule) -> list[Tensor]:
    roots = {_root(place): None for node in captured.graph.nodes for place in _places(node)}
    return [getattr(captured, str(root.target)) for root in roots if root.op == "get_attr"]


_UNDECLARED = ("running_mean", "running_var")
"""Arguments that batch norms write without saying so."""


def _places(node: Node) -> Iterator[Node]:
    """The values that an operator writes into."""
    if compat.is_operator(node.target):
        given = dict(zip(compat.places_of_arguments(node.target), node.args, strict=False)) | node.kwargs
        written = (given.get(name) for name in (*compat.written_arguments(node.target), *_UNDECLARED))
        yield from (value for value in written if isinstance(value, Node))


def _root(node: Node) -> Node:
    """The value whose memory a view shows."""
    while compat.is_operator(node.target) and compat.is_view(node.target) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _generators(captured: GraphModule) -> list[torch.Generator]:
    constants = [getattr(captured, str(n.target)) for n in captured.graph.nodes if n.op == "get_attr"]
    return [constant for constant in constants if isinstance(constant, torch.Generator)]
