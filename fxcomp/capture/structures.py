"""Flatten batches and auxiliary results: pytrees with dataclasses and collections that torch does not register.

    Batch(x=%x, y=%y)                        a dataclass
 -->
    [%x, %y]    Batch is rebuilt by copyreg.__newobj__; its state is a dict of x and y

Objects are split and rebuilt as by copy.copy, without the constructor. Attributes of a mapping
(transformers.BatchEncoding) without a tensor or plain value are omitted.
"""

# untyped copy protocol
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


def is_plain(value: object) -> bool:
    """Return whether a value may be a constant. NumPy scalars may not, because operators do not accept them."""
    return isinstance(value, _PLAIN) and type(value).__module__ != "numpy"


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a tree; `pytree.tree_unflatten` restores the classes."""
    leaves, structure = pytree.tree_flatten(tree)
    return pytree.tree_flatten(_opened(tree)) if any(map(_is_closed, leaves)) else (leaves, structure)


def flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(_opened(tree))[0]]


@dataclass(frozen=True, slots=True)
class _Opened:
    """Object split into parts, whose own parts are split too."""

    how: tuple[Any, ...]
    """Function that makes the object, then its first arguments, as far as they are callable."""
    parts: list[Any]
    """Other arguments, state, list items and mapping items."""


def _is_closed(leaf: Any) -> bool:
    if isinstance(leaf, Tensor | type) or is_plain(leaf):
        return False
    return dataclasses.is_dataclass(leaf) or isinstance(leaf, Mapping | tuple | list)


def _opened(tree: Any) -> Any:
    return pytree.tree_map(_open, tree)


def _open(leaf: Any) -> Any:
    if not _is_closed(leaf):
        return leaf
    try:
        # A mappingproxy cannot be copied, but its dict can.
        reduced: Any = (type(leaf), (dict(leaf),)) if type(leaf) is MappingProxyType else leaf.__reduce_ex__(4)
    except TypeError:  # an unsupported leaf, which raises later
        return leaf
    make, arguments, state, items, pairs = cast("Any", (*reduced, None, None, None)[:5])
    if isinstance(leaf, Mapping) and isinstance(state, dict):
        state = {key: value for key, value in cast("dict[str, Any]", state).items() if _is_followed(value)}
    fixed = tuple(takewhile(callable, arguments))
    parts = [arguments[len(fixed) :], state, list(items or ()), dict(pairs or ())]
    return _Opened((make, *fixed), [_opened(part) for part in parts])


def _is_followed(value: Any) -> bool:
    leaves = flatten(value)[0]
    return not leaves or any(isinstance(leaf, Tensor) or is_plain(leaf) for leaf in leaves)


def _close(parts: Iterable[Any], how: Any) -> Any:
    arguments, state, items, pairs = parts
    made: Any = how[0](*how[1:], *arguments)
    if state is not None and hasattr(type(made), "__setstate__"):
        made.__setstate__(state)
    else:
        for attributes in state if isinstance(state, tuple) else (state,):
            for name, value in (attributes or {}).items():
                object.__setattr__(made, name, value)
    for item in items:
        made.append(item)
    for key, value in pairs.items():
        made[key] = value
    return made


class _Unnamed:
    """Key of an object's part; an empty string in the path of a leaf."""

    def __str__(self) -> str:
        return ""


pytree.register_pytree_node(
    _Opened,
    lambda opened: (opened.parts, opened.how),
    _close,
    flatten_with_keys_fn=lambda opened: ([(cast("Any", _Unnamed()), part) for part in opened.parts], opened.how),
)
