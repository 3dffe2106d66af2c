"""Compile regions with Inductor once for all plans; programs of one captured step share equal regions.

Plans that race split the same captured graph into regions. A region's key holds its operators with their arguments,
its constant tensors, and the type, sizes, strides and aliasing of each input. It holds no node names, so equal layers
share code.

On one machine, the first process compiles a region for a device; the others wait and load it from Inductor's cache.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from fxcomp import compat
from fxcomp.graph.work import is_sequence

Compiled = Callable[..., Any]


class CompiledRegions:
    """Inductor's code for the regions of one captured step."""

    def __init__(self, *, locks: bool = False) -> None:
        """`locks`: hold a file lock while a region compiles; false under Dynamo, because Dynamo holds a lock."""
        self._locks = locks
        self._known: dict[Hashable, tuple[Compiled, Sequence[Any]]] = {}
        """Code and constants by key. Constants are kept alive because the key has their addresses."""

    def of(self, module: GraphModule, fakes: Sequence[Any], *, keeps_order: bool) -> Compiled:
        """Return a region's code, compiling on first use."""
        key = _key(module, keeps_order=keeps_order)
        if key is None:
            return compat.standalone_compile(module, fakes, keeps_order=keeps_order)
        if key not in self._known:
            lock = _lock_of(key) if self._locks and compat.is_cached(fakes) else None
            with compat.alone_on_this_machine(lock):
                compiled = compat.standalone_compile(module, fakes, keeps_order=keeps_order)
            self._known[key] = compiled, [_constant(module, node) for node in module.graph.find_nodes(op="get_attr")]
        return self._known[key][0]


_OF_CAPTURE: WeakKeyDictionary[GraphModule, CompiledRegions] = WeakKeyDictionary()


def regions_of_capture(graph: GraphModule) -> CompiledRegions:
    """Return the regions shared by a captured graph's programs."""
    return _OF_CAPTURE.setdefault(graph, CompiledRegions(locks=True))


def _lock_of(key: Hashable) -> Path:
    """Return the path of a region's lock, in a local folder of this user."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"fxcomp_regions_{os.getuid()}" / name


def _constant(module: GraphModule, node: Node) -> Any:
    return getattr(module, str(node.target))


def _key(module: GraphModule, *, keeps_order: bool) -> Hashable | None:
    """Return a key for everything that Inductor compiles; None if an argument cannot be compared."""
    place: dict[Node, int] = {}
    memories: dict[StorageWeakRef, int] = {}
    lines: list[Hashable] = []
    try:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                lines.append(_input(node.meta["val"], memories))
            else:
                lines.append(_line(module, node, place))
            place[node] = len(place)
    except TypeError:
        return None
    return keeps_order, _settings(), tuple(lines)


def _settings() -> Hashable:
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, deterministic


def _input(value: Any, memories: dict[StorageWeakRef, int]) -> Hashable:
    if not isinstance(value, Tensor):
        return _compared(value, {})
    if value.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {value.layout} has no strides to compare")
    memory = memories.setdefault(StorageWeakRef(value.untyped_storage()), len(memories))
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return memory, value.dtype, value.device, value.is_conj(), value.is_neg(), tuple(map(str, sizes))


def _line(module: GraphModule, node: Node, place: dict[Node, int]) -> Hashable:
    if node.op == "get_attr":
        return node.op, id(_constant(module, node))
    target = node.op if node.op == "output" else node.target
    return target, _compared(node.args, place), _compared(sorted(node.kwargs.items()), place)


_PLAIN = (
    *(bool, int, float, complex, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _compared(value: Any, place: dict[Node, int]) -> Hashable:
    """Return a comparison key of an argument; 1, 1.0 and True differ."""
    if isinstance(value, Node):
        return Node, place[value]
    if is_sequence(value):
        return list, tuple(_compared(each, place) for each in value)
    if not isinstance(value, _PLAIN):
        raise TypeError(f"{type(value)} is not known to be compared by its text")
    return _written(value)


def _written(value: object) -> Hashable:
    return type(value), str(value)
