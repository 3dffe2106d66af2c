"""Where one element of one rank's gradients is not finite, all ranks leave the step out, as eager PyTorch would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.scaled_jobs import Found, Job
from torch import nn

from fxcomp.cluster.cluster import Cluster
from fxcomp.plan.compress import Warmup

FAST, LONG = 40, 100

IN_TWO_SHOTS = (
    "compress(int4(block=32))@gpu > all_to_all@world > decompress@gpu > "
    "compress(int8(block=32))@gpu > all_gather@world > decompress@gpu"
)
PLANS = {
    "dense": "dense", "int8": "int8", "in two shots": IN_TWO_SHOTS,
    "on the host": "compress(int4(block=32))@cpu > all_gather@world > decompress@cpu",
    "topk": "topk(0.1)", "powersgd": "powersgd(2)", "sidco": "sidco(0.1)",
    "at random": "int4(stochastic=true)", "bf16": "bf16",
}  # fmt: skip
BY_LEVEL = {
    "shards": "reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra",
    "shots": "reduce_scatter@intra > compress(int4)@gpu > all_to_all@inter > decompress@gpu > compress(int8)@gpu"
    " > all_gather@inter > all_gather@intra > decompress@gpu",
}  # fmt: skip


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(steps: int, seed: int, jobs: Mapping[str, dict[str, Any]]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for name, options in jobs.items():
        job = Job(seed, **{"optimizers": sgd, **options})
        job.run(steps)
        found[name] = job.found()
    return found


def check(ranks: list[dict[str, Found]], seed: int) -> None:
    for found in ranks:
        for name, each in found.items():
            each.check(seed)
            assert each.loss < 5, name


def test_one_element_that_is_not_finite_leaves_the_step_out_on_all_ranks_and_nothing_changes():
    jobs = {name: {"plan": PLANS[name]} for name in ("in two shots", "topk")}
    check(run_ranks(2, trained, FAST, 14, jobs), 14)


def test_momenta_stand_still_where_a_gradient_is_not_finite():
    at_momentum = {"plan": IN_TWO_SHOTS, "at": "momentum"}
    jobs = {
        "sgd": at_momentum,
        "in groups": {**at_momentum, "micro_batches": 3},
        "adamw": {**at_momentum, "optimizers": adamw, "warmup": Warmup(int8_steps=10)},
    }
    check(run_ranks(2, trained, FAST, 21, jobs), 21)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seed", "names"), [(2, 21, tuple(PLANS)), (3, 22, ("in two shots", "powersgd"))])
def test_under_every_kind_of_plan_one_element_leaves_the_step_out(ranks: int, seed: int, names: Sequence[str]):
    jobs = {name: {"plan": PLANS[name]} for name in names}
    check(run_ranks(ranks, trained, LONG, seed, jobs, timeout_s=1200), seed)


@pytest.mark.slow
def test_a_fault_in_one_shard_leaves_the_step_out_on_all_hosts():
    where = Cluster.parse("2x2, inter 10mbit@20us, intra 100gbit")
    jobs = {name: {"plan": plan, "cluster": where} for name, plan in BY_LEVEL.items()}
    check(run_ranks(4, trained, LONG, 23, jobs, timeout_s=1200), 23)


WITH = {
    "in a micro-batch": {"micro_batches": 3, "optimizers": adamw, "plan": "int4"},
    "warming up": {"plan": "int4", "warmup": Warmup(dense_steps=20)},
    "clipped": {"plan": "powersgd(2)", "max_grad_norm": 0.5},
    "clipped by value": {"plan": "int8", "max_grad_value": 0.05},
    "verified": {"plan": "int4", "verify": 1},
}


@pytest.mark.slow
def test_one_element_leaves_the_step_out_whatever_else_the_step_does():
    check(run_ranks(2, trained, LONG, 24, WITH, timeout_s=1200), 24)
