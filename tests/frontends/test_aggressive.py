"""`aggressive` in the frontends that leave the optimizer to the user: it is `balanced` there, and says so."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.scattered import loss_of, model_of, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.frontends import torch_compile
from fxcomp.frontends.backward_passes import DENSE_PASSES
from fxcomp.plan.plan import Plan

SLOW = fxcomp.Cluster.parse("2x1, intra 100gbit, inter 1mbit@50us")
BALANCED = {"bf16", "int8", "int4"}

Found = tuple[Plan | None, str]
"""The plan, and what is said of it."""


def hooked(given: dict[str, Any]) -> Found:
    hook = fxcomp.ddp_hook(**given)
    model = DistributedDataParallel(model_of())
    model.register_comm_hook(None, hook)
    return passed(model, hook)


def replicas(given: dict[str, Any]) -> Found:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh["shard"])
    return passed(model, fxcomp.average_replicas(model, mesh["replicate"], **given))


def scattered(given: dict[str, Any]) -> Found:
    model = sharded()
    return passed(model, fxcomp.compress_reduce_scatter(model, **given))


def passed(model: Any, average: Any) -> Found:
    """Run backward passes until there is a plan."""
    for step in range(DENSE_PASSES + 1):
        loss_of(model, step).backward()
    report = " ".join(average.report().split())
    plan = average.plan
    average.close()
    return plan, report


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def backend(given: dict[str, Any]) -> Found:
    model, kept = model_of(), Kept()
    torch_compile.log.setLevel(logging.INFO)
    torch_compile.log.addHandler(kept)
    loss_of(fxcomp.compile_model(model, **given), 0).backward()
    torch_compile.log.removeHandler(kept)
    plan = torch_compile.compiled_model(model).plan
    torch._dynamo.reset()
    return plan, " ".join("\n".join(kept.texts).split())


FRONTENDS: tuple[Callable[[dict[str, Any]], Found], ...] = (hooked, replicas, scattered, backend)
ASKED: dict[str, dict[str, Any]] = {
    "a name": {},
    "a job's length": {"steps": 3000},
    "the mode decides": {"steps": 3000, "at": "auto"},
    "gradients": {"steps": 3000, "at": "gradient"},
    "balanced": {"within": "balanced"},
}


def everywhere() -> list[tuple[str, str, bool, set[str], str]]:
    return list(_everywhere())


def _everywhere() -> Iterator[tuple[str, str, bool, set[str], str]]:
    assert dist.get_world_size() == 2
    for frontend, what in itertools.product(FRONTENDS, ASKED):
        if frontend is hooked or what in ("a name", "balanced"):  # all ask the same code
            asked = ASKED[what]
            compress = fxcomp.Compress(**{"within": "aggressive", **asked})
            plan, said = frontend({"compress": compress, "cluster": SLOW, "costs": CostTable()})
            assert plan is not None, "it was decided on"
            compressors = {each.name for bucket in plan.buckets for each in bucket.strategy.compressors}
            yield frontend.__name__, what, plan.moves_exchange, compressors, said


@pytest.mark.slow
def test_where_the_optimizer_is_not_seen_aggressive_is_balanced_and_says_so():
    for found in run_ranks(2, everywhere):
        assert len(found) == len(ASKED) + 2 * (len(FRONTENDS) - 1)
        for frontend, what, moves, compressors, said in found:
            assert not moves, (frontend, what)
            assert compressors, (frontend, what)
            assert compressors <= BALANCED, (frontend, what)
            expected = what not in ("gradients", "balanced")
            reason = "aggressive: ranks exchange gradients, because this frontend does not see the optimizer"
            assert (reason in said) is expected, (frontend, what, said)
