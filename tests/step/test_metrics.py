"""A step in numbers: what was sent, how long it took, what is kept."""

import json
import math
import re

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import JOB, compiled, table
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks

import fxcomp
from fxcomp.cost.table import CostTable


def metrics_of(plan: str) -> tuple[list[dict[str, object]], int, float, list[str]]:
    job = JOBS["mlp"]
    model = job.build()
    step = fxcomp.compile_step(
        model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, dist.get_rank()), compress=plan
    )
    lines = [repr(step)]
    found = [step.metrics(residuals=True)]
    for number in range(3):
        step(job.batch(number, dist.get_rank()))
        found.append(step.metrics(residuals=number == 2))
    kept = step.in_force.state.residuals.arena
    lines.append(repr(step))
    return found, sum(p.nbytes for p in model.parameters()), float(kept.norm()), lines


@pytest.mark.parametrize("plan", ["dense", "int4"])
def test_metrics_say_what_a_step_sent_and_keeps(plan: str):
    by_rank = run_ranks(2, metrics_of, plan)
    for found, dense_bytes, kept, lines in by_rank:
        first, *_, last = found
        assert first["step"] == 0
        assert (last["step"], last["skipped"]) == (3, 0)
        assert math.isnan(first["ratio"])  # pyright: ignore[reportArgumentType]
        assert last["ratio"] == pytest.approx(dense_bytes / 1e6 / last["sent_mb"])  # pyright: ignore
        assert "residual_norm" not in found[1]
        assert last["residual_norm"] == pytest.approx(kept, rel=1e-5)
        if plan == "dense":
            assert (last["ratio"], kept) == (1.0, 0.0)
        else:
            assert last["ratio"] > 3.0  # pyright: ignore[reportOperatorIssue]
            assert kept > 0.0
        json.dumps(last)
        before, after = lines
        said = "dense, " if plan == "dense" else r"\d of \d buckets? compressed, "
        ratio = "" if plan == "dense" else r"gradients / sent \d.*, "
        digest = last["plan"]
        assert re.fullmatch(rf"<CompiledStep: {said}predicted \S+ ms a step, 0 steps, plan {digest}>", before)
        measured = r"\S+ ms a step, predicted \S+ ms a step"
        assert re.fullmatch(rf"<CompiledStep: {said}{ratio}{measured}, 3 steps, plan {digest}>", after)
    assert by_rank[0][0][-1]["plan"] == by_rank[1][0][-1]["plan"]


def metrics_in_a_race() -> list[tuple[str, str, float]]:
    """By step: the plan that it began with, and what its metrics say afterwards."""
    step, found = compiled(table(0.05), race="auto", verify="never"), list[tuple[str, str, float]]()
    for number in range(16):
        began = step.plan.digest
        step(JOB.batch(number, dist.get_rank()))
        said = step.metrics()
        found.append((began, said["plan"], said["sent_mb"]))
    return found


def test_metrics_name_the_plan_that_the_step_followed():
    for found in run_ranks(2, metrics_in_a_race):
        assert len({began for began, _, _ in found}) > 1, "plans take turns in a race"
        for began, said, sent_mb in found:
            assert said == began
            assert {sent for plan, _, sent in found if plan == began} == {sent_mb}


def lines_of_a_race() -> list[str]:
    job = JOBS["mlp"]
    model = job.build()
    slow = fxcomp.Cluster.parse("2x1, intra 100gbit, inter 0.01gbit@50us")
    optimizer = OPTIMIZERS["plain"](model.parameters())
    step = fxcomp.compile_step(model, cross_entropy, optimizer, job.batch(0, 0), cluster=slow, costs=CostTable())
    lines: list[str] = []
    for number in range(4):
        lines += [repr(step)] if step.is_racing else []
        step(job.batch(number, 0))
    return lines


def test_a_line_says_that_plans_take_turns():
    for lines in run_ranks(2, lines_of_a_race):
        assert lines
        assert all(", plans take turns, " in line for line in lines)


def test_one_rank_has_metrics_too():
    job = JOBS["mlp"]
    model = job.build()
    step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
    step(job.batch(0, 0))
    found = step.metrics(residuals=True)
    assert (found["step"], found["sent_mb"], found["residual_norm"]) == (1, 0.0, 0.0)
    assert torch.isfinite(torch.tensor(found["step_ms"]))
