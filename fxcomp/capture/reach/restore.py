"""Undo what the user's Python did while it was traced, and refuse what a compiled step would not do again.

    self.aux = [hidden]      kept in model.aux: a fake tensor, taken out again and refused by name
    losses.append(balance)   kept in loss_fn's losses[0], likewise
    sizes[p] = p.numel()     a stand-in is kept as a key of sizes, likewise: names and id(p) are good keys
    @functools.cache         forgets everything if the trace has put something of its own there
    self.last = loss.item()  kept in model.last: a number that only the step knows, likewise
    random.random()          refused (draws.py)

Symbols for sizes that were kept are taken out in silence: they stand for numbers of the user's batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from fxcomp import compat, errors
from fxcomp.capture.reach.callables import CACHED, ClassPlace, FunctionPlace, kept_by
from fxcomp.capture.reach.draws import Draws
from fxcomp.capture.reach.places import (
    COLLECTIONS,
    MISSING,
    ModulePlace,
    NamespacePlace,
    Place,
    has_no_parts,
    is_a,
    items,
    read,
    write,
)
from fxcomp.capture.reach.tensor_attributes import TensorPlace
from fxcomp.capture.reach.walk import DEPTH, Reach, walk


@contextmanager
def untouched(model: nn.Module, loss_fn: Callable[..., Any]) -> Generator[None]:
    """Leave everything that Python can reach as it was, and refuse a trace that keeps tensors or draws with Python.

    Around the whole trace: inside it, copies of tensors would be part of it.
    """
    reach = walk(model, {"loss_fn": loss_fn})
    _check_id_has_one_name(reach)
    before, draws = _HeldContent(reach), Draws(reach)
    kept: list[tuple[str, str]] = []
    try:
        with draws.seen():
            yield
    finally:
        kept = before.put_back()
        draws.put_back()
    draws.check()
    if kept:
        raise errors.CaptureFailed(
            f"the forward pass stores a {kept[0][0]} in {kept[0][1]!r}, which a compiled step would not do again.\n"
            "  Register it as a buffer, or return it beside the loss: (loss, aux). A module outside the model writes"
            " its buffers in place: buffer.copy_(value). If the model only sets itself up at its first call, call it"
            " once before compile_step. A table by parameter takes names, or id(parameter), as keys."
        )


def _check_id_has_one_name(reach: Reach) -> None:
    """Refuse Python's `id` in hand: only where its name is looked up does it give the ids of real parameters."""
    if id(id) in reach.known:
        held = ((f"{place.name}{label}", value) for place in reach.places for label, value in place.held())
        where = next((name for name, value in held if value is id), "loss_fn")
        raise errors.CaptureFailed(
            f"the step has Python's id in hand as {where!r}, which would give ids of stand-ins for parameters.\n"
            "  Call it by its name: id(parameter)."
        )


# Kept tensors


class _HeldContent:
    """Shallow copies of everything that was reached."""

    def __init__(self, reach: Reach):
        self._tables: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        self._rows: list[tuple[str, Any, list[Any]]] = []
        self._slots: list[tuple[str, Any, str, Any]] = []
        caches = [place.owner for place in reach.places if isinstance(place.owner, CACHED)]
        self._caches = [(cached, cached.cache_info().misses) for cached in caches]
        self._search = _Search({id(place.owner) for place in reach.places})
        for place in (*reach.places, *reach.bare):
            self._copy(place)

    def put_back(self) -> list[tuple[str, str]]:
        """Take every traced value out again; returns tensors and numbers, and where, in the order of reaching."""
        found: list[tuple[str, str]] = []
        for cached, misses in self._caches:
            if cached.cache_info().misses != misses and any(map(self._search.kept_in, kept_by(cached))):
                cached.cache_clear()
        for name, table, before in self._tables:
            found += self._clean_table(name, table, before)
        for name, row, before in self._rows:
            found += self._clean_row(name, row, before)
        for name, owner, key, before in self._slots:
            value = read(owner, key)
            if value is not before and (kept := self._search.kept_in(value)):
                write(owner, key, before)
                found += [(kept, name)] * (kept != "known")
        return found

    def _copy(self, place: Place) -> None:
        owner: Any = place.owner
        if isinstance(place, TensorPlace):
            self._tables.append((f"{place.called}.{{}}", place.table, dict(place.table)))
            return
        if is_a(owner, dict):
            self._tables.append((f"{place.name}[{{!r}}]", owner, dict(items(owner))))
        elif is_a(owner, (list, set, deque)):
            self._rows.append((place.name, owner, list(owner)))
        if isinstance(place, ModulePlace):
            buffers = owner._buffers
            self._tables.append((f"{place.name}.{{}}", buffers, dict(buffers)))
        if not isinstance(place, NamespacePlace | ClassPlace) and type(owner).__dictoffset__:
            attributes: dict[str, Any] = owner.__dict__
            self._tables.append((f"{place.name}.{{}}", attributes, dict(attributes)))
        if isinstance(place, FunctionPlace):
            for key, cell in place.cells():
                self._slots.append((f"{place.called}'s {key}", cell, "cell_contents", read(cell, "cell_contents")))
        for held, key in place.slots():
            if not key.startswith("__") and key != "cell_contents":
                within = held.get("__name__", place.name) if is_a(held, dict) else place.name
                self._slots.append((f"{within}.{key}", held, key, read(held, key)))

    def _clean_table(self, name: str, table: dict[Any, Any], before: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
        kept_in = self._search.kept_in
        changed = [(key, value) for key, value in items(table) if before.get(key, MISSING) is not value]
        if any(kept_in(key) for key, _ in changed):  # a stand-in's hash differs outside of the trace
            rest = [(key, value) for key, value in items(table) if not kept_in(key)]
            table.clear()
            table.update(rest)
        for key, value in changed:
            kept_key = kept_in(key)
            if kept := max(kept_key, kept_in(value)):
                if key in before:
                    table[key] = before[key]
                elif not kept_key:
                    del table[key]
                if kept != "known":
                    yield kept, name.format(key)

    def _clean_row(self, name: str, row: Any, before: list[Any]) -> Iterator[tuple[str, str]]:
        known = set(map(id, before))
        new = [(i, value) for i, value in enumerate(row) if id(value) not in known]
        kept = {i: what for i, value in new if (what := self._search.kept_in(value))}
        if kept:
            row.clear()
            (row.update if is_a(row, set) else row.extend)(before)
        yield from ((what, f"{name}[{i}]") for i, what in kept.items() if what != "known")


OBJECTS = 20_000
"""The most objects in which values of the trace are searched, from one new value on."""


class _Search:
    """Searches new values for what is of a trace, past objects that were reached before: these are searched themselves.

    An object that held nothing of it is not looked into again.
    """

    def __init__(self, known: set[int]):
        self._known = known
        self._alive: list[Any] = []

    def kept_in(self, root: Any) -> str:
        """Return `tensor`, `number` or `known` for what is of a trace or holds something that is; empty if not.

        A number was read of a tensor, and only the step knows it; a size is known before.
        """
        found, met, coming = "", dict[int, Any](), deque([(root, DEPTH)])
        while coming:
            value, depth = coming.popleft()
            if isinstance(value, Tensor):
                found = max(found, "tensor" if compat.is_fake(value) else "")
            elif isinstance(value, compat.SYMBOLS):
                found = max(found, "number" if compat.unbacked_symbols(value) else "known")
            elif not has_no_parts(value) and id(value) not in met and len(met) < OBJECTS:
                met[id(value)] = value
                if depth and id(value) not in self._known:
                    coming += ((part, depth - 1) for part in _parts(value))
        if not found:
            self._alive += met.values()
            self._known.update(met)
        return found


def _parts(value: Any) -> Iterable[Any]:
    if is_a(value, dict):
        yield from (part for pair in items(value) for part in pair)
    elif is_a(value, COLLECTIONS):
        yield from value
    if is_a(value, FunctionType):
        yield from (read(cell, "cell_contents") for cell in value.__closure__ or ())
    elif is_a(value, partial):
        yield from (*value.args, *value.keywords.values())
    elif not is_a(value, (type, ModuleType)) and type(value).__dictoffset__:
        attributes: dict[str, Any] = value.__dict__
        yield from attributes.values()
