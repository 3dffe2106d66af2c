"""Count a plain operator's work: floating-point operations, bytes, and the key of its measured cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
          torch.int32: "i32", torch.uint8: "u8", torch.bool: "b8"}  # fmt: skip


def is_sequence(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def type_text(value: Any) -> str:
    """Format a fake value's type: `f32[8,16]`, or a tuple of types."""
    if isinstance(value, Tensor):
        dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    if is_sequence(value):
        return f"({', '.join(map(type_text, value))})"
    if isinstance(value, torch.SymInt | int):
        return "int"
    return "float" if isinstance(value, torch.SymFloat | float) else type(value).__name__


def operator_text(target: Any) -> str:
    """Format an operator's name: `aten.mm`, `all_gather`."""
    if not compat.is_operator(target):
        return getattr(target, "__name__", str(target))
    namespace, name, variant = str(target).split(".")
    overload = f".{variant}" if variant != "default" else ""
    return (
        f"{namespace}.{name}{overload}" if namespace == "aten" else name.removesuffix("_tensor").removesuffix("_into")
    )


def work_key(node: Node) -> str:
    types = [type_text(n.meta["val"]) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return " ".join([operator_text(node.target), *types])


@dataclass(frozen=True, slots=True)
class OperatorWork:
    key: str
    flops: float
    touched_bytes: float
    math_type: str
    read_bytes: tuple[float, ...]
    """Bytes read of each argument, in the order of `reads`."""


def work(node: Node) -> OperatorWork:
    sizes = tuple(size for _, size in _counted_reads(node))
    return OperatorWork(work_key(node), flops(node), sum(sizes) + _made_bytes(node), math_type(node), sizes)


class Basis(Enum):
    """Basis for estimating a plain operator's time."""

    NOTHING_TO_DO = "free"  # a view, an allocation, or arithmetic on plain numbers
    WORK = "floating-point operations and bytes"  # torch's formula, or an operator bound by memory
    BYTES = "bytes alone"  # arithmetic unknown: a foreign operator, a matrix decomposition
    NONE = "unpriced"  # has no tensors


def basis(node: Node) -> Basis:
    known = _basis_of(node.target)
    if known is not Basis.BYTES:
        return known
    read_and_made = [*(n.meta.get("val") for n in node.all_input_nodes), node.meta.get("val")]
    values = [tensor for value in read_and_made for tensor in tensors(value)]
    return Basis.BYTES if values else Basis.NONE


def is_free(node: Node) -> bool:
    return basis(node) is Basis.NOTHING_TO_DO


@cache
def _basis_of(target: Any) -> Basis:
    if compat.is_higher_order(target):
        return Basis.BYTES
    if not compat.is_operator(target):
        return Basis.NOTHING_TO_DO  # Python's own: getitem, arithmetic on sizes
    if compat.is_view(target):
        return Basis.NOTHING_TO_DO
    if not _is_torchs(target):
        return Basis.BYTES
    if name_of(target) in _ALLOCATIONS or not compat.moves_tensors(target):
        return Basis.NOTHING_TO_DO
    if is_bound_by_memory(target) or name_of(target).startswith(_OF_LISTS):
        return Basis.WORK
    return Basis.WORK if compat.has_flop_formula(target) or _is_attention(target) else Basis.BYTES


@cache
def is_bound_by_memory(target: Any) -> bool:
    """Return whether a torch operator does only a few operations per value."""
    known = compat.is_operator(target) and _is_torchs(target)
    return known and (compat.is_bound_by_memory(target) or name_of(target) in _BOUND_BY_MEMORY)


@dataclass(frozen=True, slots=True)
class Unknowns:
    """Names and counts of operators of unknown time."""

    unpriced: tuple[tuple[str, int], ...] = ()
    """Operators priced as free."""
    by_bytes: tuple[tuple[str, int], ...] = ()
    """Operators priced by bytes of tensors."""


NO_UNKNOWNS = Unknowns()


def unknowns(gm: GraphModule) -> Unknowns:
    counts: dict[Basis, dict[str, int]] = {Basis.NONE: {}, Basis.BYTES: {}}
    for node in gm.graph.nodes:
        if node.op != "call_function" or _is_ours(node.target) or compat.communicates(node.target):
            continue
        found = counts.get(basis(node))
        if found is not None:
            name = operator_text(node.target)
            found[name] = found.get(name, 0) + 1
    return Unknowns(tuple(counts[Basis.NONE].items()), tuple(counts[Basis.BYTES].items()))


def flops(node: Node) -> float:
    """Count floating-point operations by torch's formula; 0 without one.

    Attention has its own formula, because torch has none for the CPU kernel. A causal mask halves the count.
    """
    target, made = node.target, _values(node.meta.get("val"))
    if compat.is_operator(target) and _is_attention(target):
        counted = _attention_flops(node)
    else:
        counted = compat.flops(target, [_values(a) for a in node.args], _kept(node.kwargs), made)
    return counted / 2 if counted and argument(node, "is_causal") is True else counted


def math_type(node: Node) -> str:
    """Return the number type in which an operator multiplies: `f32`, `bf16`, `f8`; `tf32` where torch's settings allow.

    It is the type of the first floating-point input, or `f32` without one.

    Attention in float32 ignores torch's settings.
    """
    types = [t.dtype for n in node.all_input_nodes for t in tensors(n.meta.get("val")) if t.is_floating_point()]
    if not types:
        return "f32"
    name = operator_text(node.target)
    if (
        types[0] is torch.float32
        and "attention" not in name
        and compat.multiplies_in_tf32(is_convolution="conv" in name)
    ):
        return "tf32"
    return "f8" if types[0].itemsize == 1 else _SHORT.get(types[0], "f32")


def touched_bytes(node: Node) -> float:
    return sum(size for _, size in _counted_reads(node)) + _made_bytes(node)


def reads(node: Node, known: OperatorWork | None = None) -> Iterable[tuple[Node, float]]:
    """Return the arguments that an operator reads, with the bytes of each."""
    return zip(node.all_input_nodes, known.read_bytes, strict=False) if known is not None else _counted_reads(node)


def _counted_reads(node: Node) -> Iterator[tuple[Node, float]]:
    """Yield each argument and its bytes read. A lookup reads only returned rows; batch norm reads its input twice."""
    name = name_of(node.target) if compat.is_operator(node.target) else ""
    sizes = [sum(map(tensor_bytes, tensors(each.meta.get("val")))) for each in node.all_input_nodes]
    made, again = sum(map(tensor_bytes, tensors(node.meta.get("val")))), _READ_TWICE.get(name, 0)
    for place, (source, size) in enumerate(zip(node.all_input_nodes, sizes, strict=True)):
        if place == 0 and name in _PART_READ:
            size = max(made, sizes[1]) if name == "nll_loss_forward" else made
        if place == 0 and name in _SCATTERS and compat.is_in_place(node.target):
            size = sum(sizes[1:])  # the part of the table that is added to
        times = 0 if place == _UNREAD.get(name) else 2 if place < again else 1
        if name not in _FILLS:
            yield source, float(size * times)


def _made_bytes(node: Node) -> float:
    """Count the bytes of results, or of arguments changed in place."""
    if compat.is_operator(node.target) and not compat.has_results(node.target):  # list operators of optimizers
        return float(sum(tensor_bytes(t) for value in _written(node) for t in tensors(value)))
    if compat.is_operator(node.target) and name_of(node.target) in _SCATTERS and compat.is_in_place(node.target):
        return float(sum(tensor_bytes(t) for n in node.all_input_nodes[1:] for t in tensors(n.meta.get("val"))))
    return float(sum(map(tensor_bytes, tensors(node.meta.get("val")))))


_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
     "lift_fresh", "lift_fresh_copy", "detach", "alias", "set_", "resize"}
)  # fmt: skip

_FILLS = frozenset(
    {"fill", "zero", "full", "zeros", "ones", "arange", "scalar_tensor", "zeros_like", "ones_like", "full_like",
     "new_zeros", "new_ones", "new_full", "rand", "randn", "rand_like", "randn_like", "randint", "randperm",
     "uniform", "normal", "exponential", "bernoulli", "normal_functional", "eye", "linspace"}
)  # fmt: skip

_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "_unsafe_index", "take", "take_along_dim"})

_PART_READ = _LOOKUPS | {"nll_loss_forward"}

_UNREAD = {"copy": 0, "nll_loss_backward": 1}
"""Index of the argument whose values the operator does not read."""

_SCATTERS = frozenset({"index_put", "_unsafe_index_put", "scatter", "scatter_add", "scatter_reduce", "index_add",
                       "index_copy", "index_fill", "masked_scatter"})  # fmt: skip

_READ_TWICE = {
    "native_batch_norm": 1, "_native_batch_norm_legit": 1, "_native_batch_norm_legit_functional": 1,
    "cudnn_batch_norm": 1, "miopen_batch_norm": 1, "_batch_norm_with_update": 1,
    "_batch_norm_with_update_functional": 1, "_native_batch_norm_legit_no_stats": 1,
    "native_batch_norm_backward": 2, "cudnn_batch_norm_backward": 2, "miopen_batch_norm_backward": 2,
    "batch_norm_backward": 2, "embedding_dense_backward": 1, "native_group_norm": 1,
    "native_layer_norm_backward": 2,
}  # fmt: skip
"""Number of leading arguments that are read twice."""

_BOUND_BY_MEMORY = frozenset(
    {*_FILLS, *_LOOKUPS, *_SCATTERS, *_READ_TWICE,
     "copy", "_to_copy", "cat", "stack", "repeat", "roll", "flip", "constant_pad_nd", "pixel_shuffle", "tril", "triu",
     "slice_backward", "select_backward", "slice_scatter", "select_scatter", "diagonal_backward", "diagonal_scatter",
     "as_strided_scatter", "unfold_backward", "diag_embed", "index_backward", "masked_select", "nonzero", "cumsum",
     "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "_safe_softmax",
     "native_layer_norm", "native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm",
     "_fused_rms_norm_backward", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
     "mse_loss", "mse_loss_backward", "native_dropout", "native_dropout_backward", "glu", "glu_backward",
     "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool1d", "avg_pool2d", "avg_pool2d_backward",
     "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "max_pool3d_with_indices", "avg_pool3d",
     "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward",
     "mv", "dot", "addmv", "ger", "outer", "bincount", "bucketize", "searchsorted", "where", "sum", "mean",
     "max", "min", "_amp_foreach_non_finite_check_and_unscale", "_amp_update_scale", "_index_put_impl", "equal",
     "split_with_sizes_copy"}
)  # fmt: skip
"""ATen operators with a few operations per value that may lack torch's tags pointwise and reduction."""

_ATTENTION = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?(_backward)?")


def _is_torchs(target: Any) -> bool:
    return str(target).partition(".")[0] in ("aten", "prims", "prim")


def _is_ours(target: Any) -> bool:
    """Return whether an operator is fxcomp's or a collective. Both are priced separately."""
    return compat.is_operator(target) and str(target).partition(".")[0] in ("fxcomp", "_c10d_functional")


@cache
def name_of(target: Any) -> str:
    """Return an operator's bare name, without the suffix of in-place operators."""
    name = str(target).split(".")[1]
    return name.rstrip("_") if not name.endswith("__") else name


_OF_LISTS = "_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad"


@cache
def _is_attention(target: Any) -> bool:
    return _ATTENTION.fullmatch(name_of(target)) is not None


def _attention_flops(node: Node) -> float:
    """Count two matrix products of the size of q·kᵀ in forward and five in backward, as torch does."""
    is_backward = name_of(node.target).endswith("_backward")
    names = ("query", "key", "value")
    shapes = [_values(argument(node, name)) for name in names]
    if not all(isinstance(shape, Tensor) for shape in shapes):
        return 0.0
    (*batch, rows, width), (*_, columns, _), (*_, out_width) = (
        [compat.size_hint(size) for size in shape.shape] for shape in shapes
    )
    forward = [width, out_width]  # q·kᵀ, and its softmax times v
    products = [width, *forward, width, out_width] if is_backward else forward
    return 2.0 * math.prod(batch) * rows * columns * sum(products)


def argument(node: Node, name: str) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    place = compat.places_of_arguments(node.target).get(name) if compat.is_operator(node.target) else None
    return node.args[place] if place is not None and place < len(node.args) else None


def _written(node: Node) -> list[Any]:
    return [_values(argument(node, name)) for name in compat.written_arguments(node.target)]


def _kept(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _values(value) for name, value in kwargs.items()}


def _values(value: Any) -> Any:
    if isinstance(value, Node):
        return value.meta.get("val")
    if is_sequence(value):
        return type(value)(_values(item) for item in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_sequence(value):
        for item in value:
            yield from tensors(item)


def tensor_bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes. A symbolic size counts as traced, an expanded dimension as one value."""
    sizes = [compat.size_hint(size) for size in tensor.shape]
    steps = [compat.size_hint(step) for step in compat.strides(tensor)]
    kept = [size if step else min(size, 1) for size, step in zip(sizes, steps, strict=True)]
    return math.prod(kept) * tensor.element_size()
