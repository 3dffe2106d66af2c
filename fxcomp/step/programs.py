"""Programs of one step, looked up by batch, plan and guard key (settings that captures depend on).

    all seen before                      the same program
    only sizes differ (same *family*)    a symbolic program whose guard accepts the sizes
    otherwise                            capture; from a family's third shape on, sizes become symbols

Conditions on the batch's values (`Prelude`) must also give the same answers as in the capture. Sizes 0 and 1 are never
symbols, so a family may have several symbolic programs.
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
"""Maximum number of captured programs per plan; the least recently used one is dropped."""

KEYS = 512
"""Maximum number of lookup keys."""

FAMILIES = 64
"""Maximum number of families whose varying sizes are recorded."""

STATIC_SHAPES = 2
"""Captures per family with static sizes. In later captures, sizes that varied become symbols."""

SYMBOLIC_TRIES = 4
"""Maximum number of failed symbolic traces per family. A failed trace doubles the time of its capture."""


_ASK_LESS = (
    "Depend less on values: compare instead of reading a number, compute both sides and select with torch.where, or"
    " pass the decision in the batch."
)

_GRAPH = attrgetter("captured.graph")

Make = Callable[[Any, Mapping[int, frozenset[int]]], Program]
"""Captures and compiles a step for a batch, given dimensions that may vary in each leaf, without communication."""


@dataclass(slots=True)
class _Family:
    """Batches that differ only in sizes, with the same plan and guard key."""

    first: BatchType
    captures: int = 0
    varying: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """Dimensions that varied, by batch leaf."""
    symbolic: list[Program] = field(default_factory=list[Program])
    """Programs that may serve other sizes, the latest first."""
    failures: int = 0

    def open_dimensions(self, kind: BatchType) -> dict[int, frozenset[int]]:
        """Return the dimensions, by leaf, whose sizes become symbols."""
        if self.captures <= STATIC_SHAPES or self.failures >= SYMBOLIC_TRIES:
            return {}
        chosen = {
            leaf: frozenset(d for d in dimensions if (kind.shapes[leaf] or ())[d] not in compat.SPECIAL_SIZES)
            for leaf, dimensions in self.varying.items()
        }
        return {leaf: dimensions for leaf, dimensions in chosen.items() if dimensions}

    def forget(self, program: Program) -> None:
        self.symbolic = [each for each in self.symbolic if each is not program]

    def add(self, kind: BatchType) -> None:
        self.captures += 1
        for leaf, (was, now) in enumerate(zip(self.first.shapes, kind.shapes, strict=True)):
            differing = frozenset(d for d, (a, b) in enumerate(zip(was or (), now or (), strict=True)) if a != b)
            if differing:
                self.varying[leaf] = self.varying.get(leaf, frozenset()) | differing


def _fits(program: Program, leaves: Sequence[Any]) -> bool:
    guard = program.captured.guard
    assert guard is not None, "a program for other sizes has a guard"
    prelude = program.captured.prelude
    return guard(leaves) and (prelude is None or prelude.other_answer(leaves) is None)


class _Around(NamedTuple):
    plan: int
    key: Key


_Known = tuple[str, Hashable, _Around]

_Answered = tuple[str, Hashable, _Around, Prelude | None]
"""Batch structure, leaves, plan with guard key, and conditions with the answers of the capture."""


class Programs:
    def __init__(self, guard: StepGuard, make: Make):
        self._guard, self._make = guard, make
        self._of_key: OrderedDict[_Answered, Program] = OrderedDict()
        self._preludes: dict[_Known, list[Prelude | None]] = {}
        """Preludes of programs by lookup key, the last used first."""
        self._other_answer: OtherAnswer | None = None
        """First answer in the last lookup that differs from the captured one."""
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._kept: OrderedDict[int, Program] = OrderedDict()
        self._latest: tuple[BatchType, _Around] | None = None
        self._recaptures = Recaptures()
        self.racing = 0
        """Number of plans that race the plan in force."""
        self.is_new = False
        """True after a capture of a new kind of batch, until the schedule resets it."""
        self._kinds_captured: set[int] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, batch: Any, kind: BatchType, leaves: Sequence[Any], plan: int) -> Program:
        """Return the program for a batch and the current guard key; capture it locally if needed."""
        around = _Around(plan, self._guard.key())
        key = (str(kind.structure), kind.leaves, around)
        found = self._seen(key, leaves) or self._find_symbolic(kind, leaves, around)
        self._recaptures.count_step()
        if found is None:
            start = time.perf_counter()
            found = self._capture(batch, kind, around)
            seconds = time.perf_counter() - start
            before, around = around, _Around(plan, self._guard.key())  # lazy initialization changes the key
            key = (str(kind.structure), kind.leaves, around)
            if not self._offer(found, kind, around):
                self._say_why(batch, kind, before, seconds)
            self._count_kind(kind, around)
        self._latest = kind, around
        self._remember(key, found)
        return found

    @property
    def options(self) -> Sequence[Hashable]:
        """Options of each parameter group in the latest program."""
        return () if self._latest is None else self._latest[1].key.options

    def adopt(self, kind: BatchType, plan: int, key: Key, program: Program) -> None:
        """Register a program built under the given guard key."""
        around = _Around(plan, key)
        self._latest = kind, around
        self._family(kind, around).add(kind)
        self._kinds_captured.add(hash((str(kind.structure), kind.leaves, key)))
        self._remember((str(kind.structure), kind.leaves, around), program)

    def clear(self) -> None:
        self.racing = 0
        for known in (self._of_key, self._preludes, self._families, self._kept):
            known.clear()

    def forget_plan(self, plan: int) -> None:
        others = [program for key, program in self._of_key.items() if key[2].plan == plan]
        for program in others:
            self._drop(program)

    def exchange(self, known: Program, other: Program) -> None:
        for key in [key for key, program in self._of_key.items() if program is known]:
            self._of_key[key] = other
        for family in self._families.values():
            family.symbolic = [other if each is known else each for each in family.symbolic]
        self._kept = OrderedDict((id(each), each) for each in (other if p is known else p for p in self._kept.values()))

    def of_plan(self, plan: int) -> list[Program]:
        kept = {id(program) for key, program in self._of_key.items() if key[2].plan == plan}
        return [program for place, program in self._kept.items() if place in kept]

    def _count_kind(self, kind: BatchType, around: _Around) -> None:
        seen = hash((str(kind.structure), kind.leaves, around.key))
        self.is_new |= seen not in self._kinds_captured
        self._kinds_captured.add(seen)

    def _say_why(self, batch: Any, kind: BatchType, around: _Around, seconds: float) -> None:
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
        """Return the program of this key whose capture gave the same answers as the batch."""
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
        return None if family is None else next((each for each in family.symbolic if _fits(each, leaves)), None)

    def _capture(self, batch: Any, kind: BatchType, around: Hashable) -> Program:
        family = self._family(kind, around)
        family.add(kind)
        varying = family.open_dimensions(kind)
        try:
            return settled(self._guard, lambda: self._make(batch, varying), _GRAPH)
        except Exception:  # Python code may raise for symbols only
            if not varying:
                raise
            family.failures += 1  # may fail again for other shapes
            return settled(self._guard, lambda: self._make(batch, {}), _GRAPH)

    def _offer(self, program: Program, kind: BatchType, around: Hashable) -> bool:
        """Add a symbolic program to its family. Return True if the family had none."""
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
            self._drop(program)  # no lookup finds it

    def _forget(self, key: _Answered) -> None:
        del self._of_key[key]
        known, prelude = key[:3], key[3]
        self._preludes[known].remove(prelude)
        if not self._preludes[known]:
            del self._preludes[known]


VALUES = 4
"""Warn after this number of different values in consecutive captures."""

SOON = 20
"""Maximum number of steps between two captures that count as consecutive."""


class Recaptures:
    def __init__(self) -> None:
        self._what = ""
        self._values: list[str] = []
        self._seconds: list[float] = []
        self._steps_ago = 0
        self._said: set[str] = set()

    def count_step(self) -> None:
        self._steps_ago += 1

    def add(self, change: Change, seconds: float) -> None:
        """Record a capture, its cause and its duration in seconds; warn once per repeated cause."""
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
