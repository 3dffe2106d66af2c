"""Everything that holds values which traced Python can read: modules, functions, classes, objects and collections.

A place tells what it holds, under which label, and which live views and slots show cheaply that it holds something
else.
"""

# Tables of a module are private, and have no public way in; what is reached may be anything.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fxcomp.reach.code import is_library, named_in

MISSING = object()
"""What a slot holds that is not there."""

LARGE = 1000
"""Collections of up to so many items are compared item by item; larger ones are taken for data."""

Held = Iterable[tuple[str, Any]]
View = Collection[Any]
Slot = tuple[Any, str]
"""An owner and a key of it, or an attribute where the owner is no dict."""


class Place(Protocol):
    """Something that holds values."""

    @property
    def name(self) -> str:
        """What stands before the labels of its values."""
        ...

    @property
    def owner(self) -> object:
        """The object itself."""
        ...

    def held(self) -> Held:
        """The values, each with its label."""
        ...

    def views(self) -> Iterable[View]:
        """Live views of which every item is compared by identity."""
        ...

    def slots(self) -> Iterable[Slot]:
        """Single values that are compared by identity."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """The attributes and keys that followed code names; grows while code is followed."""

    found: set[str]

    def of(self, table: Mapping[str, Any]) -> list[str]:
        """The keys of a table that code names, in the table's order."""
        return [key for key in table if key in self.found]


@dataclass(frozen=True, slots=True)
class Signature:
    """What is baked in of a tensor that is an input: everything but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Signature:
        stride = tensor.stride() if tensor.layout is torch.strided else ()
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}{grad}"


# Modules

_ITS_OWN = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}) - {"training"}
"""Attributes that are looked at as tables, or not at all. Recurrent layers keep their parameters a second time."""

_TABLES = ("_parameters", "_buffers", "_modules")

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""Hooks that a step runs. Hooks on state dicts are not among them."""


class ModulePlace:
    """A module: its attributes, tables and hooks.

    Parameters of the trained model are inputs and may not be exchanged, so they are not among the values; its buffers
    are inputs that may be, if what is baked in of them stays.
    """

    def __init__(self, name: str, owner: nn.Module, is_trained: bool):
        self.name, self.owner, self._is_trained = name, owner, is_trained

    def held(self) -> Held:
        module, table = self.owner, vars(self.owner)
        found: list[tuple[str, Any]] = [(f".{key}", value) for key, value in table.items() if key not in _ITS_OWN]
        found.sort(key=lambda pair: pair[0])
        found += [(f".{key}", child) for key, child in module._modules.items()]
        if self._is_trained:
            found += [(f".{key}", b if b is None else Signature.of(b)) for key, b in module._buffers.items()]
        else:
            found += [(f".{key}", tensor) for t in (module._parameters, module._buffers) for key, tensor in t.items()]
        for hooks, kind in _HOOKS.items():
            found += [(f"'s {kind} {i}", hook) for i, hook in enumerate(table[hooks].values())]
        found.append(("'s class", type(module)))
        return found

    def views(self) -> Iterable[View]:
        table = vars(self.owner)
        yield table.values()
        yield table.keys()
        yield from (table[name].values() for name in (*_TABLES, *_HOOKS) if table[name])
        if table["_buffers"]:
            yield table["_buffers"].keys()  # by which they are found before each step

    def empty(self) -> Iterable[View]:
        """Tables in which there is nothing yet."""
        table = vars(self.owner)
        return [table[name] for name in (*_TABLES, *_HOOKS) if not table[name]]

    def slots(self) -> Iterable[Slot]:
        return ((self.owner, "__class__"),)


# Functions and classes


class FunctionPlace:
    """A function: its code, defaults, closure, and the globals that its code names."""

    name = ""

    def __init__(self, name: str, owner: FunctionType, names: Names):
        self.called, self.owner, self._names = name, owner, names
        self._named = named_in(owner.__code__)
        names.found.update(self._named.names)

    def held(self) -> Held:
        function, name = self.owner, self.called
        yield f"{name}'s code", function.__code__
        for i, value in enumerate(function.__defaults__ or ()):
            yield f"{name}'s default {i}", value
        for key, value in (function.__kwdefaults__ or {}).items():
            yield f"{name}'s default {key}", value
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield f"{name}'s {key}", _contents(cell)
        for key in self._names.of(vars(function)):
            yield f"{name}.{key}", vars(function)[key]
        module = function.__globals__.get("__name__", "?")
        for key in self._globals():
            yield f"{module}.{key}", function.__globals__[key]
        for key in self._named.imports:
            if key in sys.modules:
                yield f"the module {key}", sys.modules[key]

    def views(self) -> Iterable[View]:
        if self.owner.__kwdefaults__:
            yield self.owner.__kwdefaults__.values()
        if vars(self.owner):
            yield vars(self.owner).values()

    def slots(self) -> Iterable[Slot]:
        function = self.owner
        yield from ((function, key) for key in ("__code__", "__defaults__", "__kwdefaults__"))
        yield from ((cell, "cell_contents") for cell in function.__closure__ or ())
        table = function.__globals__
        is_installed = "site-packages" in function.__code__.co_filename
        for key in self._globals():
            if not (is_installed and isinstance(table[key], FunctionType | BuiltinFunctionType | type | ModuleType)):
                yield table, key

    @property
    def lines(self) -> tuple[tuple[str, str, int], ...]:
        """Where it reads a global: its name, the attribute that follows, the line."""
        return self._named.lines

    def _globals(self) -> list[str]:
        return [key for key in self._named.globals if key in self.owner.__globals__]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


_CALLED = ("forward", "backward", "setup_context", "__call__", "__init__", "__post_init__", "__getattr__",
           "__getattribute__", "__getitem__", "__iter__", "__len__", "__enter__", "__exit__")  # fmt: skip
"""Methods that are called without being named."""

_DESCRIBED = (staticmethod, classmethod, property, cached_property)


class ClassPlace:
    """A class: the methods that code names or calls unnamed, and the class attributes that it names."""

    name = ""

    def __init__(self, owner: type, names: Names):
        self.owner, self._names = owner, names
        self._is_library = is_library(owner.__module__)

    def held(self) -> Held:
        for key, value in self._found():
            for part in _functions(value):
                yield f"{self.owner.__qualname__}.{key}", part

    def views(self) -> Iterable[View]:
        return ()

    def slots(self) -> Iterable[Slot]:
        for key, value in self._found():
            if not isinstance(value, classmethod) and getattr(self.owner, key, None) is getattr(self.owner, key, None):
                yield self.owner, key

    def _found(self) -> Iterable[tuple[str, Any]]:
        if self._is_library:
            if isinstance(getattr(self.owner, "forward", None), FunctionType):
                yield "forward", self.owner.forward  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            return
        tables = [vars(base) for base in self.owner.__mro__ if not is_library(base.__module__)]
        seen: set[str] = set()
        for table in tables:
            for key in [*(name for name in _CALLED if name in table), *self._names.of(table)]:
                if key not in seen:
                    seen.add(key)
                    yield key, table[key]


def _functions(value: Any) -> Iterable[Any]:
    """What runs where a class attribute is read; the value itself if nothing does."""
    if isinstance(value, staticmethod | classmethod):
        yield cast("Any", value).__func__
    elif isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if f is not None)
    elif isinstance(value, cached_property):
        yield cast("Any", value).func
    else:
        yield value


class CallPlace:
    """A bound method or a functools.partial."""

    def __init__(self, name: str, owner: Any):
        self.name, self.owner = name, owner

    def held(self) -> Held:
        if isinstance(self.owner, MethodType):
            return (("", self.owner.__func__), (" of", self.owner.__self__))
        found = [(f"({i})", value) for i, value in enumerate(self.owner.args)]
        return [("", self.owner.func), *found, *((f"({key}=)", value) for key, value in self.owner.keywords.items())]

    def views(self) -> Iterable[View]:
        return () if isinstance(self.owner, MethodType) else (self.owner.keywords.values(),)

    def slots(self) -> Iterable[Slot]:
        return ()


# Objects and collections


class ObjectPlace:
    """A plain object, as a configuration: those attributes that code names; all where methods that nobody reads do."""

    def __init__(self, name: str, owner: Any, names: Names):
        self.name, self.owner, self._names = name, owner, names
        self._table: dict[str, Any] = getattr(owner, "__dict__", {})
        makes_up = getattr(cast("Any", type(owner)), "__getattr__", None)
        is_torchs = type(owner).__module__.startswith("torch.")  # whose methods are not followed
        self._is_whole = is_torchs or (isinstance(makes_up, FunctionType) and not is_library(makes_up.__module__))
        self._members = [s for base in type(owner).__mro__ for s in _slots_of(base) if s in names.found]

    def held(self) -> Held:
        yield "'s class", type(self.owner)
        for key in sorted(self._keys()):
            yield f".{key}", self._table[key]
        for key in self._members:
            yield f".{key}", getattr(self.owner, key, MISSING)

    def views(self) -> Iterable[View]:
        if self._table:
            yield self._table.keys()

    def slots(self) -> Iterable[Slot]:
        yield self.owner, "__class__"
        yield from ((self._table, key) for key in self._keys())
        yield from ((self.owner, key) for key in self._members)

    def _keys(self) -> list[str]:
        if self._is_whole and len(self._table) <= LARGE:
            return list(self._table)
        return self._names.of(self._table)


def _slots_of(base: type) -> tuple[str, ...]:
    slots: Any = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


_Table = dict[Any, Any]


class CollectionPlace:
    """A list, tuple, set or dict, and the attributes of one that has some.

    What a dict holds is read past its class: a subclass may import or make something whenever a value is asked for.
    """

    def __init__(self, name: str, owner: Any, names: Names):
        self.name, self.owner = name, owner
        self._attributes = ObjectPlace(name, owner, names) if type(owner).__dictoffset__ else None

    def held(self) -> Held:
        owner = self.owner
        yield "'s class", type(owner)
        if isinstance(owner, dict):
            yield from ((f"[{_text(key)}]", value) for key, value in _Table.items(cast("_Table", owner)))
        elif isinstance(owner, Set):
            yield from ((f" with {text}", True) for text in sorted(map(_text, cast("Set[Any]", owner))))
        else:
            yield from ((f"[{i}]", value) for i, value in enumerate(owner))
        if self._attributes is not None:
            yield from self._attributes.held()

    def views(self) -> Iterable[View]:
        owner = self.owner
        if isinstance(owner, dict):
            yield _Table.values(cast("_Table", owner))
            yield _Table.keys(cast("_Table", owner))
        elif not isinstance(owner, tuple | frozenset):
            yield owner
        if self._attributes is not None:
            yield from self._attributes.views()

    def slots(self) -> Iterable[Slot]:
        return self._attributes.slots() if self._attributes is not None else ()


def _text(key: Any) -> str:
    return repr(key) if isinstance(key, str | int | float | bool | None) else f"{type(key).__name__} {id(key):x}"


class NamespacePlace:
    """A module of the user's: those of its globals that code names."""

    def __init__(self, owner: ModuleType, names: Names):
        self.name, self.owner, self._names = owner.__name__, owner, names

    def held(self) -> Held:
        return [(f".{key}", vars(self.owner)[key]) for key in self._names.of(vars(self.owner))]

    def views(self) -> Iterable[View]:
        return ()

    def slots(self) -> Iterable[Slot]:
        return [(vars(self.owner), key) for key in self._names.of(vars(self.owner))]


COLLECTIONS = (list, tuple, set, frozenset, dict, deque)


def place_of(value: Any, name: str, names: Names, trained: Set[int]) -> Place | None:
    """The place that a value is; None for one that holds nothing, or into which nobody looks."""
    if isinstance(value, nn.Module):
        return ModulePlace(name, value, id(value) in trained)
    if isinstance(value, FunctionType):
        return None if is_library(value.__globals__.get("__name__")) else FunctionPlace(name, value, names)
    if isinstance(value, MethodType | partial):
        return CallPlace(name, value)
    if isinstance(value, type):
        return ClassPlace(value, names)
    if isinstance(value, ModuleType):
        return None if is_library(value.__name__) else NamespacePlace(value, names)
    if isinstance(value, COLLECTIONS):
        return CollectionPlace(name, value, names) if len(cast("Collection[Any]", value)) <= LARGE else None
    kind = cast("Any", type(value))
    if kind.__module__.partition(".")[0] in ("fxcomp", "logging", "threading", "io", "re", "enum"):
        return None
    if kind.__dictoffset__ or any(map(_slots_of, kind.__mro__)):
        return ObjectPlace(name, value, names)
    return None
