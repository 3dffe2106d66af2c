"""Python's and NumPy's random numbers while a step is traced: notice that they were drawn, and put their state back.

Iterators too: what is taken from one cannot be put back, but traced code that takes from one is refused alike.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Hashable, Mapping, Sequence
from types import GeneratorType, ModuleType
from typing import Any, cast

import numpy as np

from fxcomp.capture.reach.calls import FunctionPlace
from fxcomp.capture.reach.walk import Reach, is_iterator, is_plain

GLOBAL = {"random": random, "numpy.random": np.random}


class Draws:
    """The states of all generators that Python code can reach, as they were."""

    def __init__(self, reach: Reach):
        self._reach = reach
        self._generators: Mapping[str, Any] = {**GLOBAL, **reach.generators}
        self._before = {name: _state(generator) for name, generator in self._generators.items()}

    def put_back(self) -> list[str]:
        """Restore every state; returns the names of those that had moved."""
        moved = [name for name, g in self._generators.items() if _plain(_state(g)) != _plain(self._before[name])]
        for name in moved:
            _restore(self._generators[name], self._before[name])
        return moved

    def line(self, moved: Sequence[str]) -> str:
        """The first line that was followed and draws from these, as `file:line`; empty if none is known."""
        for place in self._reach.places:
            if isinstance(place, FunctionPlace):
                for name, attribute, line in place.lines:
                    if _generator(place.owner.__globals__.get(name), attribute) in moved:
                        return f"{place.owner.__code__.co_filename}:{line}"
        return ""


def _generator(value: Any, attribute: str) -> str | None:
    """Which of the global generators a global and its attribute stand for."""
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
        return frame and (frame.f_lasti, [repr(v) for v in frame.f_locals.values() if is_plain(v)])
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


def _plain(state: Any) -> Hashable:
    """A state that compares by value: NumPy's hold arrays."""
    if isinstance(state, Mapping):
        return tuple((key, _plain(value)) for key, value in cast("Mapping[str, Any]", state).items())
    if isinstance(state, np.ndarray):
        return cast("np.ndarray[Any, Any]", state).tobytes()
    if isinstance(state, tuple | list):
        return tuple(map(_plain, cast("tuple[Any, ...]", state)))
    return state
