"""A few random training programs beside eager PyTorch; `benchmarks/fuzz_steps.py` runs thousands."""

from __future__ import annotations

from typing import Any

import pytest
from fuzzing import follow as following
from fuzzing.follow import follow
from fuzzing.program import Program, draw
from fuzzing.world import World

SEEDS = (3, 5, 11, 50, 57)
"""Programs that together have most of what a program may have."""


def test_random_programs_do_what_eager_does():
    for seed in SEEDS:
        outcome = follow(draw(seed))
        assert outcome.kind == "equal", f"{draw(seed)}\n{outcome}"


def test_leaving_out_a_feature_moves_no_other():
    program = draw(57)
    smaller = program.without(["block.1", "change.0"])
    assert [f for f in program.features if f.slot not in ("block.1", "change.0")] == list(smaller.features)
    assert program.random("block.0").random() == smaller.random("block.0").random()


@pytest.mark.parametrize(
    ("patched", "said"),
    [
        ("eager_update", "the parameter|parameter .* differs"),
        ("after_step", "option lr"),
    ],
)
def test_a_step_that_is_not_eager_s_is_found(monkeypatch: pytest.MonkeyPatch, patched: str, said: str):
    worlds: list[World] = []
    original: Any = getattr(World, patched)

    class Forgetful(World):
        def __init__(self, program: Program, rank: int):
            super().__init__(program, rank)
            worlds.append(self)

    def forget(self: World, *args: Any) -> Any:
        return None if self is worlds[1] else original(self, *args)

    monkeypatch.setattr(following, "World", Forgetful)
    monkeypatch.setattr(Forgetful, patched, forget)
    outcome = follow(PLAIN)
    assert outcome.kind == "wrong"
    assert any(word in outcome.text for word in said.split("|")) or "differs" in outcome.text, outcome.text
