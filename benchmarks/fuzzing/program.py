"""A training program drawn from a seed: a list of features, each of which can be dropped without moving the others.

    seed 7: input=tokens block.0=lstm block.1=noise loss=cross_entropy optimizer=adamw change.0=eval_part@2

A feature's own choices (sizes, rates, which parameter) come from a generator named after the seed and its slot, so that
dropping one leaves all others as they were: that is what makes a failing program shrink.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fuzzing.blocks import ANYWHERE, BLOCKS, PASSAGES
from fuzzing.changes import HOW_OFTEN
from fuzzing.losses import AUXILIARY, LOSSES, TERMS, WEIGHTS
from fuzzing.models import INPUTS, TRAITS
from fuzzing.odd_layers import SELDOM
from fuzzing.training import OPTIMIZERS, OPTIONS, SCHEDULES

STRUCTURES = ("tuple", "dict", "nested", "aliased", "list")
LAYOUTS = ("transposed", "strided", "expanded")
LENGTHS = ("two", "changing", "down_to_one")
PLANS = ("int8", "topk(0.05)", "sign", "bf16", "powersgd(2)", "int4")


@dataclass(frozen=True, slots=True)
class Feature:
    """One choice; its slot names it, as in `block.2`."""

    slot: str
    name: str
    step: int | None = None
    """Before which step it happens, for changes."""

    def __str__(self) -> str:
        return f"{self.slot}={self.name}" + (f"@{self.step}" if self.step is not None else "")


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that a training run does."""

    seed: int
    ranks: int
    steps: int
    features: tuple[Feature, ...]

    def __str__(self) -> str:
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"seed {self.seed}{ranks}, {self.steps} steps: {' '.join(map(str, self.features))}"

    def without(self, slots: Iterable[str]) -> Program:
        """The same program with less in it."""
        dropped = set(slots)
        kept = tuple(f for f in self.features if f.slot not in dropped)
        return Program(self.seed, self.ranks, self.steps, kept)

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


def draw(seed: int, ranks: int = 1) -> Program:
    """The program of a seed."""
    r = random.Random(f"{seed}")
    found: list[Feature] = []

    def add(slot: str, names: Sequence[str], probability: float = 1.0) -> None:
        name = r.choice(list(names))
        if r.random() < probability:
            found.append(Feature(slot, name))

    add("input", tuple(INPUTS))
    _draw_blocks(r, INPUTS[found[0].name], add)
    for trait in TRAITS:
        add(f"trait.{trait}", (trait,), 0.08)
    add("loss", tuple(LOSSES))
    for number in range(r.choice((0, 0, 1, 2))):
        add(f"term.{number}", tuple(TERMS))
    add("weight", tuple(WEIGHTS), 0.4)
    add("aux", tuple(AUXILIARY), 0.4)
    add("optimizer", OPTIMIZERS)
    optimizer = found[-1].name
    for option, takers in OPTIONS.items():
        add(f"option.{option}", (option,), 0.2 if optimizer in takers else 0.0)
    add("schedule", tuple(SCHEDULES), 0.35)
    add("clip", ("0.05", "1.0"), 0.25)
    add("skip_nonfinite", ("yes",), 0.08)
    add("structure", STRUCTURES)
    add("layout", LAYOUTS, 0.15)
    add("lengths", LENGTHS, 0.45)
    add("around", ("no_grad", "inference_mode", "autocast"), 0.12)
    add("verify", ("1", "sampled"), 0.25)
    add("plan", PLANS, 0.35 if ranks > 1 else 0.0)
    steps = r.choice((4, 5, 6))
    for number in range(r.choice((0, 1, 1, 2, 2, 3))):
        name = r.choices(list(HOW_OFTEN), list(HOW_OFTEN.values()))[0]
        found.append(Feature(f"change.{number}", name, r.randrange(1, steps)))
    return Program(seed, ranks, steps, tuple(found))


def _draw_blocks(r: random.Random, kind: str, add: Callable[..., None]) -> None:
    """One to four blocks that fit one behind the other."""
    for number in range(r.choice((1, 2, 2, 3, 4))):
        slot, sort = f"block.{number}", r.random()
        if sort < 0.01:
            add(slot, tuple(SELDOM))
        elif sort < 0.3:
            add(slot, tuple(ANYWHERE))
        elif sort < 0.4 and (passages := PASSAGES.get(kind)):
            name = r.choice(list(passages))
            kind = passages[name][0]
            add(slot, (name,))
        else:
            add(slot, tuple(BLOCKS[kind]))
        if r.random() < 0.2:
            add(f"wrap.{number}", ("residual", "checkpoint", "autocast", "sequential", "twice"))
