"""Tell where an iterator or a stream is, without taking anything from it.

zip([1, 2], "ab")     the positions of the iterators inside
itertools.cycle("ab") its position as pickle would store it
io.StringIO("text")   what tell() says
csv.reader(file)      line_num, and where the file is
re.finditer(...)      nothing tells: a new object, which equals no other position
"""

from __future__ import annotations

import contextlib
import gc
import operator
import warnings
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, GeneratorType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, cast

import numpy as np

from fxcomp.capture.reach.places import has_no_parts, is_a, is_library

_DEPTH = 8
"""The most iterators in one another."""

_MANY = 100
"""Items of longer collections inside of an iterator are not looked at."""


_UNSEEN = ("re", "_sre")
"""Modules of which an object does not tell what was taken from it."""


def is_iterator(value: object) -> bool:
    """Ask if reading a value uses it up: one of Python's, torch's or NumPy's, or written in C. A user's is followed."""
    if not isinstance(value, Iterator):
        return False
    kind: Any = type(cast("object", value))
    return is_library(kind.__module__) or not isinstance(kind.__next__, FunctionType)


def position(iterator: Any, depth: int = _DEPTH) -> Hashable:
    """Tell where an iterator is; two positions are equal where nothing was taken in between."""
    if hasattr(iterator, "readable"):
        return _place_in_stream(iterator)
    if hasattr(iterator, "line_num"):  # csv's
        return iterator.line_num
    kind = cast("Any", type(iterator))
    if kind is np.nditer or any(type(getattr(f, "__self__", None)).__module__ in _UNSEEN for f in callees(iterator)):
        return object()
    numbers = [operator.length_hint(iterator), repr(iterator)] if kind.__module__ in ("builtins", "itertools") else []
    if is_a(iterator, GeneratorType):
        frame = iterator.gi_frame
        numbers += [frame.f_lasti, *(repr(v) for v in frame.f_locals.values() if has_no_parts(v))] if frame else [None]
    inside = [*gc.get_referents(iterator), *_numbers_of(iterator), *_as_stored(iterator)]
    inside += getattr(iterator, "__dict__", {}).values()
    return (*numbers, *(_mark(value, depth, 2) for value in inside))


def callees(iterator: Any) -> Iterable[Any]:
    """Give what an iterator calls for its values: map, filter, iter(callable, sentinel)."""
    if isinstance(iterator, GeneratorType):
        return ()
    return [value for value in gc.get_referents(iterator) if callable(value) and not isinstance(value, type)]


def _place_in_stream(stream: Any) -> Hashable:
    try:
        return stream.tell() if stream.readable() else None
    except ValueError:  # it is closed
        return None
    except OSError:  # a text that is iterated over, a pipe
        return object()


def _numbers_of(iterator: Any) -> Iterator[Any]:
    """Read the members of a C type, as csv.reader's line_num."""
    for base in type(iterator).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__"):
                with contextlib.suppress(Exception):
                    yield getattr(iterator, name)


def _as_stored(iterator: Any) -> Collection[Any]:
    """Give what pickle would store of one of Python's; until Python 3.13 that of itertools tells everything."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore", DeprecationWarning)
        stored = iterator.__reduce__()
        return cast("Collection[Any]", stored) if isinstance(stored, tuple) else ()
    return ()


def _mark(value: Any, depth: int, collections: int) -> Hashable:
    if has_no_parts(value):
        return repr(value)
    if is_iterator(value):
        return position(value, depth - 1) if depth else None
    if is_a(value, (list, tuple, deque)) and collections:
        items = value if len(value) <= _MANY else ()
        return len(value), *(_mark(item, depth, collections - 1) for item in items)
    if isinstance(value, BuiltinFunctionType):
        return _mark(value.__self__, depth, collections)
    return None
