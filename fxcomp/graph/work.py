"""How much work a plain operator is: the key of its measured cost, its floating-point operations, bytes it touches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Node

from fxcomp import compat

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
          torch.int32: "i32", torch.uint8: "u8", torch.bool: "b8"}  # fmt: skip


def is_sequence(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether an argument or a value of a node is made of several."""
    return isinstance(value, list | tuple)


def type_text(value: Any) -> str:
    """A fake value as text: `f32[8,16]`, or a tuple of such."""
    if isinstance(value, Tensor):
        dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    if is_sequence(value):
        return f"({', '.join(map(type_text, value))})"
    if isinstance(value, torch.SymInt | int):
        return "int"
    return "float" if isinstance(value, torch.SymFloat | float) else type(value).__name__


def operator_text(target: Any) -> str:
    """An operator as people write it: `aten.mm`, `all_gather`."""
    if not compat.is_operator(target):
        return getattr(target, "__name__", str(target))
    namespace, name, variant = str(target).split(".")
    overload = f".{variant}" if variant != "default" else ""
    return (
        f"{namespace}.{name}{overload}" if namespace == "aten" else name.removesuffix("_tensor").removesuffix("_into")
    )


def work_key(node: Node) -> str:
    """What a measured cost is filed under: operator and argument types."""
    types = [type_text(n.meta["val"]) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return " ".join([operator_text(node.target), *types])


def is_free(node: Node) -> bool:
    """Whether a node moves no data: a view, or arithmetic on plain numbers."""
    target = node.target
    if not compat.is_operator(target):
        return True
    return compat.is_view(target) or not any(True for _ in _tensors(node.meta.get("val")))


def flops(node: Node) -> float:
    """Floating-point operations, by torch's own counter; 0 where it knows none (then bytes decide)."""
    return compat.flops(node.target, [_values(a) for a in node.args], _values(node.meta.get("val")))


def touched_bytes(node: Node) -> float:
    """Bytes of all argument and result tensors."""
    values = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]
    return float(sum(_bytes(t) for t in [*values, *_tensors(node.meta.get("val"))]))


def _values(value: Any) -> Any:
    if isinstance(value, Node):
        return value.meta.get("val")
    if is_sequence(value):
        return type(value)(_values(item) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_sequence(value):
        for item in value:
            yield from _tensors(item)


def _bytes(tensor: Tensor) -> int:
    """A symbolic size counts with the size that it was traced with."""
    return math.prod(compat.size_hint(size) for size in tensor.shape) * tensor.element_size()
