"""Steps that cut a gradient: each part with a strategy of its own, verified by eager PyTorch on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.step.verify.update import weighted_sum

JOB = JOBS["mlp"]
MOMENTUM, RATE, STEPS = 0.9, 0.05, 8

DENSE = "all_reduce@world"
INT4 = "compress(int4(block=8))@gpu > all_gather@world > decompress@gpu"
TOPK = "compress(topk(0.2))@cpu > all_gather@world > decompress@cpu"
POWER = "propose(powersgd(1))@gpu > all_reduce@world > compress(powersgd(1))@gpu > all_reduce@world > decompress@gpu"
TWO_SHOTS = (
    "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world > decompress@gpu"
)


def plan_of(model: nn.Module, cuts: Sequence[int], strategies: Sequence[str]) -> Plan:
    """Cut the largest parameter there; the others travel with its last part."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    largest = max(sizes, key=sizes.__getitem__)
    extents = list(pairwise((0, *cuts, sizes[largest])))
    others = [name for name in reversed(sizes) if name != largest]
    members = [[(largest, start, stop - start)] for start, stop in extents]
    members[-1] = [*((name, 0, sizes[name]) for name in others), *members[-1]]
    buckets: list[Bucket] = []
    for held, text in zip(members, strategies, strict=True):
        names, starts, counts = zip(*held, strict=True)
        buckets.append(Bucket(names, counts, Strategy.parse(text), starts))
    return Plan(tuple(buckets))


def train(cuts: Sequence[int], strategies: Sequence[str], **options: Any) -> tuple[list[float], str, float, int]:
    """Train with every step verified: parameters, their fingerprint, the distance to DDP, left-out steps."""
    torch.manual_seed(0)
    model, reference = JOB.build(), DistributedDataParallel(JOB.build())
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM),
        JOB.batch(0, dist.get_rank()),
        **gathered(plan=plan_of(model, cuts, strategies), verify=1, **options),
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE, momentum=MOMENTUM)
    for i in range(STEPS):
        batch = JOB.batch(i, dist.get_rank())
        step(batch)
        optimizer.zero_grad()
        cross_entropy(reference, batch).backward()
        optimizer.step()
    found, expected = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, reference.module))
    return found.tolist(), replica_fingerprint(model), (found - expected).abs().max().item(), step.skipped_steps


CASES: dict[str, tuple[Sequence[int], Sequence[str], dict[str, Any]]] = {
    "dense": ((40, 101), (DENSE,) * 3, {"skip_nonfinite": True}),
    "dense, clipped": ((40,), (DENSE,) * 2, {"max_grad_norm": 100.0}),
    "whole": ((), (INT4,), {"skip_nonfinite": True}),
    "two parts": ((200,), (INT4, POWER), {"skip_nonfinite": True}),
    "three parts": ((40, 101), (TWO_SHOTS, TOPK, INT4), {"skip_nonfinite": True}),
    "a dense part between others": ((60, 200), (POWER, DENSE, TOPK), {"skip_nonfinite": True}),
    "int4, cut at blocks": ((200,), (INT4, INT4), {}),
    "int4, not cut": ((), (INT4,), {}),
}  # fmt: skip


def train_all() -> dict[str, tuple[list[float], str, float, int]]:
    return {name: train(cuts, strategies, **options) for name, (cuts, strategies, options) in CASES.items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, tuple[list[float], str, float, int]]]:
    return run_ranks(2, train_all)


@pytest.mark.parametrize("name", CASES)
def test_verified_steps_with_parts_keep_replicas_equal_and_train(trained: Any, name: str):
    (_, mine, distance, left_out), (_, theirs, _, _) = (rank[name] for rank in trained)
    assert mine == theirs
    assert left_out == 0
    assert distance <= (2e-6 if name.startswith("dense") else 0.2)


def test_a_cut_between_blocks_changes_no_bit(trained: Any):
    cut, whole = (trained[0][name][0] for name in ("int4, cut at blocks", "int4, not cut"))
    assert cut == whole


def test_weighted_sums_of_parts_add_up_to_that_of_the_whole():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    parts = sum(weighted_sum(value[a:b], a) for a, b in pairwise((0, 100, 128, 613, 1000)))
    assert parts == pytest.approx(weighted_sum(value), abs=1e-9)
    misplaced = weighted_sum(value[:100]) + weighted_sum(value[100:], 101)
    assert abs(misplaced - weighted_sum(value)) > 1e-3
