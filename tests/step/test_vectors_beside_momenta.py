"""A given plan says for each bucket where the mean stands: matrices at momenta, vectors in bf16 at gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor

import fxcomp
from fxcomp.compressors import BF16, CMax
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.plan.strategy import Strategy

JOB = JOBS["mlp"]
STEPS = 8
WARM = 4


def trained() -> tuple[str, bool, bool, dict[tuple[str, str], int], int, int]:
    model = JOB.build()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    buckets = plan_in_turns(model, [Strategy.flat(BF16())]).buckets
    matrices = {"strategy": Strategy.flat(CMax(16)), "at": ExchangePoint.MOMENTUM}
    plan = Plan(tuple(b if b.names[0].endswith("bias") else replace(b, **matrices) for b in buckets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compress = fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(dense_steps=WARM))
    step = fxcomp.compile_step(model, cross_entropy, optimizer, JOB.batch(0), compress=compress)
    before: dict[str, Tensor] = {}
    for i in range(STEPS):
        if i == STEPS - 1:
            before = {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in model.named_parameters()}
        step(JOB.batch(i, dist.get_rank()))
    grown = {n: optimizer.state[p]["exp_avg_sq"] / before[n] for n, p in model.named_parameters()}
    stays = {
        n: bool((ratio[ratio.isfinite()] - ratio[ratio.isfinite()].mean()).abs().max() < 1e-5)
        for n, ratio in grown.items()
    }
    vectors = sum(size for name, size in sizes.items() if name.endswith("bias"))
    of_matrices = sum(CMax(16).payload_bytes((size,)) for name, size in sizes.items() if not name.endswith("bias"))
    are_frozen = all(frozen for name, frozen in stays.items() if not name.endswith("bias"))
    is_any_vector_frozen = any(frozen for name, frozen in stays.items() if name.endswith("bias"))
    sent = dict(step.payload_bytes)
    return replica_fingerprint(model), are_frozen, is_any_vector_frozen, sent, 2 * vectors, of_matrices


def test_vectors_travel_in_bf16_at_gradients_beside_matrices_at_momenta() -> None:
    results = run_ranks(2, trained)
    assert len({fingerprint for fingerprint, *_ in results}) == 1
    for _, are_frozen, is_any_vector_frozen, sent, vector_bytes, matrix_bytes in results:
        assert are_frozen, "second moments of what is moved stay"
        assert not is_any_vector_frozen, "Adam stays Adam for the others"
        assert sent == {("all_reduce", "world"): vector_bytes, ("all_gather", "world"): matrix_bytes}
