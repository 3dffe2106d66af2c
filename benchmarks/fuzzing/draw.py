"""Draw a training program from a seed.

seed 7: input=tokens block.0=linear block.1=noise optimizer=adamw change.0=eval_part@2
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from fuzzing.changes import HOW_OFTEN
from fuzzing.losses import WEIGHTS
from fuzzing.models import BLOCKS, INPUTS, TRAITS
from fuzzing.program import Add, Feature, Program
from fuzzing.themes import THEMES, themes_of
from fuzzing.training import OPTIMIZERS, OPTIONS, SCHEDULES

STRUCTURES = ("tuple", "dict", "nested", "aliased", "list")
LAYOUTS = ("transposed", "strided", "expanded")
LENGTHS = ("two", "changing", "down_to_one")
SMALL = 1_000_000
"""From this seed on programs are small, and each is about one theme."""

BETWEEN = ("seed", "evaluate", "train_pass", "checkpoint", "load_model", "option")
"""Events between two steps of any small program."""

PLANS = ("int8", "topk(0.05)", "sign", "bf16", "powersgd(2)", "int4")


def draw(seed: int, ranks: int = 1) -> Program:
    """The program of a seed."""
    r = random.Random(f"{seed}")
    found: list[Feature] = []

    def add(slot: str, names: Sequence[str], probability: float = 1.0, *, step: int | None = None) -> None:
        name = r.choice(list(names))
        if r.random() < probability:
            found.append(Feature(slot, name, step))

    if theme := theme_of(seed, ranks):
        steps = _draw_small(r, theme, add, ranks)
        return Program(seed, ranks, steps, tuple(found), theme)
    add("input", tuple(INPUTS))
    layers = BLOCKS[INPUTS[found[0].name]]
    for number in range(r.choice((1, 2, 2, 3, 4))):
        add(f"block.{number}", tuple(layers))
    for trait in TRAITS:
        add(f"trait.{trait}", (trait,), 0.08)
    add("weight", WEIGHTS, 0.4)
    add("accumulate", ("2",), 0.15)
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


def theme_of(seed: int, ranks: int) -> str:
    """Name a program's theme; empty for a whole one."""
    return themes_of(ranks)[seed % len(themes_of(ranks))] if seed >= SMALL else ""


def _draw_small(r: random.Random, theme: str, add: Add, ranks: int) -> int:
    """A theme's own choices, and a few that go with every theme."""
    steps = THEMES[theme].draw(r, add, ranks)
    if theme != "alone":
        add("optimizer", ("sgd", "sgd", "adamw"))
        add("option.momentum", ("momentum",), 0.2)
        add("change.0", BETWEEN, 0.25, step=r.randrange(1, steps))
        add("plan", PLANS, 0.2 if ranks > 1 else 0.0)
    return steps
