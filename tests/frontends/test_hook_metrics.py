"""A hook's metrics: nothing before the first pass, dense before there is a plan, and what the plan sends after it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable

SLOW = fxcomp.Cluster.parse("2x1, intra 100gbit, inter 0.01gbit@50us")


def passes_of(compress: str, passes: int) -> tuple[list[dict[str, Any]], int, str]:
    """Metrics before any pass and after each, the bytes of dense gradients, and the plan's digest."""
    job, hook = JOBS["mlp"], fxcomp.ddp_hook(compress=compress, cluster=SLOW, costs=CostTable())
    model = DistributedDataParallel(job.build())
    model.register_comm_hook(None, hook)
    found = [hook.metrics()]
    for step in range(passes):
        cross_entropy(model, job.batch(step, dist.get_rank())).backward()
        found.append(hook.metrics(residuals=step == passes - 1))
    assert hook.plan is not None
    hook.close()
    return found, sum(parameter.nbytes for parameter in model.parameters()), hook.plan.digest


def test_a_hooks_metrics_are_dense_before_there_is_a_plan_and_the_plans_after_it():
    for found, dense_bytes, digest in run_ranks(2, passes_of, "balanced", 8):
        none, *_, last = found
        assert none == {}
        dense = found[3]
        assert (dense["step"], dense["plan"], dense["sent_mb"]) == (3, "", pytest.approx(dense_bytes / 1e6))
        assert math.isnan(dense["ratio"])
        assert math.isnan(dense["predicted_ms"])
        assert "residual_norm" not in dense
        assert (last["step"], last["skipped"], last["plan"]) == (8, 0, digest)
        assert last["ratio"] == pytest.approx(dense_bytes / 1e6 / last["sent_mb"])
        assert last["ratio"] > 3.0
        assert last["residual_norm"] > 0.0
        assert last["predicted_ms"] > 0.0
        json.dumps(last)
