"""Themes of small programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from fuzzing.alone import Alone, draw_alone
from fuzzing.program import Add, Program
from fuzzing.shapes import Shapes, draw_shapes
from fuzzing.surroundings import Around, draw_around
from fuzzing.tensor_kinds import Kinds, draw_kinds
from fuzzing.watched import Watched, draw_watched
from fuzzing.world import World


class Theme(NamedTuple):
    """The way to draw a theme's programs, and their models."""

    draw: Callable[[random.Random, Add, int], int]
    """Adds features; returns the number of steps."""
    world: type[World]


THEMES = {
    "shapes": Theme(draw_shapes, Shapes),
    "kinds": Theme(draw_kinds, Kinds),
    "around": Theme(draw_around, Around),
    "alone": Theme(draw_alone, Alone),
    "watched": Theme(draw_watched, Watched),
}


def themes_of(ranks: int) -> tuple[str, ...]:
    """The themes of programs on so many ranks, as often as they are drawn."""
    if ranks == 1:
        return ("shapes", "shapes", "kinds", "kinds", "around", "watched", "watched")
    return ("alone", "alone", "alone", "shapes", "kinds", "watched")


def make_world(program: Program, rank: int) -> World:
    """Everything that a program trains, on one rank."""
    return THEMES[program.theme].world(program, rank) if program.theme else World(program, rank)
