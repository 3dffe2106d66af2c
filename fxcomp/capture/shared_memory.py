"""Notice tensors that share memory: a captured step takes each as an input of its own.

mean    f32[8]   buffer
tail    f32[4]   buffer, mean[4:]     if the forward pass writes mean, eager sees the change in tail, a graph does not
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp.capture.tensor_kind import overlaps
from fxcomp.errors import CaptureFailed


def check_written(body: GraphModule, inputs: Sequence[tuple[str, Any]]) -> None:
    """Refuse a graph that writes one of its inputs where another one lies; `inputs` are in the graph's order."""
    places = [node for node in body.graph.nodes if node.op == "placeholder"]
    tensor_of = {place: value for place, value in zip(places, inputs, strict=True) if isinstance(value[1], Tensor)}
    for node in body.graph.nodes:
        if node.target is not torch.ops.aten.copy_.default or node.args[0] not in tensor_of:
            continue
        written, tensor = tensor_of[node.args[0]]
        if overlaps(tensor):
            raise CaptureFailed(
                f"the forward pass writes {written}, several elements of which lie in one place of memory, as .expand()"
                " makes them.\n  Give each its own: .clone()."
            )
        for name, other in tensor_of.values():
            if name != written and _overlap(tensor, other):
                raise CaptureFailed(
                    f"the forward pass writes {written}, in whose memory {name} lies too: a captured step would not"
                    " see the change there.\n  Give each its own memory (clone()), or register one tensor under both"
                    " names."
                )


def first_places(leaves: Sequence[Any]) -> list[int]:
    """Find the first place of each leaf's tensor: Python may ask if two are one, and writing into one changes both."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i for i, leaf in enumerate(leaves)]


def distinct(batch: Any) -> list[tuple[str, Any]]:
    """List the leaves of a batch with their paths; None instead of a tensor that came before."""
    leaves = pytree.tree_flatten_with_path(batch)[0]
    first = first_places([leaf for _, leaf in leaves])
    return [(pytree.keystr(path), leaf if first[i] == i else None) for i, (path, leaf) in enumerate(leaves)]


def sharing(model: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """List the parameters and buffers of a model that are one tensor, or share memory."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    places: dict[int, list[tuple[str, int]]] = {}
    for name, tensor in named:
        if tensor.layout is torch.strided and tensor.numel():
            held = places.setdefault(tensor.untyped_storage().data_ptr(), [])
            held.append((name, int(tensor.storage_offset())))
    return tuple((f"the memory of {held[0][0]}", tuple(held)) for held in places.values() if len(held) > 1)


def memory_of(tensor: Tensor) -> int:
    """Number the memory that a tensor lies in, equal for its views; a tensor without any has a number of its own."""
    address = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    return address or id(tensor)


def _overlap(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not other.numel() or memory_of(one) != memory_of(other):
        return False
    ends = [
        t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (one, other)
    ]
    return one.storage_offset() <= ends[1] and other.storage_offset() <= ends[0]
