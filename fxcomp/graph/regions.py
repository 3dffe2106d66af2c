"""Cut a graph into compute regions and the lines between them.

A region of plain operators becomes one function and one task of the prediction. Asynchronous operators stay outside,
because Inductor would wait for them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.info import Role, info

BODY = (Role.COMPUTE, Role.GRADIENT, Role.PART)
"""Roles of plain operators in forward and backward."""

PLAIN = (*BODY, Role.UNPACK, Role.CLIP, Role.UPDATE)


@dataclass(frozen=True, slots=True)
class Region:
    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @classmethod
    def of(cls, name: str, nodes: Sequence[Node]) -> Region:
        inside = set(nodes)
        inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        values = [node for node in inputs if node.op != "get_attr"]
        return cls(name, tuple(nodes), (*values, *_telling(values)), tuple(outputs))

    @property
    def updates(self) -> bool:
        """True if the region unpacks, clips or updates."""
        return info(self.nodes[0]).role not in BODY


def cut(gm: GraphModule) -> list[Region | Node]:
    """List the lines of a graph, and each run of consecutive plain nodes as one region."""
    pieces: list[Region | Node] = []
    counts = {"region": 0, "update": 0}
    for run in _runs(gm):
        if isinstance(run, Node):
            pieces.append(run)
            continue
        kind = "region" if info(run[0]).role in BODY else "update"
        pieces.append(Region.of(f"{kind}_{counts[kind]}", run))
        counts[kind] += 1
    return pieces


def regions(gm: GraphModule) -> list[Region]:
    return [piece for piece in cut(gm) if isinstance(piece, Region)]


def _runs(gm: GraphModule) -> Iterator[list[Node] | Node]:
    """Yield lines, and runs of plain nodes as lists. The end of backward also ends a run."""
    run: list[Node] = []
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        role = info(node).role
        if run and (role not in PLAIN or (role in BODY) != (info(run[0]).role in BODY)):
            yield run
            run = []
        if role in PLAIN:
            run.append(node)
        else:
            yield node
    if run:
        yield run


def _telling(values: Sequence[Node]) -> list[Node]:
    """Return batch tensors whose shapes determine the symbolic sizes of values.

    A size s0·s1 alone determines neither s0 nor s1.
    """
    found: list[Node] = []
    while missing := compat.unbound_symbols(node.meta.get("val") for node in (*values, *found)):
        others = (node for node in values[0].graph.find_nodes(op="placeholder") if node not in found)
        tells = (node for node in others if missing & compat.bound_symbols([node.meta.get("val")]))
        if (first := next(tells, None)) is None:
            break
        found.append(first)
    return found
