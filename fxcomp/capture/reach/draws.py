"""Refuse a trace that draws, reads a clock or takes from an iterator: a compiled step does not run that Python again.

random.random()     the state is put back, and its line is named
next(batches)       where it is tells; it cannot be put back
os.urandom(8)       has no state: while the step is traced, each call is seen
"""

from __future__ import annotations

import datetime
import os
import random
import time
import timeit
import uuid
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence, Set
from contextlib import contextmanager
from types import CellType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fxcomp import compat, errors
from fxcomp.capture.reach.callables import FunctionPlace
from fxcomp.capture.reach.iterators import is_iterator, position
from fxcomp.capture.reach.places import ModulePlace, is_a, read, write
from fxcomp.capture.reach.walk import Reach


class Draws:
    """The states of all generators and iterators that Python code can reach, and the calls without a state."""

    def __init__(self, reach: Reach):
        self._reach = reach
        self._generators: Mapping[str, Any] = {**_GLOBAL, **reach.generators}
        self._before = {name: _state(generator) for name, generator in self._generators.items()}
        self._called: dict[str, str] = {}
        """Functions without a state that were called, each with the line."""
        self._moved: list[str] = []

    @contextmanager
    def seen(self) -> Generator[None]:
        """Notice calls of the operating system's draws and of clocks while open."""
        functions = [(m, name) for m, names in _STATELESS.items() for name in names if vars(m).get(name)]
        instead = {id(vars(m)[name]): self._noting(f"{m.__name__}.{name}", vars(m)[name]) for m, name in functions}
        held = [(vars(m), name) for m, name in functions]
        for place in self._reach.places:
            held += place.slots()
            held += [(vars(place.owner), key) for key in (vars(place.owner) if isinstance(place, ModulePlace) else ())]
        kept = [(owner, key, value) for owner, key in held if id(value := read(owner, key)) in instead]
        kept = [each for each in kept if is_a(each[0], (dict, CellType))]
        try:
            for owner, key, value in kept:
                write(owner, key, instead[id(value)])
            now = {name: classmethod(self._noting(f"datetime.{name}", method)) for name, method in _NOW.items()}
            with compat.methods_instead(datetime.datetime, now):
                yield
        finally:
            for owner, key, value in kept:
                write(owner, key, value)

    def put_back(self) -> None:
        """Restore every state."""
        for name, generator in self._generators.items():
            if _comparable(_state(generator)) != _comparable(self._before[name]):
                self._moved.append(name)
                _restore(generator, self._before[name])

    def check(self) -> None:
        """Raise DrawsInPython if a state had moved, or something without a state was called."""
        if not (self._moved or self._called):
            return
        taken = [name for name in self._moved if is_iterator(self._generators[name])]
        line = self._line(self._moved) or next(iter(self._called.values()), "")
        at = f", at {line}" if line else ""
        again = "a compiled step does not run that Python again, and would repeat today's"
        if taken:
            raise errors.DrawsInPython(
                f"the loss function or a forward pass takes the next value of {' and '.join(taken)}{at}:"
                f" {again} value for ever.\n"
                "  Take it outside, and pass it in the batch."
            )
        if not self._moved and all(name.startswith(_OF_TIME) for name in self._called):
            raise errors.DrawsInPython(
                f"the loss function or a forward pass calls {' and '.join(self._called)}{at}: {again} time for ever.\n"
                "  Measure time outside of the step, or pass it in the batch, as a tensor."
            )
        verb = "seeds or draws from" if self._moved else "calls"
        raise errors.DrawsInPython(
            f"the loss function or a forward pass {verb} {' and '.join(self._moved or self._called)}{at}:"
            f" {again} numbers for ever.\n"
            "  Draw outside and pass the numbers in the batch, as tensors; or draw with torch.rand, and select with"
            " torch.where."
        )

    def _line(self, moved: Sequence[str]) -> str:
        """Name the first line that was followed and draws from these, as `file:line`; empty if none is known."""
        for place in self._reach.places:
            if isinstance(place, FunctionPlace):
                for name, attribute, line in place.lines:
                    if _global_generator(place.owner.__globals__.get(name), attribute) in moved:
                        return f"{place.owner.__code__.co_filename}:{line}"
        return ""

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        is_asked = compat.is_users_call if name.startswith(_OF_TIME) else compat.is_asked_by_user
        most = _OF_NOW.get(name.partition(".")[2], 2)

        def called(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= most and compat.is_traced_here() and is_asked():
                self._called.setdefault(name, compat.users_line() or "")
            return function(*args, **kwargs)

        return called


_GLOBAL: Mapping[str, Any] = {
    "random": random,
    "numpy.random": np.random,
    "torch.default_generator": torch.default_generator,  # draws are nodes: this one stays, but for seeding unseen
}


_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")

_OF_NOW = {"strftime": 1, "localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0}
"""Functions that read the clock if they are given no time, with the number of arguments that they take then."""

_OF_TIME = ("time.", "timeit.", "datetime.", "os.times")

_STATELESS: Mapping[ModuleType, Set[str]] = {
    timeit: {"default_timer"},
    random: {"_urandom"},
    os: {"urandom", "getrandom", "times"},
    uuid: {"_generate_time_safe"},
    time: {*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), *_OF_NOW},
}
"""Functions of the operating system's draws, on which `secrets`, `uuid` and `random.SystemRandom` rest, and clocks."""


def _called_on(method: Any) -> Callable[..., Any]:
    def called(kind: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, kind)(*args, **kwargs)

    return called


_NOW = {name: _called_on(vars(datetime.datetime)[name]) for name in ("now", "utcnow")}


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
    if is_iterator(generator):
        return position(generator)
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


_PLAIN = frozenset({int, float, str, type(None)})


def _comparable(state: Any) -> Hashable:
    """Turn a state into one that compares by value: NumPy's hold arrays."""
    if isinstance(state, Mapping):
        return tuple((key, _comparable(value)) for key, value in cast("Mapping[str, Any]", state).items())
    if isinstance(state, np.ndarray):
        return cast("np.ndarray[Any, Any]", state).tobytes()
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, tuple | list):
        values = cast("tuple[Any, ...]", state)
        return tuple(values) if {*map(type, values)} <= _PLAIN else tuple(map(_comparable, values))
    return state
