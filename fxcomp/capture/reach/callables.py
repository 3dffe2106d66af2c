"""Places that are called: functions, decorators around them, classes, bound methods."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from functools import cache, cached_property, partial, partialmethod
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, MethodWrapperType, ModuleType
from typing import Any, cast

from fxcomp.capture.reach.iterators import callees
from fxcomp.capture.reach.names import named_in
from fxcomp.capture.reach.places import Held, Names, Place, Slot, View, is_a, is_library, read


class FunctionPlace(Place):
    """A function: its code, defaults, closure, and the globals that its code names."""

    name = ""

    def __init__(self, name: str, owner: FunctionType, names: Names):
        self.called, self._names = name, names
        self.owner: FunctionType = owner
        self._named = named_in(owner.__code__)
        names.found.update(self._named.names)

    def held(self) -> Held:
        function, name = self.owner, self.called
        yield f"{name}'s code", function.__code__
        for i, value in enumerate(function.__defaults__ or ()):
            yield f"{name}'s default {i}", value
        for key, value in (function.__kwdefaults__ or {}).items():
            yield f"{name}'s default {key}", value
        for key, cell in self.cells():
            yield f"{name}'s {key}", read(cell, "cell_contents")
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
        yield from ((cell, "cell_contents") for _, cell in self.cells())
        table = function.__globals__
        for key in self._globals():
            if not (
                self.is_installed and isinstance(table[key], FunctionType | BuiltinFunctionType | type | ModuleType)
            ):
                yield table, key

    @property
    def is_installed(self) -> bool:
        """Return whether it is of an installed package."""
        return "site-packages" in self.owner.__code__.co_filename

    @property
    def lines(self) -> tuple[tuple[str, str, int], ...]:
        """Each reading of a global: its name, the attribute that follows, the line."""
        return self._named.lines

    def cells(self) -> Iterable[tuple[str, Any]]:
        """Give the cells of its closure, by name."""
        return zip(self.owner.__code__.co_freevars, self.owner.__closure__ or (), strict=True)

    def _globals(self) -> list[str]:
        table = self.owner.__globals__
        by_name = self._names.of(table) if "globals" in self._named.globals else ()
        return list(dict.fromkeys((*(key for key in self._named.globals if key in table), *by_name)))


class WrapperPlace(Place):
    """A library's function around a user's, as decorators make: `torch.no_grad()`, `contextmanager`, `cache`."""

    def __init__(self, name: str, owner: Any, wrapped: tuple[Any, ...]):
        self.name, self.owner, self._wrapped = name, owner, wrapped

    @classmethod
    def around(cls, name: str, owner: Any) -> WrapperPlace | None:
        """Make the place; None for a function that is around nothing."""
        cells = getattr(owner, "__closure__", None) or ()
        inside = [getattr(owner, name, None) for name in ("__wrapped__", "registry")]  # a singledispatch has the latter
        inside += (read(cell, "cell_contents") for cell in cells)
        found: dict[int, Any] = {id(value): value for value in inside if is_a(value, _WRAPPED)}
        return cls(name, owner, tuple(found.values())) if found else None

    def held(self) -> Held:
        code = getattr(self.owner, "__code__", None)
        return [("'s code", code), *((f" around {i}", value) for i, value in enumerate(self._wrapped))]


_WRAPPED = (FunctionType, MethodType, partial, partialmethod, MappingProxyType)

CACHED: Any = type(cache(lambda: None))
"""The class of functions that functools.cache and lru_cache make."""


def kept_by(cached: Any) -> list[Any]:
    """Give the arguments and results that a cached function keeps, as they lie there."""
    return [each for each in gc.get_referents(cached) if each is not cached.__wrapped__ and each is not vars(cached)]


_CALLED = ("forward", "backward", "setup_context")
"""Methods that are called without being named, as all with two underscores are but these."""

_UNCALLED = frozenset({
    "__init__", "__post_init__", "__new__", "__del__", "__init_subclass__", "__set_name__", "__class_getitem__",
    "__repr__", "__str__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__dir__",
    "__setattr__", "__delattr__", "__setitem__", "__delitem__", "__getstate__", "__setstate__", "__reduce__",
    "__reduce_ex__", "__copy__", "__deepcopy__", "__sizeof__",
})  # fmt: skip
"""Methods that make, compare, show, change and store objects, and name attributes that the step does not read. Where
traced code makes an object, its constructor is followed with that code."""


class ClassPlace(Place):
    """A class: the methods that code names or calls unnamed, and the class attributes that it names."""

    name = ""

    def __init__(self, owner: type, names: Names):
        self._names = names
        self.owner: type = owner
        self._is_library = is_library(owner.__module__)

    def held(self) -> Held:
        yield "'s class", type(self.owner)
        for key, value in self._found():
            for part in _functions(value):
                yield f"{self.owner.__qualname__}.{key}", part

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
            for key in [*(key for key, value in table.items() if _is_called(key, value)), *self._names.of(table)]:
                if key not in seen and key not in _UNCALLED:
                    seen.add(key)
                    yield key, table[key]


def _is_called(name: str, value: Any) -> bool:
    return name in _CALLED or (isinstance(value, FunctionType) and name.startswith("__") and name.endswith("__"))


def constructors(kind: type) -> Iterable[tuple[str, FunctionType]]:
    """Give the functions that run where code makes an object of a user's class."""
    for base in kind.__mro__:
        for key in ("__new__", "__init__", "__post_init__"):
            value = vars(base).get(key)
            if isinstance(value, FunctionType) and not is_library(base.__module__):
                yield f".{key}", value


def _functions(value: Any) -> Iterable[Any]:
    """Give the functions that run where a class attribute is read; the value itself if none does."""
    if isinstance(value, staticmethod | classmethod):
        yield cast("Any", value).__func__
    elif isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if f is not None)
    elif isinstance(value, cached_property):
        yield cast("Any", value).func
    else:
        yield value


_BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType, partial, partialmethod)


class CallPlace(Place):
    """A bound method, a functools.partial or partialmethod, an iterator that calls something."""

    def __init__(self, name: str, owner: Any):
        self.name, self.owner = name, owner

    def held(self) -> Held:
        if isinstance(self.owner, MethodType):
            return (("", self.owner.__func__), ("'s self", self.owner.__self__))
        if isinstance(self.owner, BuiltinFunctionType | MethodWrapperType):
            return (("'s name", self.owner.__name__), ("'s self", self.owner.__self__))
        if not is_a(self.owner, (partial, partialmethod)):
            return [(f"'s {i}", value) for i, value in enumerate(callees(self.owner))]
        found = [(f"({i})", value) for i, value in enumerate(self.owner.args)]
        return [("", self.owner.func), *found, *((f"({key}=)", value) for key, value in self.owner.keywords.items())]

    def views(self) -> Iterable[View]:
        return (self.owner.keywords.values(),) if is_a(self.owner, (partial, partialmethod)) else ()


def is_bound(value: Any) -> bool:
    """Ask if a value calls something on another one: a function of C does only as a method of an object."""
    is_of_c = isinstance(value, BuiltinFunctionType | MethodWrapperType)
    return isinstance(value, _BOUND) and not (is_of_c and isinstance(value.__self__, ModuleType | type | None))
