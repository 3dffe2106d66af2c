"""Undo changes to watched values during tracing, and raise for changes that a compiled step would not make.

    self.aux = [hidden]      model.aux holds a fake tensor: removed, and named in an error
    losses.append(balance)   loss_fn's losses[0] holds a fake tensor: the same
    self.last = loss.item()  model.last holds a number known only in the step: the same
    @functools.cache         cleared if tracing has put a fake tensor into it
    random.random()          an error; the generator's state is restored

Stored size symbols are removed without an error. Changes that involve no traced value, such as an increased counter,
are found by `settled` in step_guard.py.
"""

# values of any type
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import gc
import random
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fxcomp import compat, errors
from fxcomp.capture.watch import MISSING, ROWS, Holder, Place, Watched, is_plain_value, read

DEPTH = 6
"""Maximum depth of the search for traced values in a stored object."""

_GLOBAL: Mapping[str, Any] = {
    "random": random,
    "numpy.random": np.random,
    "torch.default_generator": torch.default_generator,  # draws are nodes, so only seeding changes it
}


@contextmanager
def untouched(watched: Watched) -> Generator[None]:
    """Restore watched values and generators at the end. Raises CaptureFailed, which names the changes.

    Enter before tracing, because a trace would record the tensor copies made here.
    """
    held = [(holder, _content(holder)) for holder in watched.holders]
    states = {name: (each, _state(each)) for name, each in {**_GLOBAL, **watched.generators}.items()}
    caches = _caches(gc.get_referrers(_CACHED))
    misses, collected = [cache.cache_info().misses for cache in caches], _collections()
    kept: list[tuple[str, str]] = []
    moved: list[str] = []
    try:
        yield
    finally:
        is_young = _collections() == collected  # a garbage collection moves new objects to older generations
        new = _caches(gc.get_objects(generation=0) if is_young else gc.get_referrers(_CACHED))
        for cache, missed in zip([*caches, *new], [*misses, *[0] * len(new)], strict=True):
            if cache.cache_info().misses != missed and _holds_fake(cache):
                cache.cache_clear()
        for holder, before in held:
            kept += _take_out(holder, before)
        for name, (generator, state) in states.items():
            if not _is_same(_state(generator), state):
                moved.append(name)
                _restore(generator, state)
    if moved:
        raise errors.CaptureFailed(
            f"the loss function or a forward pass seeds or draws from {' and '.join(moved)}: a compiled step does not"
            " run that Python again, and would repeat today's numbers for ever.\n"
            "  Draw outside and pass the numbers in the batch, as tensors; or draw with torch.rand, and select with"
            " torch.where."
        )
    if kept:
        raise errors.CaptureFailed(
            f"the forward pass stores a {kept[0][0]} in {kept[0][1]!r}, which a compiled step would not do again.\n"
            "  Register it as a buffer, or return it with the loss: (loss, aux). A module outside the model writes"
            " its buffers in place: buffer.copy_(value). If the model only sets itself up at its first call, call it"
            " once before compile_step. A table by parameter takes names, or id(parameter), as keys."
        )


@contextmanager
def put_back_if_refused(watched: Watched) -> Generator[None]:
    """Restore watched values if a capture raises an fxcomp error."""
    held = [(holder, _content(holder)) for holder in watched.holders]
    try:
        yield
    except errors.FxcompError:
        for holder, before in held:
            _put_back(holder, before)
        raise


def _put_back(holder: Holder, before: Any) -> None:
    now, owner = _content(holder), holder.owner
    if holder.key:
        if now is not before:
            Place(owner, holder.key).write(before)
    elif isinstance(owner, dict):
        if now.keys() != before.keys() or any(now[key] is not value for key, value in before.items()):
            dict.clear(owner)
            dict.update(owner, before)
    elif len(now) != len(before) or not all(map(is_, now, before)):
        owner.clear()
        (owner.update if isinstance(owner, set) else owner.extend)(before)


# Caches

_CACHED = type(lru_cache(lambda: None))


def _caches(among: list[Any]) -> list[Any]:
    found = [each for each in among if type(each) is _CACHED]
    return [each for each in found if not (each.__module__ or "").startswith(("torch", "sympy"))]


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def _holds_fake(cache: Any) -> bool:
    parts = [part for part in gc.get_referents(cache) if not isinstance(part, type | FunctionType | ModuleType)]
    return any(_of_trace(part, 3) for part in parts)


# Kept tensors


def _content(holder: Holder) -> Any:
    if holder.key:
        return read(holder.owner, holder.key)
    return dict(dict.items(holder.owner)) if isinstance(holder.owner, dict) else list(holder.owner)


def _take_out(holder: Holder, before: Any) -> Iterator[tuple[str, str]]:
    """Remove traced values from a holder. Yield the kind and label of each tensor and number."""
    name, owner = holder.name, holder.owner
    if holder.key:
        value = read(owner, holder.key)
        found = {"": kind} if value is not before and (kind := _of_trace(value)) else {}
        if found:
            Place(owner, holder.key).write(before)
    elif isinstance(owner, dict):
        new = {key: value for key, value in dict.items(owner) if before.get(key, MISSING) is not value}
        found = {key: kind for key, value in new.items() if (kind := max(_of_trace(key), _of_trace(value)))}
        if found:  # stand-ins as keys have other hashes outside of the trace
            rest = [(key, value) for key, value in dict.items(owner) if key not in found]
            dict.clear(owner)
            dict.update(owner, rest)
            dict.update(owner, {key: before[key] for key in found if key in before})
        found = {key if name.endswith(".") else f"[{key!r}]": kind for key, kind in found.items()}
    else:
        known = set(map(id, before))
        new = [(i, value) for i, value in enumerate(owner) if id(value) not in known]
        found = {f"[{i}]": kind for i, value in new if (kind := _of_trace(value))}
        if found:
            owner.clear()
            (owner.update if isinstance(owner, set) else owner.extend)(before)
    yield from ((kind, f"{name}{place}") for place, kind in found.items() if kind != "known")


def _of_trace(value: Any, depth: int = DEPTH, met: set[int] | None = None) -> str:
    """Return the kind of traced value that a value is or contains; an empty string if there is none.

    `tensor` is a fake tensor, `number` a scalar read from a tensor (an unbacked symbol), `known` a size symbol.
    """
    if isinstance(value, Tensor):
        return "tensor" if compat.is_fake(value) else ""
    if isinstance(value, compat.SYMBOLS):
        return "number" if compat.unbacked_symbols(value) else "known"
    met = set() if met is None else met
    if depth == 0 or id(value) in met or is_plain_value(value):
        return ""
    met.add(id(value))
    return max((_of_trace(part, depth - 1, met) for part in _parts(value)), default="")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, ROWS):
        return cast("Iterable[Any]", value)
    if isinstance(value, FunctionType):
        return [read(cell, "cell_contents") for cell in value.__closure__ or ()]
    if isinstance(value, partial):
        return (*value.args, *value.keywords.values())
    if isinstance(value, type | ModuleType | nn.Module) or not type(value).__dictoffset__:
        return ()
    return list(vars(value).values())


# Generators


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.SystemRandom):
        return None  # no state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return all(_is_same(value, other[key]) for key, value in one.items())
    return all(map(_is_same, cast("Any", one), other)) if isinstance(one, tuple) else one == other


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
