"""A hook's plan and the best dense one take turns where the prediction is in doubt; the faster one stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.frontends import hook_trial


def tried(faster: str) -> tuple[bool, float, float, str]:
    """Let the plan and dense take turns, of which one is faster on rank 1 alone.

    Returns whether the plan at the end is dense, what is lost of the sum of all gradients, their largest, the report.
    """
    known, sure = hook_trial.Trial.medians_us, hook_trial.SURE
    slow = 3.0 if dist.get_rank() else 1.0
    hook_trial.SURE = 0.0
    hook_trial.Trial.medians_us = lambda *_: [2.0, slow] if faster == "plan" else [slow, 2.0]
    try:
        cluster = fxcomp.Cluster.parse("2x1, intra 100gbit, inter 0.01gbit@50us")
        hook = fxcomp.ddp_hook(cluster=cluster, costs=CostTable(), mode="aggressive")
        job, model = JOBS["mlp"], JOBS["mlp"].build()
        ddp, other = DistributedDataParallel(model), JOBS["mlp"].build()
        ddp.register_comm_hook(None, hook)
        made, sent = torch.zeros_like(model[2].weight), torch.zeros_like(model[2].weight)
        plans: list[bool] = []
        for step in range(36):
            ddp.zero_grad()
            cross_entropy(ddp, job.batch(step, dist.get_rank())).backward()
            sent += model[2].weight.grad
            made += torch.autograd.grad(cross_entropy(other, job.batch(step, dist.get_rank())), other[2].weight)[0]
            plans += [hook.plan is not None and hook.plan.is_dense]
        assert plans[14:20] == [*plans[26:31], True] == [True] * 6
        assert plans[8:14] == plans[20:26] == [False] * 6
        for piece in hook.state_dict()["residuals"].get("2.weight", ()):
            weight = piece["weight"][0] / piece["weight"][1] * dist.get_world_size()
            made.view(-1)[piece["start"] : piece["start"] + piece["values"].numel()] -= weight * piece["values"]
        dist.all_reduce(made)
        report = " ".join(hook.report().split())
        hook.close()
        lost = (made / dist.get_world_size() - sent).abs().max().item()
        return plans[-1], lost, sent.abs().max().item(), report
    finally:
        hook_trial.Trial.medians_us, hook_trial.SURE = known, sure


def both() -> dict[str, Any]:
    return {"plan is faster": tried("plan"), "dense is faster": tried("dense")}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, both)


@pytest.mark.parametrize(("faster", "note"), [("plan", "the plan stays"), ("dense", "dense is followed")])
def test_what_the_slowest_rank_finds_faster_stays_and_nothing_is_lost(
    ranks: list[dict[str, Any]], faster: str, note: str
):
    for found in ranks:
        is_dense, lost, largest, report = found[f"{faster} is faster"]
        assert is_dense == (faster == "dense")
        assert lost < 1e-5 * largest
        assert f"dense, in turns: {note}" in report


@pytest.mark.parametrize(
    ("step_us", "is_dense", "needed"), [(60.0, False, False), (80.0, False, True), (80.0, True, False)]
)
def test_a_plan_that_is_predicted_to_be_much_faster_needs_no_trial(step_us: float, is_dense: bool, needed: bool):
    choice = SimpleNamespace(step_us=step_us, dense_us=100.0)
    plan = SimpleNamespace(is_dense=is_dense)
    decision: Any = SimpleNamespace(choice=choice, dense=plan, plan=plan)
    assert hook_trial.needs_trial(decision) == needed
    decision.choice = None
    assert not hook_trial.needs_trial(decision)
