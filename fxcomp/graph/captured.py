"""A captured training step with its inputs and the layout of its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.prelude import Prelude

_aten = torch.ops.aten

_BATCH_NORMS = (
    _aten.native_batch_norm.default,
    _aten.cudnn_batch_norm.default,
    _aten.miopen_batch_norm.default,
)
"""Operators that update running statistics although their schemas declare no write."""


@dataclass(frozen=True, slots=True)
class Write:
    """The last write of a buffer in a step."""

    node: Node
    value: Node
    """Computed value that `node` copies into the buffer; the buffer itself if `node` does not copy."""

    @property
    def ready(self) -> Node:
        return self.node if self.value.op == "placeholder" else self.value


def written_parameters(gm: GraphModule) -> dict[str, Node]:
    """Return the last write of each parameter that the forward pass writes, as max_norm of an embedding does."""
    copies = {node.args[0]: node for node in gm.graph.nodes if node.target is _aten.copy_.default}
    sources = [
        (info(to).source, node) for to, node in copies.items() if isinstance(to, Node) and to.op == "placeholder"
    ]
    return {source.name: node for source, node in sources if source and source.kind is InputKind.PARAMETER}


def parameters_written_apart(gm: GraphModule) -> list[str]:
    """Return parameters whose forward writes depend on batch, constants or random numbers, so may differ by rank."""
    apart: set[Node] = set()
    for node in gm.graph.nodes:
        source = info(node).source if node.op == "placeholder" else None
        begins = node.op == "get_attr" or (source and source.kind not in (InputKind.PARAMETER, InputKind.BUFFER))
        if begins or compat.is_random(node.target) or not apart.isdisjoint(node.all_input_nodes):
            apart.add(node)
    return sorted(name for name, node in written_parameters(gm).items() if node in apart)


def buffers(gm: GraphModule) -> dict[str, Node]:
    sources = [(node, info(node).source) for node in gm.graph.nodes if node.op == "placeholder"]
    return {s.name: node for node, s in sources if s is not None and s.kind is InputKind.BUFFER}


def last_writes(gm: GraphModule) -> dict[Node, Write]:
    own = set(buffers(gm).values())
    writes: dict[Node, Write] = {}
    for node in gm.graph.nodes:
        for buffer in written_nodes(node):
            if buffer in own:
                writes[buffer] = Write(node, _value_of(node, buffer))
    return writes


def is_known_early(gm: GraphModule) -> bool:
    """Return whether all new buffer values are known before the first gradient."""
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    first = min((order[n] for n in order if info(n).role is Role.GRADIENT), default=len(order))
    return all(order[write.ready] < first for write in last_writes(gm).values())


def _value_of(node: Node, buffer: Node) -> Node:
    value = node.args[1] if node.target is _aten.copy_.default else None
    if not isinstance(value, Node) or value.op != "call_function":
        return buffer
    copied, there = value.meta["val"], buffer.meta["val"]
    return value if copied.dtype is there.dtype and copied.shape == there.shape else buffer


def written_nodes(node: Node) -> Iterator[Node]:
    target = node.target
    if target in _BATCH_NORMS and node.args[5]:
        yield from (argument for argument in node.args[3:5] if isinstance(argument, Node))
    if compat.is_operator(target) and compat.is_in_place(target):
        named = compat.named_arguments(target, node.args, node.kwargs)
        for name in compat.written_arguments(target):
            yield from (argument for argument in pytree.tree_leaves(named.get(name)) if isinstance(argument, Node))


@dataclass(frozen=True, slots=True)
class Constant:
    """Leaf of the auxiliary result whose value is fixed at capture."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    graph: GraphModule
    aux_spec: pytree.TreeSpec | None
    aux: tuple[Constant | None, ...]
    """Leaves of the loss function's auxiliary result; None for a value that the graph returns."""
    has_aux: bool
    gradient_names: tuple[str, ...]
    without_gradient: tuple[str, ...]
    guard: compat.ShapeGuard | None
    """Checks if the graph can run a batch of other sizes; None if it runs only the captured sizes."""
    is_weighted: bool = False
    """True if the loss is a WeightedLoss, so that gradients are divided by the count over all ranks."""
    densified: tuple[str, ...] = ()
    """Parameters whose gradients are dense in the graph but sparse in eager PyTorch."""
    unused: tuple[str, ...] = ()
    """Names of parameters that the loss does not depend on; their gradients are zero."""

    is_imagined: bool = False
    """True if the graph was moved to an absent device (`graph/retarget.py`)."""

    prelude: Prelude | None = None
    """Decisions of the traced Python code that depend on tensor values."""
    live: tuple[str, ...] = ()
    """Names of Python floats that are graph inputs."""

    def aux_leaves(self, returned: Sequence[Any]) -> list[Any]:
        values = iter(returned)
        return [next(values) if constant is None else constant.value for constant in self.aux]

    def result(self, loss: Any, returned: Sequence[Any]) -> Any:
        if self.aux_spec is None:
            return loss
        return loss, pytree.tree_unflatten(self.aux_leaves(returned), self.aux_spec)

    @property
    def device(self) -> torch.device:
        return next(iter(self.graph.graph.nodes)).meta["val"].device
