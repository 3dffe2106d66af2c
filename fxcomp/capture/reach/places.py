"""Places of values that traced Python can read: modules, objects and collections.

A place tells what it holds, under which label, and which live views and slots show cheaply that it holds something
else.
"""

# Tables of a module are private, and have no public way in; what is reached may be anything.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import array
import ctypes
import datetime
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import OrderedDict, UserList, UserString, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from queue import SimpleQueue
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, cast
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn

from fxcomp.capture.batch_type import PLAIN, kind_of

LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "triton", "fxcomp"}) - {"__main__"}
"""Their functions are not followed: nothing that a training loop changes is a global of theirs."""


def is_library(module: str | None) -> bool:
    """Ask if a module is torch's, NumPy's or Python's own."""
    return module is None or module.partition(".")[0] in LIBRARIES


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})

_PLAIN_TOO = (
    *(np.generic, torch.dtype, torch.device, torch.Size, slice, range),
    *(Fraction, Decimal, PurePath, UUID, datetime.date, datetime.time, datetime.timedelta),
)


def has_no_parts(value: object) -> bool:
    """Ask if a value is what it looks like: comparing it needs no walk."""
    kind = type(value)
    return kind in _PLAIN or (isinstance(value, _PLAIN_TOO) and is_library(kind.__module__))


MISSING = object()
"""The content of a slot that is not there."""

LARGE = 1000
"""Collections of up to so many items are compared item by item; larger ones are taken for data."""

BUFFERS = (np.ndarray, bytearray, memoryview, array.array, ctypes.c_int.__mro__[-2])
"""Values whose content is compared, for nothing else tells that it changed; the last one is the base of all of C's."""


def content(value: Any) -> bytes | None:
    """Read a buffer's content; None of large ones."""
    if isinstance(value, np.ndarray):  # of objects, their identities
        return cast("np.ndarray[Any, Any]", value).tobytes() if value.size <= LARGE else None
    return bytes(value) if memoryview(value).nbytes <= 8 * LARGE else None


Held = Iterable[tuple[str, Any]]
View = Collection[Any]
Slot = tuple[Any, str]
"""An owner and a key of it, or an attribute where the owner is no dict."""


class Place(ABC):
    """Something that holds values. Its name stands before their labels."""

    name: str
    owner: Any

    @abstractmethod
    def held(self) -> Held:
        """Give the values, each with its label."""

    def views(self) -> Iterable[View]:
        """Give live views of which every item is compared by identity."""
        return ()

    def slots(self) -> Iterable[Slot]:
        """Give single values that are compared by identity."""
        return ()


_TABLE = dict[str, Any]
"""Reads and writes a dict past its class."""


def read(owner: Any, key: str) -> Any:
    """Read a slot."""
    if is_a(owner, dict):
        return _TABLE.get(owner, key, MISSING)
    try:
        return getattr(owner, key, MISSING)
    except ValueError:  # a closure's cell that is empty
        return MISSING


def write(owner: Any, key: str, value: Any) -> None:
    """Write a slot, or empty it by MISSING."""
    if is_a(owner, dict):
        if value is MISSING:
            _TABLE.__delitem__(owner, key)
        else:
            _TABLE.__setitem__(owner, key, value)
    elif value is MISSING:
        delattr(owner, key)
    else:
        setattr(owner, key, value)


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Call isinstance, telling the type checker nothing: what is reached may be anything."""
    return isinstance(value, kinds)


def items(table: Any) -> Iterable[tuple[Any, Any]]:
    """Read a dict past its class: a subclass may import or make something whenever a value is asked for."""
    if isinstance(table, OrderedDict):
        return ((key, _TABLE.__getitem__(cast("_TABLE", table), key)) for key in _past_its_class(table, "keys"))
    return _past_its_class(table, "items")


def _past_its_class(table: Any, method: str) -> Any:
    kind: Any = dict if isinstance(table, dict) else MappingProxyType
    if method == "keys" and isinstance(table, OrderedDict):
        kind = OrderedDict  # a plain dict's order knows nothing of move_to_end
    return getattr(kind, method)(table)


@dataclass(frozen=True, slots=True)
class Names:
    """The attributes and keys that followed code names; grows while code is followed."""

    found: set[str]

    def of(self, table: Mapping[str, Any]) -> list[str]:
        """Give the keys of a table that code names, in the table's order."""
        return [key for key in table if key in self.found]


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything but the values of a tensor that is an input: a capture bakes it in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: str = ""
    """A class, a layout or a lazy view that is not the usual one."""

    @classmethod
    def of(cls, tensor: Tensor) -> Signature:
        """Read a tensor's signature."""
        stride = tensor.stride() if tensor.layout is torch.strided else ()
        kind = kind_of(tensor)
        about = (tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad)
        return cls(*about) if kind is PLAIN else cls(*about, str(kind))

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        kind = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"{kind} with strides {list(self.stride)} on {self.device}{grad}{f' {self.kind}' * bool(self.kind)}"


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


class ModulePlace(Place):
    """A module: its attributes, tables and hooks.

    Parameters of the trained model are inputs and may not be exchanged, so they are not among the values; its buffers
    are inputs that may be, if their signatures stay.
    """

    def __init__(self, name: str, owner: nn.Module, is_trained: bool):
        self.name, self._is_trained = name, is_trained
        self.owner: nn.Module = owner

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

    def inputs(self) -> list[tuple[str, Tensor]]:
        """Give its parameters and buffers, by name."""
        tables = (self.owner._parameters, self.owner._buffers)
        return [(key, tensor) for table in tables for key, tensor in table.items() if tensor is not None]

    def views(self) -> Iterable[View]:
        table = vars(self.owner)
        yield table.values()
        yield table.keys()
        yield from (table[name].values() for name in (*_TABLES, *_HOOKS) if table[name])
        if table["_buffers"]:
            yield table["_buffers"].keys()  # by which they are found before each step

    def empty(self) -> Iterable[View]:
        """Give the tables in which there is nothing yet."""
        table = vars(self.owner)
        return [table[name] for name in (*_TABLES, *_HOOKS) if not table[name]]

    def slots(self) -> Iterable[Slot]:
        return ((self.owner, "__class__"),)


class NamespacePlace(Place):
    """A Python module of the user's: those of its globals that code names."""

    def __init__(self, owner: ModuleType, names: Names):
        self.name, self._names = owner.__name__, names
        self.owner: ModuleType = owner

    def held(self) -> Held:
        found = [(f".{key}", vars(self.owner)[key]) for key in self._names.of(vars(self.owner))]
        return [("'s name", self.name), *found]

    def slots(self) -> Iterable[Slot]:
        return [(vars(self.owner), key) for key in self._names.of(vars(self.owner))]


# Objects and collections


class ObjectPlace(Place):
    """A plain object, as a configuration: those attributes that code names; all where methods that nobody reads do."""

    def __init__(self, name: str, owner: Any, names: Names):
        self.name, self.owner, self._names = name, owner, names
        self._table: dict[str, Any] = getattr(owner, "__dict__", {})
        kind = cast("Any", type(owner))
        makes_up = getattr(kind, "__getattr__", None)
        # Methods of libraries are not followed, nor those of UserDict and the like in classes that derive from them.
        is_whole = (kind not in _NAMED and is_library(kind.__module__)) or issubclass(kind, _WHOLE)
        self._is_whole = is_whole or (isinstance(makes_up, FunctionType) and not is_library(makes_up.__module__))
        self._members = [s for base in kind.__mro__ for s in slots_of(base) if self._is_whole or s in names.found]
        self._plain = next((base for base in (int, float, complex, str, bytes) if issubclass(kind, base)), None)

    def held(self) -> Held:
        yield "'s class", type(self.owner)
        if self._plain is not None:
            yield "'s value", repr(cast("Any", self._plain).__getnewargs__(self.owner))
        for key in sorted(self._keys()):
            yield f".{key}", self._table[key]
        for key in self._members:
            yield f".{key}", getattr(self.owner, key, MISSING)

    def views(self) -> Iterable[View]:
        if has_table(self.owner):
            yield self._table.keys()  # an attribute may come that hides one of the class

    def slots(self) -> Iterable[Slot]:
        yield self.owner, "__class__"
        yield from ((self._table, key) for key in self._keys())
        yield from ((self.owner, key) for key in self._members)

    def _keys(self) -> list[str]:
        if self._is_whole and len(self._table) <= LARGE:
            return [key for key in self._table if key != "_opt_called"]  # that an optimizer has stepped
        return self._names.of(self._table)


_WHOLE = (Mapping, UserList, UserString, Enum)

_NAMED = (SimpleNamespace, Namespace, threading.Event)
"""Classes of Python's library of which those attributes count that code names."""


def has_table(value: Any) -> bool:
    """Ask if a value has attributes of its own."""
    return bool(type(value).__dictoffset__) or isinstance(value, threading.local)


def slots_of(base: type) -> tuple[str, ...]:
    """Give the names in a class's own __slots__."""
    slots: Any = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(key for key in slots if key not in ("__dict__", "__weakref__"))


class AskedPlace(Place):
    """A context variable, a weak reference or a C queue: its value, target or length has to be asked for."""

    _HOW: Mapping[type, Callable[[Any], Any]] = {
        ContextVar: lambda variable: variable.get(MISSING),
        weakref.ref: lambda reference: reference(),
        SimpleQueue: lambda queue: queue.qsize(),
    }
    KINDS = tuple(_HOW)

    def __init__(self, name: str, owner: Any):
        self.name, self.owner = name, owner
        self._ask = next(ask for kind, ask in self._HOW.items() if isinstance(owner, kind))

    @property
    def value(self) -> Any:
        """Ask for the value."""
        return self._ask(self.owner)

    @value.setter
    def value(self, value: Any) -> None:
        self.owner.set(value)

    def held(self) -> Held:
        return (("'s value", self.value),)

    def slots(self) -> Iterable[Slot]:
        return ((self, "value"),)


COLLECTIONS = (list, tuple, set, frozenset, dict, deque, MappingProxyType)

_TABLES_OF_VALUES = (dict, MappingProxyType)


class CollectionPlace(Place):
    """A list, tuple, set, dict or array of objects, and the attributes of one that has some."""

    def __init__(self, name: str, owner: Any, names: Names):
        self.name, self.owner = name, owner
        self._attributes = ObjectPlace(name, owner, names) if type(owner).__dictoffset__ else None

    def held(self) -> Held:
        owner = self.owner
        yield "'s class", type(owner)
        if isinstance(owner, _TABLES_OF_VALUES):
            yield from ((f"[{_text(key)}]", value) for key, value in items(owner))
        elif is_a(owner, np.ndarray):
            yield from ((f"[{i}]", value) for i, value in enumerate(owner.ravel()))
        elif isinstance(owner, Set):
            yield from ((f" with {text}", True) for text in sorted(map(_text, cast("Set[Any]", owner))))
        else:
            yield from ((f"[{i}]", value) for i, value in enumerate(owner))
        if self._attributes is not None:
            yield from self._attributes.held()

    def views(self) -> Iterable[View]:
        owner = self.owner
        if isinstance(owner, _TABLES_OF_VALUES):
            yield _past_its_class(owner, "values")
            yield _past_its_class(owner, "keys")
        elif not isinstance(owner, tuple | frozenset | np.ndarray):
            yield owner
        if self._attributes is not None:
            yield from self._attributes.views()

    def slots(self) -> Iterable[Slot]:
        return self._attributes.slots() if self._attributes is not None else ()


def _text(key: Any) -> str:
    return repr(key) if isinstance(key, str | int | float | bool | None) else f"{type(key).__name__} {id(key):x}"
