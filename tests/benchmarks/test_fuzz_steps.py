"""A few random training programs beside eager PyTorch; `benchmarks/fuzz_steps.py` runs thousands."""

from __future__ import annotations

import pytest
from fuzzing.draw import draw
from fuzzing.follow import follow
from fuzzing.world import World

SEEDS = (100014, 200650, 200420, 200301, 200360, 200472, 200340, 200372)
"""Programs that together have most of what a program may have."""


def test_random_programs_do_what_eager_does():
    for seed in SEEDS:
        outcome = follow(draw(seed))
        assert outcome.kind == "equal", f"{draw(seed)}\n{outcome}"


def test_leaving_out_a_feature_moves_no_other():
    program = draw(100015)
    smaller = program.without(["block.1", "change.0"])
    assert [f for f in program.features if f.slot not in ("block.1", "change.0")] == list(smaller.features)
    assert program.random("block.0").random() == smaller.random("block.0").random()


def test_a_step_that_is_not_eager_s_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(World, "eager_update", lambda _: None)
    outcome = follow(draw(SEEDS[0]))
    assert outcome.kind == "wrong", outcome
