"""Values that the step reads outside: (how they are held) x (how they are changed) x (how they are read)."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import fractions
import functools
import itertools
import multiprocessing
import operator
import pathlib
import queue
import threading
import types
import weakref
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from helpers.followed import assert_followed, small
from helpers.jobs import cross_entropy


class Rate(float):
    pass


class Count(int):
    pass


class Label(str):
    __slots__ = ()


class Mode(enum.Enum):
    HALF = 0.5
    WHOLE = 1.0


class Level(enum.IntEnum):
    ONE = 1
    TWO = 2


class Steps(collections.UserList[float]):
    """A class of UserList, of whose code nobody names what holds the items."""


class Words(collections.UserString):
    """A class of UserString."""


class Owner:
    """Has one value, which it gives in several ways."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def by_property(self) -> Any:
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name == "made_up":
            return self.value
        raise AttributeError(name)

    def __getitem__(self, key: int) -> Any:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


HELD: Any = None

# Values, of which one takes the other's place


def truth(value: Any) -> float:
    return 1.0 if value else 0.5


VALUES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "float": (1.0, 0.5, float),
    "class of float": (Rate(1.0), Rate(0.5), float),
    "class of int": (Count(1), Count(2), int),
    "class of str": (Label("a"), Label("bb"), len),
    "class of str by its text": (Label("1.0"), Label("0.5"), float),
    "truth": (True, False, truth),
    "Fraction": (fractions.Fraction(1, 2), fractions.Fraction(1, 3), float),
    "Decimal": (Decimal("1.0"), Decimal("0.5"), float),
    "Path": (pathlib.Path("a"), pathlib.Path("bb"), lambda path: len(str(path))),
    "Enum": (Mode.WHOLE, Mode.HALF, lambda mode: mode.value),
    "IntEnum": (Level.ONE, Level.TWO, int),
    "NumPy's number": (np.float64(1.0), np.float64(0.5), float),
    "bytes": (b"a", b"bb", len),
}

KEPT: list[Any] = []


def queue_of(value: Any) -> Any:
    made: Any = queue.Queue()
    made.put(value)
    return made


def variable_of(value: Any) -> Any:
    made: Any = contextvars.ContextVar("of a test")
    made.set(value)
    return made


def of_this_thread(value: Any) -> Any:
    own = threading.local()
    own.a = value
    return own


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "attribute": (Owner, lambda o, v: setattr(o, "value", v), lambda o: o.value),
    "slot": (Slotted, lambda o, v: setattr(o, "value", v), lambda o: o.value),
    "namespace": (lambda v: types.SimpleNamespace(a=v), lambda o, v: setattr(o, "a", v), lambda o: o.a),
    "vars": (Owner, lambda o, v: setattr(o, "value", v), lambda o: vars(o)["value"]),
    "__dict__": (Owner, lambda o, v: setattr(o, "value", v), lambda o: o.__dict__["value"]),
    "getattr": (Owner, lambda o, v: setattr(o, "value", v), lambda o: o.value),
    "attrgetter": (Owner, lambda o, v: setattr(o, "value", v), operator.attrgetter("value")),
    "itemgetter": (lambda v: {"a": v}, lambda o, v: o.update(a=v), operator.itemgetter("a")),
    "partial": (Owner, lambda o, v: setattr(o, "value", v), functools.partial(lambda o, by: (o.value, by)[0], by=1)),
    "property": (Owner, lambda o, v: setattr(o, "value", v), lambda o: o.by_property),
    "__getattr__": (Owner, lambda o, v: setattr(o, "value", v), lambda o: o.made_up),
    "__getitem__": (Owner, lambda o, v: setattr(o, "value", v), lambda o: o[0]),
    "list": (lambda v: [v], lambda o, v: o.__setitem__(0, v), lambda o: o[0]),
    "dict": (lambda v: {"a": v}, lambda o, v: o.update(a=v), lambda o: o["a"]),
    "deque": (lambda v: collections.deque([v]), lambda o, v: o.__setitem__(0, v), lambda o: o[0]),
    "OrderedDict": (lambda v: collections.OrderedDict(a=v), lambda o, v: o.update(a=v), lambda o: o["a"]),
    "defaultdict": (lambda v: collections.defaultdict(int, a=v), lambda o, v: o.update(a=v), lambda o: o["a"]),
    "ChainMap": (lambda v: collections.ChainMap({}, {"a": v}), lambda o, v: o.maps[1].update(a=v), lambda o: o["a"]),
    "UserDict": (lambda v: collections.UserDict(a=v), lambda o, v: o.update(a=v), lambda o: o["a"]),
    "UserList": (lambda v: collections.UserList([v]), lambda o, v: o.__setitem__(0, v), lambda o: o[0]),
    "queue": (
        queue_of,
        lambda o, v: (o.get(), o.put(v)),
        lambda o: o.queue[0],
    ),
    "thread's own": (of_this_thread, lambda o, v: setattr(o, "a", v), lambda o: o.a),
    "object array": (lambda v: np.array([v], dtype=object), lambda o, v: o.__setitem__(0, v), lambda o: o[0]),
    "object array of two dimensions": (
        lambda v: np.array([[v, None]], dtype=object).T, lambda o, v: o.__setitem__((0, 0), v), lambda o: o[0, 0],
    ),
    "context variable": (
        variable_of, lambda o, v: o.set(v), lambda o: o.get(),
    ),
    "weak reference": (
        lambda v: [KEPT.append(Owner(v)), weakref.ref(KEPT[-1])][1],
        lambda o, v: setattr(o(), "value", v), lambda o: o().value,
    ),
    "weak dict": (
        lambda v: [KEPT.append(Owner(v)), weakref.WeakValueDictionary(a=KEPT[-1])][1],
        lambda o, v: setattr(o["a"], "value", v), lambda o: o["a"].value,
    ),
}  # fmt: skip


def check(held: Any, change: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    done: list[None] = []
    assert_followed(
        small(),
        lambda model, batch: read(held) * cross_entropy(model, batch),
        lambda _: done or (change(held), done.append(None)),
    )


MET = [(k, h) for (m, k), (n, h) in itertools.product(enumerate(VALUES), enumerate(HOLDERS)) if (m + n) % 4 == 0]
"""Of each kind several holders, of each holder several kinds: a holder's value is compared the same wherever it was."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "holder"), MET)
def test_a_value_that_another_replaces_is_followed(kind: str, holder: str):
    before, after, as_number = VALUES[kind]
    hold, change, read = HOLDERS[holder]
    check(hold(before), lambda held: change(held, after), lambda held: as_number(read(held)))


# Values that change inside


def setting(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: operator.setitem(held, key, value)


def event() -> Any:
    made = threading.Event()
    made.set()
    return made


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_double), ("b", ctypes.c_int))


INSIDE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "multiprocessing.Value": (
        lambda: multiprocessing.Value("d", 1.0), lambda v: setattr(v, "value", 0.5), lambda v: v.value,
    ),
    "without a lock": (
        lambda: multiprocessing.Value("d", 1.0, lock=False), lambda v: setattr(v, "value", 0.5), lambda v: v.value,
    ),
    "multiprocessing.Array": (lambda: multiprocessing.Array("d", [1.0]), setting(0, 0.5), lambda v: v[0]),
    "array.array": (lambda: array.array("d", [1.0]), setting(0, 0.5), lambda v: v[0]),
    "bytearray": (lambda: bytearray([1]), setting(0, 2), lambda v: v[0]),
    "bytearray that grows": (lambda: bytearray([1]), lambda v: v.append(1), len),
    "memoryview": (lambda: memoryview(bytearray([1])), setting(0, 2), lambda v: v[0]),
    "ctypes": (lambda: ctypes.c_double(1.0), lambda v: setattr(v, "value", 0.5), lambda v: v.value),
    "ctypes' array": (lambda: (ctypes.c_double * 2)(1.0, 1.0), setting(0, 0.5), lambda v: v[0]),
    "ctypes' structure": (lambda: Pair(1.0, 1), lambda v: setattr(v, "a", 0.5), lambda v: v.a),
    "structured array": (lambda: np.array([(1.0, 1)], dtype="f8,i4"), setting(0, (0.5, 1)), lambda v: v[0][0]),
    "record with objects": (lambda: np.array([(1.0, 1)], dtype="O,i4"), setting(0, (0.5, 1)), lambda v: v[0][0]),
    "array": (lambda: np.ones(2), setting(0, 0.5), lambda v: v[0]),
    "masked array": (lambda: np.ma.array([1.0, 2.0]), setting(0, 0.5), lambda v: float(v[0])),
    "Event": (event, lambda v: v.clear(), lambda v: truth(v.is_set())),
    "queue's length": (queue.Queue, lambda v: v.put(1), lambda v: 1.0 + v.qsize()),
    "simple queue": (queue.SimpleQueue, lambda v: v.put(1), lambda v: 1.0 + v.qsize()),
    "Counter": (lambda: collections.Counter("a"), lambda v: v.update("a"), lambda v: v["a"]),
    "order of an OrderedDict": (
        lambda: collections.OrderedDict(a=1.0, b=0.5), lambda v: v.move_to_end("a"), lambda v: next(iter(v.values())),
    ),
    "order of objects": (
        lambda: collections.OrderedDict({Mode.WHOLE: Owner(1.0), Mode.HALF: Owner(0.5)}),
        lambda v: v.move_to_end(Mode.WHOLE), lambda v: next(iter(v.values())).value,
    ),
    "class of UserList": (lambda: Steps([1.0]), lambda v: v.append(2.0), lambda v: v[-1]),
    "class of UserString": (lambda: Words("a"), lambda v: setattr(v, "data", "bb"), len),
    "Counter's total": (lambda: collections.Counter("a"), lambda v: v.update("b"), lambda v: v.total()),
    "set": (lambda: {1}, lambda v: v.add(2), len),
    "attribute of an Enum's member": (
        lambda: setattr(Mode.HALF, "weight", 1.0) or Mode.HALF,
        lambda v: setattr(v, "weight", 0.5), lambda v: v.weight,
    ),
    "value of an Enum's member": (
        lambda: enum.Enum("Table", {"A": {"w": 1.0}}).A, lambda v: v.value.update(w=0.5), lambda v: v.value["w"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", INSIDE)
def test_a_value_that_changes_inside_is_followed(kind: str):
    make, change, read = INSIDE[kind]
    check(make(), change, read)


# Ways that no object leads


def test_a_global_that_is_read_by_its_name_is_followed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "HELD", 1.0)
    check(None, lambda _: monkeypatch.setitem(globals(), "HELD", 0.5), lambda _: globals()["HELD"])


def test_a_global_that_moves_to_another_module_is_followed(monkeypatch: pytest.MonkeyPatch):
    one, other = types.ModuleType("one_of_a_test"), types.ModuleType("other_of_a_test")
    setattr(one, "weight", 3.0)  # noqa: B010
    monkeypatch.setitem(globals(), "ONE", one)
    monkeypatch.setitem(globals(), "OTHER", other)

    def move(_: Any) -> None:
        vars(other)["weight"] = vars(one).pop("weight")

    check(None, move, lambda _: getattr(globals()["ONE"], "weight", 2.0) - getattr(globals()["OTHER"], "weight", 1.5))


def test_a_function_that_is_registered_later_is_followed():
    @functools.singledispatch
    def weight(_: Any) -> float:
        return 1.0

    check(weight, lambda held: held.register(int, lambda _: 0.5), lambda held: held(1))


def test_a_closure_that_another_function_changes_is_followed():
    def made() -> tuple[Any, Any]:
        value = 1.0

        def put(new: float) -> None:
            nonlocal value
            value = new

        return lambda: value, put

    read, put = made()
    check(None, lambda _: put(0.5), lambda _: read())


def test_the_number_of_threads_is_followed():
    before = torch.get_num_threads()
    try:
        check(None, lambda _: torch.set_num_threads(before + 1), lambda _: torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
