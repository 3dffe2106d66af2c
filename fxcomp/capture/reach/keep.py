"""Find the tensors of a trace that the user's Python kept, and put back what was there.

    self.aux = [hidden]      model.aux
    losses.append(balance)   loss_fn's losses[0]

Such a tensor is fake, and a compiled step would not put another one there. Symbols for sizes are put back in silence:
they stand for numbers of the user's batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.reach.base import MISSING, Place
from fxcomp.capture.reach.calls import ClassPlace, FunctionPlace
from fxcomp.capture.reach.places import COLLECTIONS, NamespacePlace
from fxcomp.capture.reach.walk import DEPTH, Reach

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Before:
    """What was in everything that was reached: shallow copies."""

    def __init__(self, reach: Reach):
        self._tables: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        self._rows: list[tuple[str, Any, list[Any]]] = []
        self._slots: list[tuple[str, Any, str, Any]] = []
        for place in reach.places:
            self._copy(place)
        # Tracing runs in-place operators of other modules than the model on the one number that a tensor holds.
        self._single = [(tensor, tensor.detach().clone()) for tensor in reach.tensors if tensor.numel() == 1]

    def put_back(self) -> list[str]:
        """Take every traced value out again; returns where tensors were, in the order of reaching."""
        found: list[str] = []
        for name, table, before in self._tables:
            found += _clean_table(name, table, before)
        for name, row, before in self._rows:
            found += _clean_row(name, row, before)
        for name, owner, key, before in self._slots:
            value = _read(owner, key)
            if value is not before and (kept := _what_is_kept(value)):
                _write(owner, key, before)
                found += [name] * (kept == "tensor")
        with torch.no_grad():
            for tensor, value in self._single:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        return found

    def _copy(self, place: Place) -> None:
        owner: Any = place.owner
        if _is(owner, dict):
            self._tables.append((f"{place.name}[{{!r}}]", owner, dict(_items(owner))))
        elif _is(owner, (list, set, deque)):
            self._rows.append((place.name, owner, list(owner)))
        if not isinstance(place, NamespacePlace | ClassPlace) and type(owner).__dictoffset__:
            attributes: dict[str, Any] = owner.__dict__
            self._tables.append((f"{place.name}.{{}}", attributes, dict(attributes)))
        if isinstance(place, FunctionPlace):
            cells = zip(place.owner.__code__.co_freevars, place.owner.__closure__ or (), strict=True)
            self._slots += [
                (f"{place.called}'s {key}", c, "cell_contents", _read(c, "cell_contents")) for key, c in cells
            ]
        for held, key in place.slots():
            if not key.startswith("__") and key != "cell_contents":
                within = held.get("__name__", place.name) if _is(held, dict) else place.name
                self._slots.append((f"{within}.{key}", held, key, _read(held, key)))


def _clean_table(name: str, table: dict[Any, Any], before: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in [(key, value) for key, value in _items(table) if before.get(key, MISSING) is not value]:
        if kept := _what_is_kept(value):
            if key in before:
                table[key] = before[key]
            else:
                del table[key]
            if kept == "tensor":
                yield name.format(key)


def _items(table: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """What a dict holds; a subclass may make something new of it whenever a value is asked for."""
    return dict[Any, Any].items(table)


def _clean_row(name: str, row: Any, before: list[Any]) -> Iterator[str]:
    known = set(map(id, before))
    kept = {i: what for i, value in enumerate(row) if id(value) not in known and (what := _what_is_kept(value))}
    if kept:
        row.clear()
        (row.update if _is(row, set) else row.extend)(before)
    yield from (f"{name}[{i}]" for i, what in kept.items() if what == "tensor")


def _what_is_kept(value: Any, depth: int = DEPTH) -> str:
    """`tensor` or `size` if a value is of a trace or holds something that is; empty if not."""
    if isinstance(value, Tensor):
        return "tensor" if compat.is_fake(value) else ""
    if isinstance(value, _SYMBOLS):
        return "size"
    if depth == 0:
        return ""
    return max((_what_is_kept(part, depth - 1) for part in _parts(value)), default="")


def _parts(value: Any) -> Iterable[Any]:
    if _is(value, dict):
        yield from (part for _, part in _items(value))
    elif _is(value, COLLECTIONS):
        yield from value
    if _is(value, FunctionType):
        yield from (_read(cell, "cell_contents") for cell in value.__closure__ or ())
    elif _is(value, partial):
        yield from (*value.args, *value.keywords.values())
    elif not _is(value, type) and type(value).__dictoffset__:
        attributes: dict[str, Any] = value.__dict__
        yield from attributes.values()


def _is(value: object, kinds: type | tuple[type, ...]) -> bool:
    """isinstance, which tells the type checker nothing: what is reached may be anything."""
    return isinstance(value, kinds)


def _read(owner: Any, key: str) -> Any:
    if _is(owner, dict):
        return owner.get(key, MISSING)
    try:
        return getattr(owner, key, MISSING)
    except ValueError:  # a closure's cell that is empty
        return MISSING


def _write(owner: Any, key: str, value: Any) -> None:
    if _is(owner, dict):
        if value is MISSING:
            del owner[key]
        else:
            owner[key] = value
    elif value is MISSING:
        delattr(owner, key)
    else:
        setattr(owner, key, value)
