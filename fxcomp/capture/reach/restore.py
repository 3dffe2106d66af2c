"""Undo what the user's Python did while it was traced, and refuse what a compiled step would not do again.

    self.aux = [hidden]      kept in model.aux: a fake tensor, taken out again and refused by name
    losses.append(balance)   kept in loss_fn's losses[0], likewise
    self.last = loss.item()  kept in model.last: a number that only the step knows, likewise
    random.random()          the state is put back; drawing is refused, at its line
    next(iterator)           cannot be put back; refused alike

Symbols for sizes that were kept are taken out in silence: they stand for numbers of the user's batch.
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, GeneratorType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fxcomp import compat, errors
from fxcomp.capture.reach.callables import ClassPlace, FunctionPlace
from fxcomp.capture.reach.places import COLLECTIONS, MISSING, ModulePlace, NamespacePlace, Place, is_a, items, read
from fxcomp.capture.reach.walk import DEPTH, Reach, has_no_parts, is_iterator, walk


@contextmanager
def untouched(model: nn.Module, loss_fn: Callable[..., Any]) -> Generator[None]:
    """Leave everything that Python can reach as it was, and refuse a trace that keeps tensors or draws with Python.

    Around the whole trace: inside it, copies of tensors would be part of it.
    """
    reach = walk(model, {"loss_fn": loss_fn})
    before, draws = _HeldContent(reach), _Generators(reach)
    kept: list[tuple[str, str]] = []
    moved: list[str] = []
    try:
        yield
    finally:
        kept, moved = before.put_back(), draws.put_back()
    if moved:
        line = draws.line(moved)
        raise errors.DrawsInPython(
            f"the loss function or a forward pass seeds or draws from {' and '.join(moved)}"
            f"{f', at {line}' if line else ''}: a compiled step does not run that Python again, and would repeat"
            " today's numbers for ever.\n"
            "  Draw outside and pass the numbers in the batch, as tensors; or draw with torch.rand, and select with"
            " torch.where."
        )
    if kept:
        raise errors.CaptureFailed(
            f"the forward pass stores a {kept[0][0]} in {kept[0][1]!r}, which a compiled step would not do again.\n"
            "  Register it as a buffer, or return it beside the loss: (loss, aux). A module outside the model writes"
            " its buffers in place: buffer.copy_(value). If the model only sets itself up at its first call, call it"
            " once before compile_step."
        )


# Kept tensors


class _HeldContent:
    """Shallow copies of everything that was reached."""

    def __init__(self, reach: Reach):
        self._tables: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        self._rows: list[tuple[str, Any, list[Any]]] = []
        self._slots: list[tuple[str, Any, str, Any]] = []
        for place in reach.places:
            self._copy(place)

    def put_back(self) -> list[tuple[str, str]]:
        """Take every traced value out again; returns tensors and numbers, and where, in the order of reaching."""
        found: list[tuple[str, str]] = []
        for name, table, before in self._tables:
            found += _clean_table(name, table, before)
        for name, row, before in self._rows:
            found += _clean_row(name, row, before)
        for name, owner, key, before in self._slots:
            value = read(owner, key)
            if value is not before and (kept := _what_is_kept(value)):
                _write(owner, key, before)
                found += [(kept, name)] * (kept != "known")
        return found

    def _copy(self, place: Place) -> None:
        owner: Any = place.owner
        if is_a(owner, dict):
            self._tables.append((f"{place.name}[{{!r}}]", owner, dict(items(owner))))
        elif is_a(owner, (list, set, deque)):
            self._rows.append((place.name, owner, list(owner)))
        if isinstance(place, ModulePlace):
            buffers = owner._buffers
            self._tables.append((f"{place.name}.{{}}", buffers, dict(buffers)))
        if not isinstance(place, NamespacePlace | ClassPlace) and type(owner).__dictoffset__:
            attributes: dict[str, Any] = owner.__dict__
            self._tables.append((f"{place.name}.{{}}", attributes, dict(attributes)))
        if isinstance(place, FunctionPlace):
            for key, cell in place.cells():
                self._slots.append((f"{place.called}'s {key}", cell, "cell_contents", read(cell, "cell_contents")))
        for held, key in place.slots():
            if not key.startswith("__") and key != "cell_contents":
                within = held.get("__name__", place.name) if is_a(held, dict) else place.name
                self._slots.append((f"{within}.{key}", held, key, read(held, key)))


def _clean_table(name: str, table: dict[Any, Any], before: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in [(key, value) for key, value in items(table) if before.get(key, MISSING) is not value]:
        if kept := _what_is_kept(value):
            if key in before:
                table[key] = before[key]
            else:
                del table[key]
            if kept != "known":
                yield kept, name.format(key)


def _clean_row(name: str, row: Any, before: list[Any]) -> Iterator[tuple[str, str]]:
    known = set(map(id, before))
    kept = {i: what for i, value in enumerate(row) if id(value) not in known and (what := _what_is_kept(value))}
    if kept:
        row.clear()
        (row.update if is_a(row, set) else row.extend)(before)
    yield from ((what, f"{name}[{i}]") for i, what in kept.items() if what != "known")


def _what_is_kept(value: Any, depth: int = DEPTH) -> str:
    """Say `tensor`, `number` or `known` of what is of a trace or holds something that is; empty if not.

    A number was read of a tensor, and only the step knows it; a size is known before.
    """
    if isinstance(value, Tensor):
        return "tensor" if compat.is_fake(value) else ""
    if isinstance(value, compat.SYMBOLS):
        return "number" if compat.unbacked_symbols(value) else "known"
    if depth == 0:
        return ""
    return max((_what_is_kept(part, depth - 1) for part in _parts(value)), default="")


def _parts(value: Any) -> Iterable[Any]:
    if is_a(value, dict):
        yield from (part for _, part in items(value))
    elif is_a(value, COLLECTIONS):
        yield from value
    if is_a(value, FunctionType):
        yield from (read(cell, "cell_contents") for cell in value.__closure__ or ())
    elif is_a(value, partial):
        yield from (*value.args, *value.keywords.values())
    elif not is_a(value, type) and type(value).__dictoffset__:
        attributes: dict[str, Any] = value.__dict__
        yield from attributes.values()


def _write(owner: Any, key: str, value: Any) -> None:
    if is_a(owner, dict):
        if value is MISSING:
            del owner[key]
        else:
            owner[key] = value
    elif value is MISSING:
        delattr(owner, key)
    else:
        setattr(owner, key, value)


# Random numbers


_GLOBAL: Mapping[str, Any] = {
    "random": random,
    "numpy.random": np.random,
    "torch.default_generator": torch.default_generator,  # draws are nodes: this one stays, but for seeding unseen
}


class _Generators:
    """The states of all generators and iterators that Python code can reach."""

    def __init__(self, reach: Reach):
        self._reach = reach
        self._generators: Mapping[str, Any] = {**_GLOBAL, **reach.generators}
        self._before = {name: _state(generator) for name, generator in self._generators.items()}

    def put_back(self) -> list[str]:
        """Restore every state; returns the names of those that had moved."""
        moved = [n for n, g in self._generators.items() if _comparable(_state(g)) != _comparable(self._before[n])]
        for name in moved:
            _restore(self._generators[name], self._before[name])
        return moved

    def line(self, moved: Sequence[str]) -> str:
        """Name the first line that was followed and draws from these, as `file:line`; empty if none is known."""
        for place in self._reach.places:
            if isinstance(place, FunctionPlace):
                for name, attribute, line in place.lines:
                    if _global_generator(place.owner.__globals__.get(name), attribute) in moved:
                        return f"{place.owner.__code__.co_filename}:{line}"
        return ""


def _global_generator(value: Any, attribute: str) -> str | None:
    """Name the global generator that a global and its attribute stand for."""
    if isinstance(value, ModuleType):
        known = {id(random): "random", id(np.random): "numpy.random"}
        return "numpy.random" if value is np and attribute == "random" else known.get(id(value))
    of = getattr(value, "__self__", None)
    if isinstance(of, np.random.RandomState):
        return "numpy.random"
    return "random" if isinstance(of, random.Random) else None


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.SystemRandom):
        return None  # it has none
    if isinstance(generator, GeneratorType):
        frame = generator.gi_frame
        return frame and (frame.f_lasti, [repr(v) for v in frame.f_locals.values() if has_no_parts(v)])
    if is_iterator(generator):
        return operator.length_hint(generator), repr(generator)  # itertools.count tells where it is
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if is_iterator(generator):
        return
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _comparable(state: Any) -> Hashable:
    """Turn a state into one that compares by value: NumPy's hold arrays."""
    if isinstance(state, Mapping):
        return tuple((key, _comparable(value)) for key, value in cast("Mapping[str, Any]", state).items())
    if isinstance(state, np.ndarray):
        return cast("np.ndarray[Any, Any]", state).tobytes()
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, tuple | list):
        return tuple(map(_comparable, cast("tuple[Any, ...]", state)))
    return state
