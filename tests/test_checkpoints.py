"""Checkpoints of plain tensors: ranks are killed and started again, on as many or on others."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks, try_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.plan.strategy import Strategy
from fxcomp.step.compiled_step import CompiledStep

JOB = JOBS["mlp"]
STEPS = 6


def strategy(name: str) -> Strategy:
    kind, _, text = name.rpartition(" ")
    compressor = parse_compressor(text)
    return Strategy.two_shots(compressor, compressor) if kind else Strategy.flat(compressor)


def compiled(name: str, seed: int = 0) -> CompiledStep:
    """A step of a model with dropout, whose random numbers go on from `seed`."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = plan_in_turns(model, [strategy(name)], per_bucket=2)
    step = fxcomp.compile_step(model, cross_entropy, optimizer, JOB.batch(0), compress=plan)
    torch.manual_seed(seed + dist.get_rank())
    return step


def run(name: str, folder: Path, stop: int) -> dict[str, Tensor]:
    """Train with a checkpoint after every second step, from the last one on; kill this rank after `stop` steps."""
    step = compiled(name, seed=dist.get_rank() + 10 * stop)
    model, (optimizer,) = step.training.model, step.training.optimizers
    whole = sorted(path for path in folder.glob("step *") if (path / ".metadata").exists())
    if whole:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=whole[-1])
        optimizer.load_state_dict(state["optimizer"])
        step.load_state_dict(fxcomp.read_checkpoint(whole[-1]))
        assert step.steps > 0
    else:
        torch.manual_seed(dist.get_rank())
    while step.steps < STEPS:
        step(JOB.batch(step.steps, dist.get_rank()))
        if step.steps % 2 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step.checkpoint()}
            dcp.save(state, checkpoint_id=folder / f"step {step.steps}")
        if step.steps == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    return {**{name: p.detach().clone() for name, p in model.named_parameters()}, **step.checkpoint()}


def straight_then_killed(name: str, folder: Path, stop: int) -> None:
    """Train without a pause and keep the result; train once more, and be killed."""
    torch.save(run(name, folder / "straight", -1), folder / f"straight {dist.get_rank()}")
    run(name, folder / "killed", stop)


def resumed(name: str, folder: Path) -> list[str]:
    """Go on where ranks were killed; what differs from the run without a pause."""
    straight = torch.load(folder / f"straight {dist.get_rank()}", weights_only=True)
    found = run(name, folder / "killed", -1)
    assert found.keys() == straight.keys()
    return [key for key, value in found.items() if not torch.equal(value, straight[key])]


def check_resumes(name: str, folder: Path, ranks: int) -> None:
    stop = random.Random(name).randrange(2, STEPS)
    for outcome in try_ranks(ranks, straight_then_killed, name, folder, stop):
        assert outcome.error == "RankDied", outcome.trace
    assert run_ranks(ranks, resumed, name, folder) == [[]] * ranks


def test_killed_ranks_go_on_bit_for_bit(tmp_path: Path):
    check_resumes("two-shot int4", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two-shot int4", "topk(0.1)", "powersgd(2)", "sidco(0.05)"])
def test_killed_ranks_go_on_bit_for_bit_with_any_compressor(name: str, tmp_path: Path):
    check_resumes(name, tmp_path, 3)


def saved_by_its_state_dict(folder: Path) -> None:
    """DCP calls `state_dict` of what it is given, and keeps one rank's: nobody may load that as all ranks' own."""
    step = compiled("int8")
    step(JOB.batch(0, dist.get_rank()))
    dcp.save({"step": step}, checkpoint_id=folder)
    dcp.load({"step": step}, checkpoint_id=folder)


def test_states_of_which_a_library_kept_one_ranks_are_refused(tmp_path: Path):
    for outcome in try_ranks(2, saved_by_its_state_dict, tmp_path):
        assert outcome.error == "BadState", outcome.trace
        assert "was mixed with another rank's" in outcome.text or "would count twice" in outcome.text


def of_another_model() -> None:
    step = compiled("int8")
    step(JOB.batch(0, dist.get_rank()))
    saved = step.checkpoint()
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))
    other = fxcomp.compile_step(
        model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), JOB.batch(0), compress="int8"
    )
    other.load_state_dict(saved)


def test_the_checkpoint_of_another_model_says_what_differs():
    for outcome in try_ranks(2, of_another_model):
        assert outcome.error == "BadState", outcome.trace
        assert "they hold '3.bias', which this model does not have" in outcome.text


def of_another_plan(name: str) -> str:
    """Return the report after a state of int8 was loaded under another plan."""
    step = compiled("int8")
    step(JOB.batch(0, dist.get_rank()))
    other = compiled(name)
    other.load_state_dict(step.checkpoint())
    return " ".join(other.explain().split())


def test_the_checkpoint_of_another_plan_says_what_differs():
    for said in run_ranks(2, of_another_plan, "topk(0.1)"):
        assert "the loaded state was saved under another plan: 4 gradients int8 -> topk(0.1)." in said
        assert "compile with compress=fxcomp.saved_plan(state)" in said
    for said in run_ranks(2, of_another_plan, "int8"):
        assert "another plan" not in said
