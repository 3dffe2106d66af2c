"""Watch the Python values that a captured step depends on, other than the model's tensors and the batch.

    model ──── attributes of every module, hooks, buffer signatures ───────────────────► watched
    loss_fn ── closure, defaults and globals that its code names ──────────────────────► watched
    inside ─── items of collections, attributes of objects if some code names them,
               functions of the user's own files, a few objects and calls deep ────────► watched

Plain values are compared by type and value, collections by items, others by identity. A float that has changed twice
becomes live: an input of the captured step, read before each step and not compared. Python reads everything else once,
at capture: see docs/contract.md.
"""

# private tables of nn.Module, and values of any type
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dis
import random
import site
import sys
import sysconfig
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import chain, repeat
from operator import attrgetter, is_
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.capture.batch_type import PLAIN, Change, kind_of, sharing

OBJECTS = 4
"""Maximum number of plain objects between a value and its module or function."""

ITEMS = 3
"""Maximum nesting of collections."""

LARGE = 1000
"""Maximum size of a compared collection or array; larger ones compare by identity."""

CALLS = 6
"""Maximum call depth, from the loss function or a forward pass, of the code that reads a value."""

VALUES = 10_000
"""Maximum number of watched values outside of modules; more cause a warning."""

ROUNDS = 4
"""Maximum number of repeated searches: code found late may name attributes that were skipped before."""

RECENT = 4
"""Number of latest states compared before a full search; train() and eval() alternate between two states."""

KNOWN = 32
"""Maximum number of states whose number is kept, in case they occur again."""

LIVE_AFTER = 2
"""Number of changes after which a float becomes live."""

MISSING = object()

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

ROWS = (list, tuple, set, frozenset, deque)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.generic, Enum)
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}) - {"training"}
_GET = cast("Callable[..., Any]", dict.get)

_paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = tuple({*_paths, *site.getsitepackages(), str(Path(__file__).parents[1]), "<frozen"})


def is_users(function: object) -> bool:
    """Return whether a function is defined in the user's own files."""
    return isinstance(function, FunctionType) and not function.__code__.co_filename.startswith(_LIBRARIES)


def is_plain_value(value: object) -> bool:
    """Return whether a value has no mutable parts."""
    return isinstance(value, _PLAIN)


def read(owner: Any, key: str) -> Any:
    """Return a dict entry, attribute or closure cell; MISSING if empty."""
    try:
        return _GET(owner, key, MISSING) if isinstance(owner, dict) else getattr(owner, key, MISSING)
    except ValueError:  # an empty cell
        return MISSING


class Same(NamedTuple):
    """Identity key; keeps the object alive so that its id is not reused."""

    kind: str
    value: int
    alive: Any

    @classmethod
    def of(cls, value: Any) -> Same:
        return cls(type(value).__name__, id(value), value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.alive is self.alive

    def __hash__(self) -> int:
        return self.value

    def __str__(self) -> str:
        return f"a {self.kind}"


class Plain(NamedTuple):
    """Key of a plain value. 1, 1.0 and True differ; nan equals nan."""

    kind: type
    text: str

    @classmethod
    def of(cls, value: Any, text: str | None = None) -> Plain:
        return cls(type(value), repr(value) if text is None else text)

    def __str__(self) -> str:
        return self.text if len(self.text) <= 60 else f"{self.text[:57]}..."


@dataclass(frozen=True, slots=True)
class Signature:
    """Metadata of a tensor that a capture fixes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: str = ""
    """Result of `kind_of` as text; empty for PLAIN."""

    @classmethod
    def of(cls, tensor: Tensor) -> Signature:
        stride = tensor.stride() if tensor.layout is torch.strided else ()
        kind = kind_of(tensor)
        about = (tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad)
        return cls(*about) if kind is PLAIN else cls(*about, str(kind))

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        kind = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"{kind} with strides {list(self.stride)} on {self.device}{grad}{f' {self.kind}' * bool(self.kind)}"


class Place(NamedTuple):
    """Location of a float: a dict entry, an object's attribute or a closure cell."""

    owner: Any
    key: str

    @property
    def value(self) -> Any:
        return read(self.owner, self.key)

    def write(self, value: Any) -> None:
        """Store a value; MISSING deletes the entry."""
        if isinstance(self.owner, dict):
            self.owner[self.key] = value
        elif value is MISSING:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)


class Holder(NamedTuple):
    """Object that traced Python may write to; `name` prefixes its entries' labels."""

    name: str
    owner: Any
    key: str = ""
    """Single entry to check; empty for all."""


class _Depth(NamedTuple):
    objects: int = 0
    items: int = 0
    calls: int = -1


class Watched:
    """Descriptions of a step's watched values by name, and a fast check for changes."""

    def __init__(
        self,
        model: nn.Module,
        roots: Mapping[str, Any],
        names: frozenset[str] = frozenset(),
        live: Collection[str] = (),
    ):
        """Find the watched values.

        `names` are attributes of plain objects that code may read; `live` are the names of live floats.
        """
        self.floats: dict[str, Place] = {}
        """Places of floats that are live or may become live."""
        self._may_be_live = live
        self.live: list[str] = []
        self.facts: dict[str, Hashable] = {}
        self.generators: dict[str, Any] = {}
        self.holders: list[Holder] = []
        self.is_cut = False
        self._names = set(names)
        self._known: dict[int, Hashable] = {}
        self._others = 0
        self._views: list[Collection[Any]] = []
        """Collections and dict views whose length and items are compared."""
        self._sized: list[Collection[Any]] = []
        """Tables whose length is compared."""
        self._empty: list[Collection[Any]] = []
        self._slots: dict[tuple[int, str], tuple[Any, str]] = {}
        self._tensors: list[Tensor] = []
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._modules = tuple(model.modules())
        self._own = frozenset(map(id, self._modules))
        self._follow_modules(model, "model", 0)
        self.facts["tensors that share memory"] = sharing(model)
        for name, value in roots.items():
            self._meet(value, name, _Depth())
        self.names = frozenset(self._names)
        self._remember()

    # Finding

    def _note(self, name: str, value: Any, depth: _Depth) -> None:
        self.facts.setdefault(name, self._meet(value, name, depth))

    def _slot(self, owner: Any, key: str) -> None:
        self._slots[id(owner), key] = owner, key

    def _note_place(self, owner: Any, key: str, value: Any, name: str, depth: _Depth) -> None:
        """Watch the value at a place. A live float is only checked for its type."""
        if type(value) is float:
            self.floats[name] = Place(owner, key)
            if name in self._may_be_live:
                self.facts[name] = Plain.of(value, "a number of each step")
                self.live.append(name)
                return
        self._slot(owner, key)
        self._note(name, value, depth)

    def _meet(self, value: Any, name: str, depth: _Depth) -> Hashable:
        if is_plain_value(value):
            return Plain.of(value)
        if (known := self._known.get(id(value))) is not None:
            return known
        same = self._known[id(value)] = Same.of(value)
        if isinstance(value, Tensor):
            self.facts[f"{name}'s layout"] = Signature.of(value)
            self._follow_tensor(value, name)
            self._compare_memory(value)
        elif isinstance(value, GENERATORS):
            self.generators[name] = value
        elif self._others >= VALUES:
            self.is_cut = True
        else:
            self._others += 1
            return self._follow(value, name, depth) or same
        return same

    def _follow(self, value: Any, name: str, depth: _Depth) -> Hashable | None:
        """Watch an object's contents. Return a description of a collection; None for other objects."""
        if isinstance(value, nn.Module):
            if id(value) not in self._own:
                self._follow_modules(value, name, depth.calls + 1)
        elif isinstance(value, FunctionType):
            self._follow_function(value, name, depth.calls + 1)
        elif isinstance(value, MethodType):
            self._meet(value.__self__, f"{name}'s self", depth)
            self._follow_function(value.__func__, name, depth.calls + 1)
        elif isinstance(value, partial):
            for key, part in (("", value.func), *((f"({i})", part) for i, part in enumerate(value.args))):
                self._note(f"{name}{key}", part, depth)
            self._follow_table(value.keywords, name, depth)
        elif isinstance(value, (dict, *ROWS)):
            return self._follow_collection(value, name, depth)
        elif isinstance(value, ModuleType):
            if not (getattr(value, "__file__", None) or "").startswith(_LIBRARIES):
                self._follow_attributes(vars(value), name, depth)
        elif isinstance(value, type):
            self._follow_class(value, depth)
        elif isinstance(value, np.ndarray):
            if value.size <= LARGE and value.dtype != object:
                self._arrays.append(value)
                self.facts[f"{name}'s content"] = value.tobytes()
        elif depth.objects < OBJECTS and not isinstance(value, torch.optim.Optimizer):
            self._follow_object(value, name, depth._replace(objects=depth.objects + 1))
        return None

    def _follow_collection(self, value: Any, name: str, depth: _Depth) -> Hashable | None:
        if depth.items >= ITEMS or len(value) > LARGE:
            return None
        inside = depth._replace(items=depth.items + 1)
        if isinstance(value, dict):
            self._follow_table(value, name, inside)
        else:
            self._views.append(value)
            if not isinstance(value, tuple | frozenset):
                self.holders.append(Holder(name, value))
            if isinstance(value, set | frozenset):
                self.facts[f"the items of {name}"] = tuple(sorted(map(repr, value)))
            else:
                for i, item in enumerate(value):
                    self._note(f"{name}[{i}]", item, inside)
        return Plain.of(value, f"{len(value)} items")

    def _follow_table(self, table: dict[Any, Any], name: str, depth: _Depth) -> None:
        self._views += [dict.values(table), dict.keys(table)]
        self.holders.append(Holder(name, table))
        for key, value in list(dict.items(table)):
            self._note(f"{name}[{key!r}]", value, depth)

    def _follow_object(self, value: Any, name: str, depth: _Depth) -> None:
        kind = type(value)
        if depth.calls <= CALLS:
            for function in _functions_of(kind):
                if is_users(function) and self._may_call(function.__name__):
                    self._follow_function(function, f"{name}.{function.__name__}", depth.calls + 1)
        for key in (key for base in kind.__mro__ for key in _slots_of(base)):
            if key in self._names and hasattr(value, key):
                self._note_place(value, key, getattr(value, key), f"{name}.{key}", depth)
        if kind.__dictoffset__:
            self._sized.append(vars(value))  # a named attribute may be added later
            self.holders.append(Holder(f"{name}.", vars(value)))
            self._follow_attributes(vars(value), name, depth)
        self._follow_class(kind, depth)

    def _may_call(self, method: str) -> bool:
        """Return whether code names a method, or Python calls the method implicitly, as `__mul__`.

        False for constructors and generated dataclass methods: they name all fields, which would all be watched.
        """
        if method.startswith("__"):
            return method not in ("__init__", "__new__", "__repr__", "__eq__", "__hash__")
        return method in self._names

    def _follow_class(self, kind: type, depth: _Depth) -> None:
        for base in filter(_is_users_class, kind.__mro__):
            for key, value in list(vars(base).items()):
                if key in self._names and isinstance(value, (*_PLAIN, list, dict, tuple)):
                    self._note_place(base, key, value, f"{base.__name__}.{key}", depth)

    def _follow_attributes(self, table: dict[str, Any], name: str, depth: _Depth) -> None:
        for key, value in list(table.items()):
            if key in self._names:
                self._note_place(table, key, value, f"{name}.{key}", depth)

    def _follow_tensor(self, tensor: Tensor, name: str) -> None:
        self._known[id(tensor)] = Same.of(tensor)
        self.holders.append(Holder(f"{name}.", vars(tensor)))
        self._follow_attributes(vars(tensor), name, _Depth())
        (self._views if vars(tensor) else self._empty).append(vars(tensor))

    def _compare_memory(self, tensor: Tensor) -> None:
        with suppress(RuntimeError, ValueError, TypeError):  # a sparse or wrapped tensor has no address
            tensor.data_ptr()
            self._tensors.append(tensor)

    def _follow_function(self, function: FunctionType, name: str, calls: int) -> None:
        """Watch a function's closure and defaults, and the globals that a user's function names."""
        if calls > CALLS or (id(function), "__code__") in self._slots:
            return
        self._slot(function, "__code__")
        self.facts[f"{name}'s code"] = Same.of(function.__code__)
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self._meet(wrapped, name, _Depth(calls=calls - 1))
        is_own = is_users(function)
        if is_own:
            self._names |= _attributes_named(function.__code__)
        elif calls > 0:
            return
        depth = _Depth(calls=calls)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.holders.append(Holder(f"{name}'s {key}", cell, "cell_contents"))
            self._note_place(cell, "cell_contents", read(cell, "cell_contents"), f"{name}'s {key}", depth)
        self._slot(function, "__defaults__")
        for i, value in enumerate(function.__defaults__ or ()):
            self._note(f"{name}'s default {i}", value, depth)
        if function.__kwdefaults__:
            self._follow_table(function.__kwdefaults__, f"{name}'s defaults", depth)
        table = function.__globals__
        for key in _globals_named(function.__code__) if is_own else ():
            if key in table:
                where = f"{table.get('__name__', '?')}.{key}"
                self.holders.append(Holder(where, table, key))
                self._note_place(table, key, table[key], where, depth)

    def _follow_modules(self, root: nn.Module, name: str, calls: int) -> None:
        named = cast("Iterable[tuple[str, nn.Module]]", root.named_modules(prefix=name))
        modules = [each for each in named if not isinstance(each[1], torch.jit.ScriptModule)]  # no C++ modules
        for _, module in modules:
            self._known[id(module)] = Same.of(module)
        functions: list[tuple[FunctionType, str]] = []
        for kind in dict.fromkeys(type(module) for _, module in modules):
            self._slot(kind, "forward")
            self.facts[f"{kind.__qualname__}.forward"] = Same.of(kind.forward)
            for function in _functions_of(kind):
                self._names |= _attributes_named(function.__code__)
                functions += [(function, f"{kind.__name__}.{function.__name__}")] if is_users(function) else []
        for where, module in modules:
            self._follow_module(module, where)
        for function, where in functions:
            self._follow_function(function, where, calls)

    def _follow_module(self, module: nn.Module, name: str) -> None:
        table = vars(module)
        self._sized.append(table)
        self.holders += [Holder(f"{name}.", table), Holder(f"{name}.", module._buffers)]
        self.facts[f"{name}'s class"] = Same.of(type(module))
        for key, value in list(table.items()):
            if key not in _OF_EVERY_MODULE:
                self._note_place(table, key, value, f"{name}.{key}", _Depth())
        for kind in (*_TABLES, *_HOOKS):
            inner = table[kind]
            if not inner:
                self._empty.append(inner)
                continue
            self._views.append(inner.values())
            for key, value in inner.items():
                self._follow_entry(kind, value, f"{name}.{key}", is_own=id(module) in self._own)

    def _follow_entry(self, kind: str, value: Any, name: str, *, is_own: bool) -> None:
        if kind in _HOOKS:
            self._note(f"{name.rpartition('.')[0]}'s {kind.strip('_')[:-1]} {name.rpartition('.')[2]}", value, _Depth())
        elif not isinstance(value, Tensor):
            self.facts[name] = None if value is None else Same.of(value)
        elif not is_own:
            self._note(name, value, _Depth())
        else:  # an input of the graph: its signature counts; `StructureGuard` compares parameters
            if id(value) not in self._known:
                self._follow_tensor(value, name)
            if kind == "_buffers":
                self.facts[name] = Signature.of(value)
                self._compare_memory(value)

    # Comparing

    def _remember(self) -> None:
        slots = list(self._slots.values())
        self._in_tables = _columns([slot for slot in slots if isinstance(slot[0], dict)])
        self._elsewhere = _columns([slot for slot in slots if not isinstance(slot[0], dict)])
        self._counted = [*self._views, *self._sized]
        self._sizes = list(map(len, self._counted))
        self._seen = list(self._items())
        self._data = self._read_data()

    def _items(self) -> Iterator[Any]:
        try:
            attributes = list(map(getattr, *self._elsewhere, repeat(MISSING)))
        except ValueError:  # an empty cell
            attributes = list(map(read, *self._elsewhere))
        return chain(map(_GET, *self._in_tables, repeat(MISSING)), chain.from_iterable(self._views), attributes)

    def _read_data(self) -> tuple[Any, ...]:
        tensors = self._tensors
        contents = [array.tobytes() for array in self._arrays]
        return list(map(Tensor.data_ptr, tensors)), list(map(_FLAG, tensors)), contents, list(map(type, self._modules))

    def is_still(self) -> bool:
        """Return whether every watched value is the same object, or an equal plain value."""
        return (
            not any(self._empty)
            and list(map(len, self._counted)) == self._sizes
            and (all(map(is_, self._items(), self._seen)) or self._is_equal())
            and self._read_data() == self._data
            and all(type(self.floats[name].value) is float for name in self.live)
        )

    def _is_equal(self) -> bool:
        now = list(self._items())
        for new, old in zip(now, self._seen, strict=True):
            if new is not old and not (is_plain_value(new) and is_plain_value(old) and Plain.of(new) == Plain.of(old)):
                return False
        self._seen = now
        return True


_FLAG = attrgetter("requires_grad")


def _columns(slots: list[tuple[Any, str]]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return tuple(owner for owner, _ in slots), tuple(key for _, key in slots)


@lru_cache(maxsize=4096)
def _globals_named(code: CodeType) -> tuple[str, ...]:
    named = [line.argval for line in dis.get_instructions(code) if line.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*named, *(name for inner in _inner(code) for name in _globals_named(inner))]))


@lru_cache(maxsize=4096)
def _attributes_named(code: CodeType) -> frozenset[str]:
    """Return the attribute names that code may read, including strings for `getattr`."""
    texts = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    return frozenset({*code.co_names, *texts}).union(*map(_attributes_named, _inner(code)))


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


@lru_cache(maxsize=1024)
def _functions_of(kind: type) -> tuple[FunctionType, ...]:
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    values = [getattr(v, "fget", None) or getattr(v, "__func__", v) for base in bases for v in vars(base).values()]
    return tuple(value for value in values if isinstance(value, FunctionType))


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return [key for key in ((slots,) if isinstance(slots, str) else slots) if not key.startswith("__")]


@lru_cache(maxsize=1024)
def _is_users_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return not (file or ("" if kind.__module__ == "__main__" else "<frozen")).startswith(_LIBRARIES)


class Watch:
    """Assigns a number to each state of the watched values."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], *, makes_live: bool = True):
        """`makes_live` allows floats to become inputs. Values are first read by `number`."""
        self._model, self._loss_fn, self._makes_live = model, loss_fn, makes_live
        self._recent: OrderedDict[int, Watched] = OrderedDict()
        self._number_of: dict[Hashable, int] = {}
        self._facts: OrderedDict[int, dict[str, Hashable]] = OrderedDict()
        self._next = 0
        self._is_capturing = False
        self._changes = Counter[str]()
        self._live = set[str]()
        self._constants = set[str]()
        """Names of floats that decide a branch or are formatted as text, so they never become live."""

    @cached_property
    def _roots(self) -> dict[str, Any]:
        return {"loss_fn": self._loss_fn, **compat.global_module_hooks()}

    def watched(self) -> Watched:
        return self._recent[self.number()]

    @property
    def live(self) -> dict[str, Place]:
        """Places of the live floats in the latest state, by name."""
        latest = next(reversed(self._recent.values()), None)
        return {} if latest is None else {name: latest.floats[name] for name in latest.live}

    def number(self, before_look: Callable[[], None] = lambda: None) -> int:
        """Return the number of the current state, found by a full search unless a recent state still applies.

        `before_look` is called before a full search, except the first.
        """
        for number, known in reversed(self._recent.items()):
            if known.is_still():
                self._recent.move_to_end(number)
                return number
        if self._recent:
            before_look()
        found = self._look()
        return self._enter(self._look() if not self._is_capturing and self._make_live(found) else found)

    @contextmanager
    def capturing(self) -> Generator[None]:
        """Do not count changes of floats (LIVE_AFTER) inside the context."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def keep_constant(self, names: Iterable[str]) -> None:
        """Make live floats constants again."""
        self._constants.update(names)
        self._live -= self._constants
        self._recent.clear()  # recent states list them as live

    def _make_live(self, found: Watched) -> bool:
        before = next(reversed(self._recent.values())).facts if self._recent else found.facts
        changed = [name for name in found.floats if name in before and before[name] != found.facts[name]]
        self._changes.update(changed)
        often = [name for name in changed if self._changes[name] >= LIVE_AFTER] if self._makes_live else []
        made = [name for name in often if name not in self._constants]
        self._live.update(made)
        return bool(made)

    def difference(self, old: int, new: int) -> Change | None:
        if old == new:
            return None
        was, now = self._facts.get(old, {}), self._facts.get(new, {})
        for name in {**was, **now}:
            if was.get(name) != now.get(name):
                return Change(name, str(was.get(name, "nothing")), str(now.get(name, "nothing")))
        return Change("a watched value", "an earlier one", "another one")

    def _look(self) -> Watched:
        latest = next(reversed(self._recent.values()), None)
        names = latest.names if latest is not None else frozenset[str]()
        found = Watched(self._model, self._roots, names, self._live)
        for _ in range(ROUNDS):
            if found.names == names:
                break
            names, found = found.names, Watched(self._model, self._roots, found.names, self._live)
        return found

    def _enter(self, found: Watched) -> int:
        if found.is_cut:
            warnings.warn(
                f"fxcomp: the step reads more than {VALUES:,} values outside of modules; changes of later ones are not"
                " noticed.",
                stacklevel=compat.users_level(),
            )
        number = self._number_of.setdefault(tuple(found.facts.items()), self._next)
        if number == self._next:
            self._next += 1
            self._facts[number] = found.facts
            if len(self._facts) > KNOWN:
                gone, _ = self._facts.popitem(last=False)
                self._number_of = {facts: each for facts, each in self._number_of.items() if each != gone}
        self._recent.pop(number, None)
        self._recent[number] = found
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return number
