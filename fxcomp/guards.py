"""Notice when a step is not the one that was captured.

Tracing has no guards of its own, so each call compares what tracing baked in. What differs either leads to another
capture (a key that was not seen yet) or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxcomp.capture import Owned, live_numbers
from fxcomp.errors import StepChanged, UnsupportedBatch
from fxcomp.graph.work import is_sequence
from fxcomp.values import is_plain, key_of, what_is

Key = tuple[Hashable, ...]

T = TypeVar("T")

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class BatchType:
    """Structure, shapes, dtypes and devices of a batch; values that are no tensors are part of it."""

    structure: pytree.TreeSpec
    leaves: tuple[Hashable, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_shape_of, self.leaves))

    def like(self) -> Key:
        """The type without sizes: what two batches of different lengths share."""
        ranks = tuple(
            (len(shape), *leaf[1:]) if shape is not None and is_sequence(leaf) else leaf
            for leaf, shape in zip(self.leaves, self.shapes, strict=True)
        )
        return (str(self.structure), ranks)


def batch_type(batch: Any) -> tuple[BatchType, list[Any]]:
    """The type of a batch, and its leaves."""
    leaves, structure = pytree.tree_flatten(batch)
    return BatchType(structure, tuple(map(_leaf_type, leaves))), leaves


def _shape_of(leaf: Any) -> tuple[int, ...] | None:
    """What a leaf's type says of a tensor's shape; None for a plain value."""
    return leaf[0] if isinstance(leaf[0], tuple) else None


def _leaf_type(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        strides = None if leaf.is_contiguous() else leaf.stride()
        return (tuple(leaf.shape), leaf.dtype, str(leaf.device), strides)
    if is_plain(leaf):
        return key_of(leaf)
    remedy = "call its .item() before the step" if hasattr(leaf, "item") else "convert it before the call"
    raise UnsupportedBatch(
        f"a batch holds a {what_is(leaf)}; it may hold tensors, numbers, strings and None in tuples, lists and"
        f" dicts.\n  Make it one of these: {remedy}."
    )


class StepGuard:
    """Reads everything that a capture depends on, cheaply, before each step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]):
        self._model, self._optimizer = model, optimizer
        self._owned = tuple(owned)
        self._modules = tuple(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))
        self._places = self._parameter_places()
        self._children = self._child_places()
        self._grouped = self._groups()

    def check_identity(self) -> None:
        """Raise StepChanged if a parameter was replaced, frozen, thawed or moved."""
        for table, key, name, parameter, trainable in self._places:
            if table.get(key) is not parameter:
                raise StepChanged(
                    f"the parameter {name!r} is another object than when the step was compiled.\n"
                    "  Change parameters in place (with torch.no_grad(): p.copy_(...)), or call compile_step again."
                )
            if parameter.requires_grad != trainable:
                raise StepChanged(
                    f"requires_grad of {name!r} changed from {trainable} to {parameter.requires_grad}.\n"
                    "  Call compile_step again: other gradients need another plan."
                )
        for table, key, name, child in self._children:
            if table.get(key) is not child:
                raise StepChanged(
                    f"the module {name!r} is another object than when the step was compiled.\n"
                    "  Call compile_step again after changing the model's structure."
                )
        if self._grouped != self._groups():
            raise StepChanged(
                "the optimizer's groups hold other parameters than when the step was compiled.\n"
                "  Call compile_step again after add_param_group, or after moving a parameter."
            )

    def key(self) -> Key:
        """Everything but the batch that a capture bakes in."""
        return (
            tuple(map(_plain_attributes, self._modules)),
            tuple(map(_baked_options, self._optimizer.param_groups)),
            _autocast_state(),
        )

    def describe_change(self, old: Key, new: Key) -> str:
        """Say in words what differs between two keys."""
        old_parts: Any = old
        new_parts: Any = new
        for (name, _), before, after in zip(self._modules, old_parts[0], new_parts[0], strict=True):
            if before != after:
                was: dict[str, Any] = dict(before)
                now: dict[str, Any] = dict(after)
                changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
                return f"{name or 'model'}.{changed[0]} changed from {was.get(changed[0])!r} to {now.get(changed[0])!r}"
        for number, (before, after) in enumerate(zip(old_parts[1], new_parts[1], strict=True)):
            if before != after:
                return f"options of parameter group {number} changed"
        return "autocast was switched" if old[2] != new[2] else "nothing changed"

    def _parameter_places(self) -> list[tuple[dict[str, Any], str, str, nn.Parameter, bool]]:
        return [
            (table, key, f"{prefix}.{key}" if prefix else key, parameter, parameter.requires_grad)
            for prefix, module in self._modules
            for table in [module._parameters]  # pyright: ignore[reportPrivateUsage]  # a copy would not show changes
            for key, parameter in table.items()
            if parameter is not None
        ]

    def _child_places(self) -> list[tuple[dict[str, Any], str, str, nn.Module]]:
        return [
            (table, key, f"{prefix}.{key}" if prefix else key, child)
            for prefix, module in self._modules
            for table in [module._modules]  # pyright: ignore[reportPrivateUsage]  # a copy would not show changes
            for key, child in table.items()
            if child is not None
        ]

    def _groups(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]


def settled(guard: StepGuard, trace: Callable[[], T]) -> T:
    """Trace, and again if the model set itself up at its first call. Raises StepChanged if every call changes it."""
    start = guard.key()
    traced = trace()
    ready = guard.key()
    if ready == start:
        return traced
    traced = trace()
    if guard.key() != ready:
        raise StepChanged(
            f"the forward pass itself changes the model: {guard.describe_change(ready, guard.key())}. A compiled step"
            " does not run that Python again.\n  Keep such counters outside the model, or in a buffer."
        )
    return traced


_MODULE_ITS_OWN = frozenset(vars(nn.Module())) - {"training"}

_SMALL = 64
"""Collections of up to so many plain values are compared; larger ones are taken for data."""


def _plain_attributes(named: tuple[str, nn.Module]) -> tuple[tuple[str, Any], ...]:
    """A module's own numbers, strings, flags and small collections of them, and which tensors it holds."""
    found: list[tuple[str, Any]] = []
    for key, value in vars(named[1]).items():
        if key in _MODULE_ITS_OWN:
            continue
        if isinstance(value, _PLAIN):
            found.append((key, value))
        elif isinstance(value, Tensor):
            found.append((key, f"tensor {id(value):x}"))
        elif isinstance(value, list | tuple | dict | set) and (text := _plain_text(value)):
            found.append((key, text))
    return tuple(found)


def _plain_text(collection: Any) -> str | None:
    """A small collection of plain values as text; None for any other."""
    values: list[object] = list(collection.values() if hasattr(collection, "values") else collection)
    if len(values) > _SMALL or not all(isinstance(value, _PLAIN) for value in values):
        return None
    return str(collection)


def _baked_options(group: dict[str, Any]) -> tuple[Hashable, ...]:
    """A parameter group's options without the numbers that are live; of those, only which are there."""
    live = live_numbers(group)
    baked = tuple((key, value) for key, value in group.items() if isinstance(value, _PLAIN) and key not in live)
    own = tuple((key, value) for key, value in baked if key not in ("initial_lr", "max_lr", "min_lr", "max_momentum",
                                                                    "base_momentum"))  # fmt: skip
    return (own, tuple(live))


def _autocast_state() -> tuple[Hashable, ...]:
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
