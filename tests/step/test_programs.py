"""Captures are found again, bounded in number, and said when they do not end."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.followed import compiled, count_captures, small
from helpers.jobs import JOBS, cross_entropy
from torch import Tensor

import fxcomp
from fxcomp.step.programs import CAPTURES, FAMILIES, KEYS


def weighted(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    return cross_entropy(model, batch["rows"]) * (1 + batch["t"])


def by_time() -> fxcomp.CompiledStep:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fxcomp.compile_step(model, weighted, optimizer, {"rows": JOBS["mlp"].batch(0), "t": 0})


def run_with(step: fxcomp.CompiledStep, *times: int) -> None:
    for t in times:
        step({"rows": JOBS["mlp"].batch(t), "t": t})


def run_counting(step: fxcomp.CompiledStep, model: Any, steps: int) -> None:
    for model.calls in range(steps):
        step(JOBS["mlp"].batch(model.calls))


def test_a_value_in_the_batch_that_differs_at_every_step_is_said_once():
    step = by_time()
    with pytest.warns(UserWarning, match="fxcomp") as caught:
        run_with(step, *range(8))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("fxcomp: batch['t'] changed: 0, 1, 2, 3. A compiled step takes it for a constant;")
    assert re.search(r"captures the step again, which takes \d+\.\d+ s", text)
    assert text.endswith("Pass it as a tensor.")
    assert caught[0].filename == __file__


def test_an_attribute_that_differs_at_every_step_is_said_once():
    model = small()
    model.calls = 0
    step = compiled(model)
    text = r"model\.calls changed: 0, 1, 2, 3\. .*\n  Pass it as a tensor in the batch"
    with pytest.warns(UserWarning, match=text) as caught:
        run_counting(step, model, 6)
    assert len(caught) == 1


def test_values_that_come_back_are_not_captured_again_and_not_said():
    step = by_time()
    built = count_captures(step)
    run_with(step, 0, 1, 2, 1, 0, 2, 1, 2)
    assert len(built) == 2


def test_many_lengths_share_a_capture_and_what_is_remembered_of_them_is_bounded():
    model = small()
    step = compiled(model)
    built = count_captures(step)
    for length in (*range(5, 35), *range(5, 35)):
        step(JOBS["mlp"].batch(0, length=length))
    assert len(built) == 2, "one more length, then one for all"
    assert len(step.in_force.programs) == 3


def test_no_more_captures_are_kept_than_a_few_and_the_oldest_goes():
    step = by_time()
    built = count_captures(step)
    with pytest.warns(UserWarning, match="changed"):
        run_with(step, *(t for pair in range(CAPTURES + 3) for t in (pair, 0)))
    assert len(step.in_force.programs) == CAPTURES
    assert len(built) == CAPTURES + 2, "what is used at every other step stays"
    assert len(step.in_force.programs._of_key) <= KEYS
    assert len(step.in_force.programs._families) <= FAMILIES


def test_lengths_that_one_capture_serves_are_not_said():
    step = compiled(small())
    for length in (5, 6, 1, 7, 8, 9):
        step(JOBS["mlp"].batch(0, length=length))


def test_a_report_is_about_batches_like_the_first_and_says_so():
    step = compiled(small())
    step(JOBS["mlp"].batch(0))
    before = step.timeline
    assert " · batch float32[4, 20], int64[4]" in " ".join(step.explain().split())
    assert "other batches than the first" not in step.explain()
    for length in (40, 4000):
        step(JOBS["mlp"].batch(0, length=length))
    assert step.in_force.program.timeline.step_time_us > before.step_time_us
    assert step.timeline == before
    text = " ".join(step.explain().split())
    assert "2 of 3 steps had other batches than the first, of float32[4, 20], int64[4]" in text
    assert f"{before.step_time_us / 1e3:.3g}"[:4] in text
