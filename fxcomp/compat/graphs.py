"""Copy nodes and make modules faster than torch.fx's public functions."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg


def copied(nodes: Iterable[Node]) -> Graph:
    """Copy nodes into a new graph, in this order and with the same names."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in nodes:
        copies[node] = append_copy(graph, node, copies)
    return graph


def append_copy(graph: Graph, node: Node, copies: Mapping[Node, Node], called: str | None = None) -> Node:
    """Append a copy of a node, named `called` if given, to a graph. `copies` replaces the node's arguments.

    `Graph.node_copy` spends most of its time on a search for raw symbols, which nodes of earlier graphs do not have.
    """
    name = graph._graph_namespace.create_name(called or node.name, None)
    args, kwargs = map_arg(node.args, copies.__getitem__), map_arg(node.kwargs, copies.__getitem__)
    made = Node(graph, name, node.op, node.target, args, kwargs, node.type)
    made.meta = dict(node.meta)
    graph._graph_namespace.associate_name_with_obj(name, made)
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    return made


def graph_module(root: GraphModule, graph: Graph, name: str) -> GraphModule:
    """Make a module that generates its Python code on demand."""
    return _LazyGraphModule(root, graph, class_name=name)
