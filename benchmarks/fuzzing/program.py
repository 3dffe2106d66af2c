"""A training program as a list of features, each of which can be dropped without moving the others.

A feature's own choices (sizes, rates, which parameter) come from a generator named after the seed and its slot, so that
dropping one leaves all others as they were: that is what makes a failing program shrink.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Feature:
    """One choice; its slot names it, as in `block.2`."""

    slot: str
    name: str
    step: int | None = None
    """Before which step it happens, for changes."""

    def __str__(self) -> str:
        return f"{self.slot}={self.name}" + (f"@{self.step}" if self.step is not None else "")


class Add(Protocol):
    """Choose one of these names for a slot, or with a probability none."""

    def __call__(
        self, slot: str, names: Sequence[str], probability: float = ..., *, step: int | None = ...
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that a training run does."""

    seed: int
    ranks: int
    steps: int
    features: tuple[Feature, ...]
    theme: str = ""
    """A small program's theme; a whole one has none."""

    def __str__(self) -> str:
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        theme = f", {self.theme}" if self.theme else ""
        return f"seed {self.seed}{theme}{ranks}, {self.steps} steps: {' '.join(map(str, self.features))}"

    def without(self, slots: Iterable[str]) -> Program:
        """The same program with less in it."""
        dropped = set(slots)
        kept = tuple(f for f in self.features if f.slot not in dropped)
        return Program(self.seed, self.ranks, self.steps, kept, self.theme)

    def get(self, slot: str, otherwise: str = "") -> str:
        """The name of the feature in a slot."""
        return next((f.name for f in self.features if f.slot == slot), otherwise)

    def all(self, kind: str) -> list[Feature]:
        """The features whose slots are of a kind: `block` has block.0, block.1 and so on."""
        return [f for f in self.features if f.slot.split(".")[0] == kind]

    def has(self, slot: str) -> bool:
        return any(f.slot == slot for f in self.features)

    def random(self, slot: str) -> random.Random:
        """The generator of a feature's own choices."""
        return random.Random(f"{self.seed} {slot}")
