"""A few random training programs beside eager PyTorch; `benchmarks/fuzz_steps.py` runs thousands."""

from __future__ import annotations

import pytest
from fuzzing.draw import draw
from fuzzing.follow import follow
from fuzzing.themes import make_world, themes_of
from fuzzing.world import World

SEEDS = (100002, 100008, 100011, 100022)
"""Programs that together have most of what a program may have."""


SMALL = (1000000, 1000001, 1000003, 1000004)
"""Small programs, of each theme at least one."""


@pytest.mark.slow
def test_random_programs_do_what_eager_does():
    for seed in SEEDS:
        outcome = follow(draw(seed))
        assert outcome.kind == "equal", f"{draw(seed)}\n{outcome}"


@pytest.mark.slow
def test_small_programs_of_every_theme_end_well():
    for seed in SMALL:
        outcome = follow(draw(seed))
        assert not outcome.is_finding, f"{draw(seed)}\n{outcome}"
    assert {draw(seed).theme for seed in SMALL} == set(themes_of(1))


def test_a_program_on_several_ranks_has_a_theme_of_its_own():
    assert {draw(seed, 2).theme for seed in range(1_000_000, 1_000_010)} == set(themes_of(2))


def test_sizes_come_from_few_that_tracing_may_specialise():
    world = make_world(draw(1_000_139), 0)
    assert {world.batch(step)[0].shape[0] for step in range(5)} >= {0, 1, 2, 4}


def test_leaving_out_a_feature_moves_no_other():
    program = draw(100003)
    smaller = program.without(["block.1", "change.0"])
    assert [f for f in program.features if f.slot not in ("block.1", "change.0")] == list(smaller.features)
    assert program.random("block.0").random() == smaller.random("block.0").random()


def test_a_step_that_is_not_eager_s_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(World, "eager_update", lambda _: None)
    outcome = follow(draw(SEEDS[0]))
    assert outcome.kind == "wrong", outcome
