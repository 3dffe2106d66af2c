"""Follow values from a loss function and a model to everything that traced Python can read.

    loss_fn ── code, defaults, closure, globals that its code names ──► functions, criteria, configurations, teachers
    model ──── every module: attributes, buffers, hooks, its class's forward ──► helpers, configurations

Functions are followed through functions that they name, but not into torch, NumPy or Python's library. Of a plain
object only those attributes count that some followed code names: a trainer's history is not the step's business.
"""

from __future__ import annotations

import operator
import random
import threading
from collections import deque
from collections.abc import Collection, Hashable, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fxcomp.capture.reach.callables import (
    CACHED,
    CallPlace,
    ClassPlace,
    FunctionPlace,
    WrapperPlace,
    constructors,
    is_bound,
)
from fxcomp.capture.reach.iterators import is_iterator
from fxcomp.capture.reach.places import (
    BUFFERS,
    COLLECTIONS,
    LARGE,
    MISSING,
    AskedPlace,
    CollectionPlace,
    ModulePlace,
    Names,
    NamespacePlace,
    ObjectPlace,
    Place,
    Signature,
    content,
    has_no_parts,
    has_table,
    is_a,
    is_library,
    slots_of,
)
from fxcomp.capture.reach.tensor_attributes import TensorPlace

DEPTH = 10
"""The most plain objects and collections between a value and the module, function or class that leads to it."""

CALLS = 6
"""The most functions between a value and the loss function, or a forward pass."""

INSTALLED = 4
"""A function of an installed package counts for this many: little below a forward pass or a user's call changes."""

PLACES = 2_000
"""The most places other than modules that are followed; later ones are compared by identity."""

_ROUNDS = 3
"""The most times that places are read: code that is found last may name attributes that were passed by first."""

_NAMES: MutableMapping[nn.Module, dict[object, tuple[frozenset[str], frozenset[str]]]] = WeakIdKeyDictionary()
"""Names that the last walk from a model began with and the names that are known, by the code of the loss function."""

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class Same:
    """An object that stands for itself alone; lives as long as it may be compared."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __str__(self) -> str:
        return f"a {type(self.value).__name__}" if self.value is not MISSING else "nothing"


class Plain(NamedTuple):
    """A plain value: its type counts, and nan is nan."""

    kind: type
    text: str

    def __str__(self) -> str:
        return self.text if len(self.text) <= 60 else f"{self.text[:57]}..."


class At(NamedTuple):
    """A place, by the name under which it was reached first."""

    name: str

    def __str__(self) -> str:
        return self.name or "a function"


Facts = tuple[tuple[str, Hashable], ...]


class NeedsWalk(Exception):
    """A value that was not reached before."""


@dataclass(slots=True)
class Reach:
    """The places that were reached, with what they hold, as facts that can be compared later."""

    places: list[Place] = field(default_factory=list[Place])
    facts: list[Facts] = field(default_factory=list[Facts])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    bare: list[TensorPlace] = field(default_factory=list[TensorPlace])
    """Tensors that have no attributes yet, the trained model's among them."""
    buffers: list[Any] = field(default_factory=list[Any])
    generators: dict[str, Any] = field(default_factory=dict[str, Any])
    names: Names = field(default_factory=lambda: Names(set()))
    known: dict[int, Hashable] = field(default_factory=dict[int, Hashable])
    """Facts about objects with parts, by id; places and facts keep them alive."""

    def read(self, place: Place) -> Facts:
        """Read what a place holds now. Raises NeedsWalk if it holds a new object with parts."""
        return tuple((label, self.fact(value)) for label, value in place.held())

    def fact(self, value: Any) -> Hashable:
        """Describe a value. Raises NeedsWalk if it is new and has parts."""
        if has_no_parts(value):
            return Plain(cast("Any", type(value)), repr(value))
        if isinstance(value, Signature):
            return value
        known = self.known.get(id(value))
        if known is None:
            raise NeedsWalk
        if isinstance(value, Tensor):
            return known, Signature.of(value)
        if isinstance(value, BUFFERS):
            return known, content(value)
        return known


@dataclass(frozen=True, slots=True)
class _FoundObject:
    """A place, and how far it lies from where Python begins."""

    place: Place | None
    depth: int
    calls: int


def walk(model: nn.Module, roots: Mapping[str, Any]) -> Reach:
    """Follow everything that a model's forward passes and the roots reach.

    Walks from the same names find the same places, in one order: the names of the last walk serve until there are new.
    """
    code = getattr(roots.get("loss_fn"), "__code__", None)
    begun, known = _NAMES.setdefault(model, {}).get(code, (frozenset[str](), frozenset[str]()))
    reach = _ReachWalk(model, begun).run(roots)
    if not reach.names.found <= known:
        begun = frozenset(_ReachWalk(model, reach.names.found).run(roots, _ROUNDS).names.found)
        reach = _ReachWalk(model, begun).run(roots)  # places are named by the shortest ways to them
    _NAMES[model][code] = begun, known | reach.names.found
    return reach


class _ReachWalk:
    """One walk, breadth first: an object that is reached on several ways is named by the shortest."""

    def __init__(self, model: nn.Module, names: Set[str]):
        self._reach = Reach(names=Names(set(names)))
        self._trained = frozenset(map(id, model.modules()))
        self._model = model
        self._queue: deque[_FoundObject] = deque()
        self._others = 0
        self._with_attributes: set[int] = set()

    def run(self, roots: Mapping[str, Any], rounds: int = 1) -> Reach:
        for name, value in {"model": self._model, **roots}.items():
            self._fact(value, name, _FoundObject(None, 0, 0))
        names = self._reach.names.found
        for _ in range(rounds):
            before, read = len(names), list[_FoundObject]()
            self._reach.places.clear()
            self._reach.facts.clear()
            while self._queue:
                read.append(found := self._queue.popleft())
                self._read(found)
            if len(names) == before:
                break
            self._queue.extend(read)  # names that were found since select more of what these hold
        return self._reach

    def _read(self, found: _FoundObject) -> None:
        place = found.place
        assert place is not None, "only the roots are held by nothing"
        held = list(place.held())
        facts = tuple((label, self._fact(value, f"{place.name}{label}", found)) for label, value in held)
        self._reach.places.append(place)
        self._reach.facts.append(facts)
        if isinstance(place, ModulePlace) and id(place.owner) in self._trained:
            for key, tensor in place.inputs():
                self._meet_attributes(tensor, f"{place.name}.{key}", found)
        for kind in (value for label, value in held if isinstance(value, type) and label != "'s class"):
            for label, function in constructors(kind):
                self._fact(function, f"{kind.__qualname__}{label}", found)

    def _fact(self, value: Any, name: str, holder: _FoundObject) -> Hashable:
        try:
            return self._reach.fact(value)
        except NeedsWalk:
            self._reach.known[id(value)] = self._meet(value, name, holder)
            return self._reach.fact(value)

    def _meet(self, value: Any, name: str, holder: _FoundObject) -> Hashable:
        """Describe a value that was not reached before, and follow it later if it is a place."""
        reach = self._reach
        if isinstance(value, Tensor):
            reach.tensors.append(value)
            self._meet_attributes(value, name, holder)
            return Same(value)
        if isinstance(value, BUFFERS):
            reach.buffers.append(value)
            if not _has_objects(value):
                return Same(value)
        if isinstance(value, GENERATORS) or is_iterator(value):
            if value is not random.random.__self__ and value is not np.random.rand.__self__:  # everybody's
                reach.generators[name] = value
            if not is_iterator(value):
                return Same(value)
        place = place_of(value, name, reach.names, self._trained)
        if place is None or not self._may_follow(place, holder):
            return Same(value)
        if isinstance(place, ModulePlace | ClassPlace):
            below = isinstance(place, ClassPlace) and holder.calls >= INSTALLED
            self._queue.append(_FoundObject(place, 0, holder.calls + below * INSTALLED))
        elif isinstance(place, FunctionPlace):
            self._queue.append(_FoundObject(place, 0, holder.calls + (INSTALLED if place.is_installed else 1)))
        else:
            self._queue.append(_FoundObject(place, holder.depth + 1, holder.calls))
        is_itself = isinstance(place, ClassPlace | AskedPlace) or isinstance(value, Enum) or is_iterator(value)
        return Same(value) if is_itself else At(name)

    def _meet_attributes(self, tensor: Tensor, name: str, holder: _FoundObject) -> None:
        if id(tensor) in self._with_attributes:
            return
        self._with_attributes.add(id(tensor))
        place = TensorPlace(name, tensor, self._reach.names)
        if not place.table:
            self._reach.bare.append(place)
        elif self._may_follow(place, holder):
            self._queue.append(_FoundObject(place, holder.depth + 1, holder.calls))

    def _may_follow(self, place: Place, holder: _FoundObject) -> bool:
        if isinstance(place, ModulePlace):
            return True
        self._others += 1
        return holder.depth < DEPTH and holder.calls <= CALLS and self._others <= PLACES


def _has_objects(value: Any) -> bool:
    return is_a(value, np.ndarray) and value.dtype == object and value.size <= LARGE


def place_of(value: Any, name: str, names: Names, trained: Set[int]) -> Place | None:
    """Make the place for a value; None if it holds nothing, or nothing that guards follow."""
    kind = cast("Any", type(value))
    if isinstance(value, torch.jit.ScriptModule):  # in C++, and no module of the trained model
        return None
    if isinstance(value, nn.Module):
        return ModulePlace(name, value, id(value) in trained)
    if isinstance(value, FunctionType):
        is_users = not is_library(value.__globals__.get("__name__", ""))
        return FunctionPlace(name, value, names) if is_users else WrapperPlace.around(name, value)
    if is_bound(value) or is_iterator(value):
        return CallPlace(name, value)
    if isinstance(value, type):
        return ClassPlace(value, names)
    if isinstance(value, ModuleType):
        return None if is_library(value.__name__) else NamespacePlace(value, names)
    if isinstance(value, AskedPlace.KINDS):
        return AskedPlace(name, value)
    if isinstance(value, operator.attrgetter | operator.methodcaller):
        names.found.update(str(part) for path in value.__reduce__()[1] for part in str(path).split("."))
        return None
    if isinstance(value, COLLECTIONS) or _has_objects(value):
        return CollectionPlace(name, value, names) if len(cast("Collection[Any]", value)) <= LARGE else None
    if isinstance(value, CACHED):
        return WrapperPlace.around(name, value)
    if isinstance(value, threading.Event):
        names.found.add("_flag")
    elif kind.__module__.partition(".")[0] in ("fxcomp", "logging", "threading", "io", "re", "enum"):
        return None
    if has_table(value) or any(map(slots_of, kind.__mro__)):
        return ObjectPlace(name, value, names)
    return None
