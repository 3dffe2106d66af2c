"""Steps that exchange momenta after a few steps, under a guard, and batches that make it act."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxcomp
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import plan_in_turns

JOB = JOBS["mlp"]
WARM, JUMP, STEPS = 5, 23, 34
TWO_SHOTS = Strategy.parse(
    "compress(sign)@gpu > all_to_all@world > decompress@gpu > compress(sign)@gpu > all_gather@world > decompress@gpu"
)

ADAM: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1),
    "adam with decay": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.8, 0.99)),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
}


def started(optimizer: str = "adamw", strategy: Strategy = TWO_SHOTS, plan: Plan | None = None, **warmup: int):
    model = JOB.build()
    made = ADAM[optimizer](model)
    plan = plan or plan_in_turns(model, [strategy], 2).at_momenta()
    compress = fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(**(warmup or {"int8_steps": WARM})))
    checks = fxcomp.Checks(verify=1)
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        made,
        JOB.batch(0, dist.get_rank()),
        compress=compress,
        checks=checks,
        costs=fxcomp.CostTable(),
    )
    return model, made, step


def batch(number: int, *, grows: bool = True) -> tuple[Tensor, Tensor]:
    """A batch of this rank, of inputs sixty times as large from the jump on."""
    inputs, target = JOB.batch(number, dist.get_rank())
    return inputs * (60.0 if grows and number >= JUMP else 1.0), target
