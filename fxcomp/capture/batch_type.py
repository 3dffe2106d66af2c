"""The type of a batch: everything that a capture bakes in of it, and the plain values that it may hold."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxcomp.capture.change import Change
from fxcomp.capture.shared_memory import memory_of
from fxcomp.capture.tensor_kind import PLAIN, kind_of, why_not
from fxcomp.errors import UnsupportedBatch

_SHOWN = 4
"""So many tensors of a batch are named."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
"""Values that nobody changes in place."""


def is_plain(value: object) -> bool:
    """Ask if tracing may take a value for a constant. Operators do not take numpy's scalars."""
    return isinstance(value, _PLAIN) and type(value).__module__ != "numpy"


def key_of(value: object) -> Hashable:
    """Make a key that also tells 1, 1.0 and True apart, and 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else value


def name_of_class(value: object) -> str:
    """Name a value's class, as a message shows it."""
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"


class TensorType(NamedTuple):
    """Everything that a capture bakes in of a tensor in a batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    strides: tuple[int, ...] | None
    """None where it is contiguous."""
    requires_grad: bool
    same_as: int
    """The first leaf that is the same tensor, which may be itself."""
    shares_with: int
    """The first leaf in the same memory, which may be itself: writing into one changes the other."""
    kind: Hashable = PLAIN
    """A layout, a class or a lazy view that is not the usual one."""


@dataclass(frozen=True, slots=True)
class BatchType:
    """Structure, shapes, dtypes and devices of a batch; values that are no tensors are part of it."""

    structure: pytree.TreeSpec
    leaves: tuple[Hashable, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each leaf; None for a plain value."""
        return tuple(leaf.shape if isinstance(leaf, TensorType) else None for leaf in self.leaves)

    @property
    def text(self) -> str:
        """Say it in a few words: `float32[8, 20], int64[8]`."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, TensorType)]
        said = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in tensors]
        return ", ".join(said[:_SHOWN] + [f"{len(said) - _SHOWN} more"] * (len(said) > _SHOWN)) or "no tensors"

    def like(self) -> Hashable:
        """Give the type without sizes, which batches of different lengths share."""
        ranks = tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf, TensorType) else leaf for leaf in self.leaves)
        return (str(self.structure), ranks)


def batch_type(batch: Any) -> tuple[BatchType, list[Any]]:
    """Read the type of a batch, and its leaves. Raises UnsupportedBatch."""
    leaves, structure = pytree.tree_flatten(batch)
    tensors: dict[int, int] = {}
    memories: dict[int, int] = {}
    return BatchType(structure, tuple(_leaf_type(x, i, tensors, memories) for i, x in enumerate(leaves))), leaves


def batch_change(batch: Any, before: BatchType, now: BatchType) -> Change | None:
    """Name the first thing that differs between the types of an earlier batch and of this one."""
    if before.structure != now.structure:
        return Change("the structure of the batch", str(before.structure), str(now.structure), _PAD)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
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
            raise UnsupportedBatch(f"tensor number {place} of the batch {why}")
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
    raise UnsupportedBatch(
        f"a batch holds a {name_of_class(leaf)}; it may hold tensors, numbers, strings and None in tuples, lists and"
        f" dicts.\n  Make it one of these: {remedy}."
    )
