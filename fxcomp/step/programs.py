"""Captures of one step for different batches and surroundings: find what fits, make what is missing, drop what is old.

    batch, stage, guard's key ── seen before ────────────► that variant
                              └─ other lengths, same family ► the family's symbolic variant, if its guard holds
                              └─ otherwise ───────────────► capture; from the third length on sizes become symbols

Everything here is bounded: graphs, the keys that lead to them, and what is remembered of shapes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from torch.fx import GraphModule

from fxcomp.capture.step_guard import BatchType, Key, StepGuard, batch_change, settled
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import CaptureFailed
from fxcomp.graph.captured import Captured
from fxcomp.graph.info import Source, info
from fxcomp.step.recaptures import Recaptures

CAPTURES = 8
"""How many captured variants are kept: the one that was not used for longest goes."""

KEYS = 512
"""How many batch types and surroundings are remembered with the variant that serves them; they are small."""

FAMILIES = 64
"""For how many kinds of batches, sizes aside, it is remembered which sizes varied."""

STATIC_SHAPES = 2
"""So many shapes are captured as they are; from the next on, sizes that varied become symbols."""


Replay = Callable[[], Mapping[str, GraphModule]]
"""The graph after each pass, by the pass's name."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One capture, rewritten and emitted for one plan."""

    captured: Captured
    graph: GraphModule
    replay: Replay
    """Runs the passes again for whoever asks; keeping every graph would take ten times the memory."""
    module: ModuleType
    source: str
    timeline: Timeline
    inputs: tuple[Source, ...]

    @classmethod
    def of(
        cls,
        captured: Captured,
        graph: GraphModule,
        replay: Replay,
        module: ModuleType,
        source: str,
        timeline: Timeline,
    ) -> Variant:
        sources = tuple(s for n in graph.graph.nodes if n.op == "placeholder" and (s := info(n).source) is not None)
        return cls(captured, graph, replay, module, source, timeline, sources)


Make = Callable[[Any, Mapping[int, frozenset[int]]], Variant]
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
    symbolic: Variant | None = None
    may_be_symbolic: bool = True

    def add(self, kind: BatchType) -> None:
        """Count a batch type that is about to be captured."""
        self.captures += 1
        for leaf, (was, now) in enumerate(zip(self.first.shapes, kind.shapes, strict=True)):
            differing = frozenset(d for d, (a, b) in enumerate(zip(was or (), now or (), strict=True)) if a != b)
            if differing:
                self.varying[leaf] = self.varying.get(leaf, frozenset()) | differing


class _Around(NamedTuple):
    """What else than the batch a capture is for."""

    stage: int
    key: Key


class Variants:
    """The captures of one step, the least recently used of which go."""

    def __init__(self, guard: StepGuard, make: Make):
        self._guard, self._make = guard, make
        self._of_key: OrderedDict[Hashable, Variant] = OrderedDict()
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._kept: OrderedDict[int, Variant] = OrderedDict()
        self._latest: tuple[BatchType, _Around] | None = None
        self._recaptures = Recaptures()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, batch: Any, kind: BatchType, leaves: Sequence[Any], stage: int) -> Variant:
        """The variant for a batch as everything else is now; captured here alone if there is none."""
        around = _Around(stage, self._guard.key())
        key = (str(kind.structure), kind.leaves, around)
        found = self._of_key.get(key) or self._find_symbolic(kind, leaves, around)
        self._recaptures.count_step()
        if found is None:
            start = time.perf_counter()
            found = self._capture(batch, kind, around)
            self._say_why(batch, kind, around, time.perf_counter() - start)
            around = _Around(stage, self._guard.key())  # a model that sets itself up has changed it
            key = (str(kind.structure), kind.leaves, around)
        self._latest = kind, around
        self._remember(key, found)
        return found

    def adopt(self, kind: BatchType, stage: int, key: Key, variant: Variant) -> None:
        """Take over a variant that was built for such a batch, with the guard's key of that time."""
        around = _Around(stage, key)
        self._latest = kind, around
        self._family(kind, around).add(kind)
        self._remember((str(kind.structure), kind.leaves, around), variant)

    def clear(self) -> None:
        """Forget all of them."""
        for known in (self._of_key, self._families, self._kept):
            known.clear()

    def exchange(self, known: Variant, other: Variant) -> None:
        """Let another variant serve what a known one does."""
        for key in [key for key, variant in self._of_key.items() if variant is known]:
            self._remember(key, other)
        self._drop(known)

    def _say_why(self, batch: Any, kind: BatchType, around: _Around, seconds: float) -> None:
        """Tell what a capture was for, as far as it was not another stage."""
        if self._latest is None or self._latest[1].stage != around.stage:
            return
        was, before = self._latest
        change = batch_change(batch, was, kind) or self._guard.change(before.key, around.key)
        if change is not None:
            self._recaptures.add(change, seconds)

    def _find_symbolic(self, kind: BatchType, leaves: Sequence[Any], around: Hashable) -> Variant | None:
        family = self._families.get((kind.like(), around))
        if family is None or family.symbolic is None or not family.symbolic.captured.guard(leaves):
            return None
        return family.symbolic

    def _capture(self, batch: Any, kind: BatchType, around: Hashable) -> Variant:
        family = self._family(kind, around)
        family.add(kind)
        varying = family.varying if family.captures > STATIC_SHAPES and family.may_be_symbolic else {}
        try:
            variant = settled(self._guard, lambda: self._make(batch, varying))
        except CaptureFailed:
            if not varying:
                raise
            family.may_be_symbolic = False  # what does not trace with symbols may do so for each of its shapes
            return settled(self._guard, lambda: self._make(batch, {}))
        if varying:
            family.symbolic = variant
        return variant

    def _family(self, kind: BatchType, around: Hashable) -> _Family:
        key = (kind.like(), around)
        family = self._families.setdefault(key, _Family(kind))
        self._families.move_to_end(key)
        if len(self._families) > FAMILIES:
            self._families.popitem(last=False)
        return family

    def _remember(self, key: Hashable, variant: Variant) -> None:
        self._of_key[key] = self._kept[id(variant)] = variant
        self._of_key.move_to_end(key)
        self._kept.move_to_end(id(variant))
        if len(self._of_key) > KEYS:
            self._of_key.popitem(last=False)
        if len(self._kept) > CAPTURES:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, variant: Variant) -> None:
        self._kept.pop(id(variant), None)
        for key in [key for key, known in self._of_key.items() if known is variant]:
            del self._of_key[key]
        for family in self._families.values():
            if family.symbolic is variant:
                family.symbolic = None
