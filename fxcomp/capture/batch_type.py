"""Read the type of a batch: tensor metadata, plain values and structure.

Batches of one type can run through one graph. Some tensor subclasses and layouts cannot be captured. Neither can steps
that write memory shared by two inputs.

    mean    f32[8]   buffer
    tail    f32[4]   buffer, mean[4:]     writing mean changes tail too in eager PyTorch, but not in a graph
"""

# untyped methods of sparse tensors
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.capture.structures import flatten, flatten_with_paths, is_plain
from fxcomp.errors import CaptureFailed, Unsupported
from fxcomp.graph.captured import written_nodes

PLAIN: Hashable = None
"""Result of `kind_of` for a strided torch.Tensor without lazy conjugation or negation."""

_NEITHER = (False, False)


def kind_of(tensor: Tensor) -> Hashable:
    """Return a key that identifies a tensor's class, layout, and lazy conjugation or negation."""
    lazily = tensor.is_conj(), tensor.is_neg()
    if type(tensor) is Tensor and tensor.layout is torch.strided and lazily == _NEITHER:
        return "buffer" if getattr(tensor, "_is_buffer", False) else PLAIN
    if type(tensor) is nn.Parameter and tensor.layout is torch.strided and lazily == _NEITHER:
        return "parameter"
    entries = (tensor.is_coalesced(), tensor.sparse_dim(), tensor.dense_dim()) if tensor.is_sparse else ()
    return type(tensor).__name__, str(tensor.layout), lazily, entries


def why_not(tensor: Tensor) -> str | None:
    """Explain why a tensor cannot be captured, with a remedy; None if it can."""
    kind = type(tensor)
    if compat.is_uninitialized(tensor):
        return "is not initialised: a lazy module gives it its shape.\n  Call the model once before compile_step."
    if tensor.is_nested:
        return "is nested, whose sizes are data.\n  Pad it, and pass the lengths as well."
    if kind is not Tensor and kind is not nn.Parameter:
        return (
            f"is a {kind.__module__}.{kind.__name__}, a subclass of torch.Tensor, which would be traced as a plain"
            " tensor.\n  Pass a plain one: .as_subclass(torch.Tensor), or the tensor inside; make it inside loss_fn."
        )
    if compat.is_without_memory(tensor):
        return "is zero without any memory, as autograd makes it.\n  Pass its .clone()."
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}), which does not trace.\n  Pass its .dequantize()."
    if compat.is_sparse_view(tensor):
        return (
            "is a view of a sparse tensor, as .t() and .values() make it, which does not trace.\n  Pass its .clone()."
        )
    if tensor.layout is not torch.strided and not tensor.is_sparse:
        name = str(tensor.layout).removeprefix("torch.")
        return f"lies in memory as {name.strip('_')}, which does not trace.\n  Pass its .to_dense(), or a COO tensor."
    return None


def check_model(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if why := why_not(parameter):
            raise Unsupported(f"the parameter {name!r} {why}")
        if overlaps(parameter):
            raise Unsupported(
                f"elements of the parameter {name!r} overlap in memory, as .expand() makes them: one"
                " update would write them more than once.\n  Give each its own: nn.Parameter(value.clone())."
            )
    for name, buffer in cast("Iterable[tuple[str, Tensor]]", model.named_buffers()):
        if why := why_not(buffer) or _unwritable(buffer):
            raise Unsupported(f"the buffer {name!r} {why}")


def _unwritable(buffer: Tensor) -> str | None:
    if buffer.is_inference():
        return "was made in torch.inference_mode, and cannot be written.\n  Make it outside, or assign its .clone()."
    if not buffer.is_sparse:
        return None
    return "is sparse, and has no memory that ranks could share.\n  Keep it dense, or pass it in the batch."


def overlaps(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    reached = 0
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


@dataclass(frozen=True, slots=True)
class Change:
    """Difference between two batches, or between two states of watched values."""

    what: str
    before: str
    after: str
    remedy: str = "Pass it as a tensor in the batch, or do not read it in the loss function and the model."

    def __str__(self) -> str:
        return f"{self.what} changed from {self.before} to {self.after}"


def check_written(body: GraphModule, inputs: Sequence[tuple[str, Any]]) -> None:
    """Raise CaptureFailed if the graph writes a tensor that overlaps itself or another one.

    `inputs` are (name, value) in graph order.
    """
    places = [node for node in body.graph.nodes if node.op == "placeholder"]
    tensor_of = {place: value for place, value in zip(places, inputs, strict=True) if isinstance(value[1], Tensor)}
    for node in body.graph.find_nodes(op="get_attr"):
        constant = getattr(body, str(node.target))
        if isinstance(constant, Tensor):
            tensor_of[node] = f"a tensor outside the model (of shape {list(constant.shape)})", constant
    places = [place for node in body.graph.nodes for place in written_nodes(node) if place in tensor_of]
    for place in dict.fromkeys(places):
        written, tensor = tensor_of[place]
        if overlaps(tensor):
            raise CaptureFailed(
                f"the forward pass writes {written}, whose elements overlap in memory, as .expand() makes them.\n"
                "  Give each its own: .clone()."
            )
        for other_place, (name, other) in tensor_of.items():
            if other_place is not place and _overlap(tensor, other):
                raise CaptureFailed(
                    f"the forward pass writes {written}, which shares memory with {name}: a captured step would not"
                    " see the change there.\n  Give each its own memory (clone()), or use one tensor, and views of it"
                    " that loss_fn makes."
                )


def first_places(leaves: Sequence[Any]) -> list[int]:
    """Return, for each leaf, the index of the first leaf that is the same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i for i, leaf in enumerate(leaves)]


def distinct(batch: Any) -> list[tuple[str, Any]]:
    """List the leaves of a batch as (path, value). The value is None for a repeated tensor."""
    leaves = flatten_with_paths(batch)
    first = first_places([leaf for _, leaf in leaves])
    return [(path, leaf if first[i] == i else None) for i, (path, leaf) in enumerate(leaves)]


def sharing(model: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """Return (label, names and offsets of tensors) for each memory that model tensors share."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    places: dict[int, list[tuple[str, int]]] = {}
    for name, tensor in named:
        if tensor.layout is torch.strided and tensor.numel():
            held = places.setdefault(tensor.untyped_storage().data_ptr(), [])
            held.append((name, int(tensor.storage_offset())))
    return tuple((f"the memory of {held[0][0]}", tuple(held)) for held in places.values() if len(held) > 1)


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory; views have the same identifier."""
    address = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    return address or id(tensor)


def _overlap(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not other.numel() or memory_of(one) != memory_of(other):
        return False
    ends = [
        t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (one, other)
    ]
    return one.storage_offset() <= ends[1] and other.storage_offset() <= ends[0]


_SHOWN = 4


def key_of(value: object) -> Hashable:
    """Return a key that distinguishes 1, 1.0 and True, and 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else value


def name_of_class(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"


class TensorType(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    strides: tuple[int, ...] | None
    """Strides in elements; None if the tensor is contiguous."""
    requires_grad: bool
    same_as: int
    """Index of the first leaf that is this tensor."""
    shares_with: int
    """Index of the first leaf in the same memory."""
    kind: Hashable = PLAIN
    """Result of `kind_of`."""


@dataclass(frozen=True, slots=True)
class BatchType:
    """Structure, tensor metadata and plain values of a batch."""

    structure: pytree.TreeSpec
    leaves: tuple[Hashable, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Shape of each leaf; None for a plain value."""
        return tuple(leaf.shape if isinstance(leaf, TensorType) else None for leaf in self.leaves)

    @property
    def text(self) -> str:
        """Short form: `float32[8, 20], int64[8]`."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, TensorType)]
        said = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in tensors]
        return ", ".join(said[:_SHOWN] + [f"{len(said) - _SHOWN} more"] * (len(said) > _SHOWN)) or "no tensors"

    def like(self) -> Hashable:
        """Return the type, with each shape replaced by its number of dimensions."""
        ranks = tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf, TensorType) else leaf for leaf in self.leaves)
        return (str(self.structure), ranks)


def batch_type(batch: Any) -> tuple[BatchType, list[Any]]:
    leaves, structure = flatten(batch)
    tensors: dict[int, int] = {}
    memories: dict[int, int] = {}
    return BatchType(structure, tuple(_leaf_type(x, i, tensors, memories) for i, x in enumerate(leaves))), leaves


def batch_change(batch: Any, before: BatchType, now: BatchType) -> Change | None:
    """Return the first difference between two batch types."""
    if before.structure != now.structure:
        return Change("the structure of the batch", str(before.structure), str(now.structure), _PAD)
    paths = [path for path, _ in flatten_with_paths(batch)]
    for path, was, new in zip(paths, before.leaves, now.leaves, strict=True):
        if was == new:
            continue
        if isinstance(was, TensorType) and isinstance(new, TensorType):
            if was.shape != new.shape:
                return Change(f"the shape of batch{path}", str(list(was.shape)), str(list(new.shape)), _PAD)
            return Change(f"the type of batch{path}", str(was), str(new), "Convert it before the call.")
        return Change(f"batch{path}", _plain_text(was), _plain_text(new), "Pass it as a tensor.")
    return None


_PAD = "Pad batches to a few sizes, and give all of them one structure."


def _plain_text(leaf: Hashable) -> str:
    return "a tensor" if isinstance(leaf, TensorType) else str(cast("tuple[object, ...]", leaf)[-1])


def _leaf_type(leaf: Any, place: int, tensors: dict[int, int], memories: dict[int, int]) -> Hashable:
    if isinstance(leaf, Tensor):
        if why := why_not(leaf):
            raise Unsupported(f"tensor number {place} of the batch {why}")
        strides = None if leaf.is_contiguous() else leaf.stride()
        same_as = tensors.setdefault(id(leaf), place)
        shares_with = memories.setdefault(memory_of(leaf), place)
        return TensorType(
            tuple(leaf.shape), leaf.dtype, str(leaf.device), strides, leaf.requires_grad, same_as, shares_with,
            kind_of(leaf),
        )  # fmt: skip
    if is_plain(leaf):
        return key_of(leaf)
    remedy = "call its .item() before the step" if hasattr(leaf, "item") else "convert it before the call"
    remedy = "pass torch.as_tensor of it" if getattr(leaf, "ndim", 0) else remedy
    if any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()):
        remedy = "pass vars() of it, a dict of its attributes, or make its class a dataclass"
    raise Unsupported(
        f"a batch holds a {name_of_class(leaf)}; it may hold tensors, numbers, strings and None in tuples, lists and"
        f" dicts.\n  Make it one of these: {remedy}."
    )
