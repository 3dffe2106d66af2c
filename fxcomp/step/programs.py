"""Captures of one step for different batches and surroundings: find one, make one, drop old ones.

    batch, plan, guard's key  ── seen before ────────────► that program, if values give the answers that Python saw
                              └─ other lengths, same family ► a symbolic program of it whose guard holds, likewise
                              └─ otherwise ───────────────► capture; from the third length on sizes become symbols

A size of 0 or 1 is no symbol. So a family may have several symbolic programs: for batches of one row, for others, and
for those in which two sizes happened to be equal where Python asked.

A value that leads to another capture again and again is told once: such a job looks merely slow.

Everything here is bounded: graphs, the keys that lead to them, and what is remembered of shapes.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from fxcomp import compat
from fxcomp.capture.batch_type import BatchType, Change, batch_change
from fxcomp.capture.step_guard import Key, StepGuard, settled
from fxcomp.codegen.program import Program
from fxcomp.graph.prelude import OtherAnswer, Prelude

CAPTURES = 8
"""The limit of captured programs: the one that was not used for longest goes. Each plan that races has so many."""

KEYS = 512
"""The limit of batch types and surroundings that are remembered with the program that serves them; they are small."""

FAMILIES = 64
"""For how many kinds of batches, sizes aside, it is remembered which sizes varied."""

STATIC_SHAPES = 2
"""So many shapes are captured as they are; from the next on, sizes that varied become symbols."""

SYMBOLIC_TRIES = 4
"""So often may tracing with symbols fail, for each kind of batches: it takes as long again. Other sizes may do."""


_ASK_LESS = (
    "Ask less of the values: compare instead of reading a number, compute both sides and select with torch.where, or"
    " pass what is decided in the batch."
)

_GRAPH = attrgetter("captured.graph")

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
    symbolic: list[Program] = field(default_factory=list[Program])
    """Programs that may serve other sizes, the latest first."""
    failures: int = 0
    """So often tracing with symbols has failed."""

    def open_dimensions(self, kind: BatchType) -> dict[int, frozenset[int]]:
        """Choose the dimensions of a batch, by leaf, whose sizes become symbols."""
        if self.captures <= STATIC_SHAPES or self.failures >= SYMBOLIC_TRIES:
            return {}
        chosen = {
            leaf: frozenset(d for d in dimensions if (kind.shapes[leaf] or ())[d] not in compat.SPECIAL_SIZES)
            for leaf, dimensions in self.varying.items()
        }
        return {leaf: dimensions for leaf, dimensions in chosen.items() if dimensions}

    def serving(self, leaves: Sequence[Any]) -> Program | None:
        """Find a symbolic program that these tensors may run through."""
        return next((each for each in self.symbolic if _fits(each, leaves)), None)

    def forget(self, program: Program) -> None:
        """Let a symbolic program go."""
        self.symbolic = [each for each in self.symbolic if each is not program]

    def add(self, kind: BatchType) -> None:
        """Count a batch type that is about to be captured."""
        self.captures += 1
        for leaf, (was, now) in enumerate(zip(self.first.shapes, kind.shapes, strict=True)):
            differing = frozenset(d for d, (a, b) in enumerate(zip(was or (), now or (), strict=True)) if a != b)
            if differing:
                self.varying[leaf] = self.varying.get(leaf, frozenset()) | differing


def _fits(program: Program, leaves: Sequence[Any]) -> bool:
    guard = program.captured.guard
    assert guard is not None, "a program that serves other sizes says which"
    prelude = program.captured.prelude
    return guard(leaves) and (prelude is None or prelude.other_answer(leaves) is None)


class _Around(NamedTuple):
    """The surroundings of a capture, beside the batch."""

    plan: int
    """The number of the plan that is followed."""
    key: Key


_Known = tuple[str, Hashable, _Around]
"""A batch's structure and leaves, and its surroundings."""

_Answered = tuple[str, Hashable, _Around, Prelude | None]
"""The same, and questions that are answered as they were while tracing."""


class Programs:
    """The captures of one step, the least recently used of which go."""

    def __init__(self, guard: StepGuard, make: Make):
        self._guard, self._make = guard, make
        self._of_key: OrderedDict[_Answered, Program] = OrderedDict()
        self._preludes: dict[_Known, list[Prelude | None]] = {}
        """The questions of the programs for a batch's type, those that were answered last first."""
        self._other_answer: OtherAnswer | None = None
        """Why the program that ran last for this type of batch does not serve it."""
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._kept: OrderedDict[int, Program] = OrderedDict()
        self._latest: tuple[BatchType, _Around] | None = None
        self._recaptures = Recaptures()
        self.racing = 0
        """The number of plans that take turns with the one that was in force."""
        self.is_new = False
        """A kind of batch was captured that had no capture before, in its surroundings; whoever verifies it says so."""
        self._kinds_captured: set[int] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, batch: Any, kind: BatchType, leaves: Sequence[Any], plan: int) -> Program:
        """The program for a batch as everything else is now; captured here alone if there is none."""
        around = _Around(plan, self._guard.key())
        key = (str(kind.structure), kind.leaves, around)
        found = self._seen(key, leaves) or self._find_symbolic(kind, leaves, around)
        self._recaptures.count_step()
        if found is None:
            start = time.perf_counter()
            found = self._capture(batch, kind, around)
            seconds = time.perf_counter() - start
            before, around = around, _Around(plan, self._guard.key())  # a model that sets itself up has changed it
            key = (str(kind.structure), kind.leaves, around)
            if not self._offer(found, kind, around):
                self._say_why(batch, kind, before, seconds)
            self._count_kind(kind, around)
        self._latest = kind, around
        self._remember(key, found)
        return found

    @property
    def options(self) -> Sequence[Hashable]:
        """Return the options of each parameter group that the capture found last has baked in."""
        return () if self._latest is None else self._latest[1].key.options

    def adopt(self, kind: BatchType, plan: int, key: Key, program: Program) -> None:
        """Take over a program that was built for such a batch, with the guard's key of that time."""
        around = _Around(plan, key)
        self._latest = kind, around
        self._family(kind, around).add(kind)
        self._kinds_captured.add(hash((str(kind.structure), kind.leaves, key)))
        self._remember((str(kind.structure), kind.leaves, around), program)

    def clear(self) -> None:
        """Forget all of them; none races any more."""
        self.racing = 0
        for known in (self._of_key, self._preludes, self._families, self._kept):
            known.clear()

    def forget_plan(self, plan: int) -> None:
        """Forget the programs of a plan that is followed no more."""
        others = [program for key, program in self._of_key.items() if key[2].plan == plan]
        for program in others:
            self._drop(program)

    def exchange(self, known: Program, other: Program) -> None:
        """Let another program serve what a known one does."""
        for key in [key for key, program in self._of_key.items() if program is known]:
            self._of_key[key] = other
        for family in self._families.values():
            family.symbolic = [other if each is known else each for each in family.symbolic]
        self._kept = OrderedDict((id(each), each) for each in (other if p is known else p for p in self._kept.values()))

    def of_plan(self, plan: int) -> list[Program]:
        """List the programs that follow a plan."""
        kept = {id(program) for key, program in self._of_key.items() if key[2].plan == plan}
        return [program for place, program in self._kept.items() if place in kept]

    def _count_kind(self, kind: BatchType, around: _Around) -> None:
        seen = hash((str(kind.structure), kind.leaves, around.key))
        self.is_new |= seen not in self._kinds_captured
        self._kinds_captured.add(seen)

    def _say_why(self, batch: Any, kind: BatchType, around: _Around, seconds: float) -> None:
        """Tell what a capture was for, as far as it was not another plan."""
        if self._latest is None or self._latest[1].plan != around.plan:
            return
        was, before = self._latest
        change = batch_change(batch, was, kind) or self._guard.change(before.key, around.key) or self._answer_change()
        if change is not None:
            self._recaptures.add(change, seconds)

    def _answer_change(self) -> Change | None:
        if self._other_answer is None:
            return None
        question, answer = self._other_answer
        what = f"the answer of {question.where} ({question.text})"
        return Change(what, str(question.answer), str(answer), _ASK_LESS)

    def _seen(self, key: _Known, leaves: Sequence[Any]) -> Program | None:
        """The program that such a batch had before, when its values gave the same answers."""
        self._other_answer = None
        preludes = self._preludes.get(key, ())
        for prelude in preludes:
            other = prelude.other_answer(leaves) if prelude is not None else None
            if other is None:
                return self._of_key[*key, prelude]
            self._other_answer = self._other_answer or other
        return None

    def _find_symbolic(self, kind: BatchType, leaves: Sequence[Any], around: Hashable) -> Program | None:
        family = self._families.get((kind.like(), around))
        return None if family is None else family.serving(leaves)

    def _capture(self, batch: Any, kind: BatchType, around: Hashable) -> Program:
        family = self._family(kind, around)
        family.add(kind)
        varying = family.open_dimensions(kind)
        try:
            return settled(self._guard, lambda: self._make(batch, varying), _GRAPH)
        except Exception:  # Python may raise for a symbol what it does not for a number
            if not varying:
                raise
            family.failures += 1  # what does not trace with symbols may do so for each of its shapes
            return settled(self._guard, lambda: self._make(batch, {}), _GRAPH)

    def _offer(self, program: Program, kind: BatchType, around: Hashable) -> bool:
        """Let a new program serve batches of other sizes; returns whether it is the first of its family to do so."""
        guard = program.captured.guard
        if guard is None or not guard.is_open:
            return False
        family = self._family(kind, around)
        family.symbolic.insert(0, program)
        return len(family.symbolic) == 1

    def _family(self, kind: BatchType, around: Hashable) -> _Family:
        key = (kind.like(), around)
        family = self._families.setdefault(key, _Family(kind))
        self._families.move_to_end(key)
        if len(self._families) > FAMILIES:
            self._families.popitem(last=False)
        return family

    def _remember(self, known: _Known, program: Program) -> None:
        prelude = program.captured.prelude
        key = (*known, prelude)
        self._of_key[key] = self._kept[id(program)] = program
        self._of_key.move_to_end(key)
        self._kept.move_to_end(id(program))
        preludes = self._preludes.setdefault(known, [])
        if prelude not in preludes[:1]:
            preludes[:] = [prelude, *(each for each in preludes if each is not prelude)]
        if len(self._of_key) > KEYS:
            self._drop_key(next(iter(self._of_key)))
        while len(self._kept) > CAPTURES * (1 + self.racing):
            self._drop(next(iter(self._kept.values())))

    def _drop(self, program: Program) -> None:
        self._kept.pop(id(program), None)
        for key in [key for key, known in self._of_key.items() if known is program]:
            self._forget(key)
        for family in self._families.values():
            family.forget(program)

    def _drop_key(self, key: _Answered) -> None:
        program = self._of_key[key]
        self._forget(key)
        if all(other is not program for other in self._of_key.values()):
            self._drop(program)  # no plan's change would find it

    def _forget(self, key: _Answered) -> None:
        del self._of_key[key]
        known, prelude = key[:3], key[3]
        self._preludes[known].remove(prelude)
        if not self._preludes[known]:
            del self._preludes[known]


VALUES = 4
"""Warn after so many captures in a row for different values."""

SOON = 20
"""Captures follow each other in a row if not more than so many steps lie between them."""


class Recaptures:
    """The latest captures that one and the same thing led to."""

    def __init__(self) -> None:
        self._what = ""
        self._values: list[str] = []
        self._seconds: list[float] = []
        self._steps_ago = 0
        self._said: set[str] = set()

    def count_step(self) -> None:
        """Note that a step was run."""
        self._steps_ago += 1

    def add(self, change: Change, seconds: float) -> None:
        """Note a capture, what led to it and what it cost; warn if that happens again and again."""
        if change.what != self._what or self._steps_ago > SOON:
            self._what, self._values, self._seconds = change.what, [change.before], []
        self._steps_ago = 0
        self._values.append(change.after)
        self._seconds.append(seconds)
        different = list(dict.fromkeys(self._values))
        if len(different) < VALUES or change.what in self._said:
            return
        self._said.add(change.what)
        warnings.warn(
            f"fxcomp: {change.what} changed: {', '.join(different[-VALUES:])}. A compiled step takes it for a constant;"
            f" each new value captures the step again, which takes {statistics.median(self._seconds):.2g} s.\n"
            f"  {change.remedy}",
            stacklevel=compat.users_level(),
        )
