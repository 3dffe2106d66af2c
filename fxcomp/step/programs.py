"""Captures of one step for different batches and surroundings: find what fits, make what is missing, drop what is old.

    batch, plan, guard's key  ── seen before ────────────► that program
                              └─ other lengths, same family ► the family's symbolic program, if its guard holds
                              └─ otherwise ───────────────► capture; from the third length on sizes become symbols

Everything here is bounded: graphs, the keys that lead to them, and what is remembered of shapes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxcomp.capture.batch_type import BatchType, batch_change
from fxcomp.capture.step_guard import Key, StepGuard, settled
from fxcomp.codegen.program import Program
from fxcomp.errors import CaptureFailed
from fxcomp.step.recaptures import Recaptures

CAPTURES = 8
"""The limit of captured programs: the one that was not used for longest goes. Each plan that races has so many."""

KEYS = 512
"""The limit of batch types and surroundings that are remembered with the program that serves them; they are small."""

FAMILIES = 64
"""For how many kinds of batches, sizes aside, it is remembered which sizes varied."""

STATIC_SHAPES = 2
"""So many shapes are captured as they are; from the next on, sizes that varied become symbols."""


Make = Callable[[Any, Mapping[int, frozenset[int]]], Program]
"""Captures and compiles for a batch, with the dimensions of batch tensors that may vary.

Local: ranks do not communicate in it.
"""


@dataclass(slots=True)
class _Family:
    """Batches that differ in sizes alone, in the same surroundings."""

    first: BatchType
    captures: int = 0
    varying: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """The dimensions of batch tensors, by leaf, that were not always the same."""
    symbolic: Program | None = None
    may_be_symbolic: bool = True

    def add(self, kind: BatchType) -> None:
        """Count a batch type that is about to be captured."""
        self.captures += 1
        for leaf, (was, now) in enumerate(zip(self.first.shapes, kind.shapes, strict=True)):
            differing = frozenset(d for d, (a, b) in enumerate(zip(was or (), now or (), strict=True)) if a != b)
            if differing:
                self.varying[leaf] = self.varying.get(leaf, frozenset()) | differing


class _Around(NamedTuple):
    """The surroundings of a capture, beside the batch."""

    plan: int
    """The number of the plan that is followed."""
    key: Key


_Known = tuple[str, Hashable, _Around]
"""A batch's structure and leaves, and its surroundings."""


class Programs:
    """The captures of one step, the least recently used of which go."""

    def __init__(self, guard: StepGuard, make: Make):
        self._guard, self._make = guard, make
        self._of_key: OrderedDict[_Known, Program] = OrderedDict()
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._kept: OrderedDict[int, Program] = OrderedDict()
        self._latest: tuple[BatchType, _Around] | None = None
        self._recaptures = Recaptures()
        self.racing = 0
        """The number of plans that take turns with the one that was in force."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, batch: Any, kind: BatchType, leaves: Sequence[Any], plan: int) -> Program:
        """The program for a batch as everything else is now; captured here alone if there is none."""
        around = _Around(plan, self._guard.key())
        key = (str(kind.structure), kind.leaves, around)
        found = self._of_key.get(key) or self._find_symbolic(kind, leaves, around)
        self._recaptures.count_step()
        if found is None:
            start = time.perf_counter()
            found = self._capture(batch, kind, around)
            self._say_why(batch, kind, around, time.perf_counter() - start)
            around = _Around(plan, self._guard.key())  # a model that sets itself up has changed it
            key = (str(kind.structure), kind.leaves, around)
        self._latest = kind, around
        self._remember(key, found)
        return found

    def adopt(self, kind: BatchType, plan: int, key: Key, program: Program) -> None:
        """Take over a program that was built for such a batch, with the guard's key of that time."""
        around = _Around(plan, key)
        self._latest = kind, around
        self._family(kind, around).add(kind)
        self._remember((str(kind.structure), kind.leaves, around), program)

    def clear(self) -> None:
        """Forget all of them."""
        for known in (self._of_key, self._families, self._kept):
            known.clear()

    def forget_plan(self, plan: int) -> None:
        """Forget what follows a plan that is followed no more."""
        others = [program for (_, _, around), program in self._of_key.items() if around.plan == plan]
        for program in others:
            self._drop(program)

    def exchange(self, known: Program, other: Program) -> None:
        """Let another program serve what a known one does."""
        for key in [key for key, program in self._of_key.items() if program is known]:
            self._of_key[key] = other
        for family in self._families.values():
            if family.symbolic is known:
                family.symbolic = other
        self._kept = OrderedDict((id(each), each) for each in (other if p is known else p for p in self._kept.values()))

    def of_plan(self, plan: int) -> list[Program]:
        """List the programs that follow a plan."""
        kept = {id(program) for (_, _, around), program in self._of_key.items() if around.plan == plan}
        return [program for place, program in self._kept.items() if place in kept]

    def _say_why(self, batch: Any, kind: BatchType, around: _Around, seconds: float) -> None:
        """Tell what a capture was for, as far as it was not another plan."""
        if self._latest is None or self._latest[1].plan != around.plan:
            return
        was, before = self._latest
        change = batch_change(batch, was, kind) or self._guard.change(before.key, around.key)
        if change is not None:
            self._recaptures.add(change, seconds)

    def _find_symbolic(self, kind: BatchType, leaves: Sequence[Any], around: Hashable) -> Program | None:
        family = self._families.get((kind.like(), around))
        if family is None or family.symbolic is None or not family.symbolic.captured.guard(leaves):
            return None
        return family.symbolic

    def _capture(self, batch: Any, kind: BatchType, around: Hashable) -> Program:
        family = self._family(kind, around)
        family.add(kind)
        varying = family.varying if family.captures > STATIC_SHAPES and family.may_be_symbolic else {}
        try:
            program = settled(self._guard, lambda: self._make(batch, varying))
        except CaptureFailed:
            if not varying:
                raise
            family.may_be_symbolic = False  # what does not trace with symbols may do so for each of its shapes
            return settled(self._guard, lambda: self._make(batch, {}))
        if varying:
            family.symbolic = program
        return program

    def _family(self, kind: BatchType, around: Hashable) -> _Family:
        key = (kind.like(), around)
        family = self._families.setdefault(key, _Family(kind))
        self._families.move_to_end(key)
        if len(self._families) > FAMILIES:
            self._families.popitem(last=False)
        return family

    def _remember(self, key: _Known, program: Program) -> None:
        self._of_key[key] = self._kept[id(program)] = program
        self._of_key.move_to_end(key)
        self._kept.move_to_end(id(program))
        if len(self._of_key) > KEYS:
            self._of_key.popitem(last=False)
        while len(self._kept) > CAPTURES * (1 + self.racing):
            self._drop(next(iter(self._kept.values())))

    def _drop(self, program: Program) -> None:
        self._kept.pop(id(program), None)
        for key in [key for key, known in self._of_key.items() if known is program]:
            del self._of_key[key]
        for family in self._families.values():
            if family.symbolic is program:
                family.symbolic = None
