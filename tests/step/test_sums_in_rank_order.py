"""With sums="ranks" a step's bits do not depend on buckets; with the network's sums they do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy

STEPS = 20
EXACT = "compress(exact_fp32)@gpu > all_gather@world > decompress@gpu"
TWO_SHOTS = "compress(exact_fp32)@gpu > all_to_all@world > decompress@gpu > all_gather@world"


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(24, 24), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(24, 5))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 24, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def plan_of(buckets: int, strategy: Strategy, *, turned: bool = False) -> Plan:
    """Cut the gradients, from the last to the first or in another order, into this number of buckets."""
    sizes = {name: value.numel() for name, value in model().named_parameters()}
    names = list(sizes) if turned else list(reversed(sizes))
    cuts = [names[len(names) * k // buckets : len(names) * (k + 1) // buckets] for k in range(buckets)]
    return Plan(tuple(Bucket(tuple(cut), tuple(sizes[name] for name in cut), strategy) for cut in cuts if cut))


def trained(compress: fxcomp.Compress, **options: Any) -> tuple[str, Plan]:
    """The digest of all parameters after some steps, and the plan."""
    made = model()
    optimizer, batch = torch.optim.AdamW(made.parameters(), lr=1e-2), batch_of(0, dist.get_rank())
    step = fxcomp.compile_step(made, loss_fn, optimizer, batch, compress=compress, max_grad_norm=0.1, **options)
    for number in range(STEPS):
        step(batch_of(number, dist.get_rank()))
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in made.parameters())).hexdigest(), step.plan


def digest_under(plan: Plan, sums: str) -> str:
    compress, checks = fxcomp.Compress(plan=plan, sums=sums), fxcomp.Checks(verify="never")
    return trained(compress, costs=CostTable(), checks=checks)[0]


def digests(texts: Sequence[str], sums: str) -> list[str]:
    plans = [plan_of(k, Strategy.parse(text)) for text in texts for k in (1, 3, 17)]
    plans += [plan_of(3, Strategy.parse(text), turned=True) for text in texts]
    return [digest_under(plan, sums) for plan in plans]


@pytest.mark.parametrize("ranks", [3, 4])
def test_buckets_orders_and_shots_do_not_change_a_bit(ranks: int):
    found = run_ranks(ranks, digests, [EXACT, TWO_SHOTS], "ranks")
    assert len({digest for each in found for digest in each}) == 1


def test_sums_by_the_network_depend_on_buckets():
    found = run_ranks(3, digests, [str(DENSE)], "network")
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) > 1


def chosen() -> tuple[list[bool], str, str]:
    digest, plan = trained(fxcomp.Compress(within="lossless", sums="ranks"))
    ordered = [bucket.strategy.adds_in_rank_order for bucket in plan.buckets]
    return ordered, digest, digest_under(plan_of(5, Strategy.parse(EXACT)), "ranks")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_chosen_plan_adds_in_the_order_of_the_ranks(ranks: int):
    for ordered, digest, other in run_ranks(ranks, chosen):
        assert all(ordered)
        assert digest == other


def refused() -> list[str]:
    found: list[str] = []
    for compress in (
        {"within": "balanced", "sums": "ranks"},
        {"within": "lossless", "sums": "alphabet"},
        {"within": "lossless", "sums": "ranks", "pins": {"*": "dense"}},
    ):
        with pytest.raises(BadOption) as raised:
            fxcomp.Compress(**compress)
        found.append(str(raised.value))
    for plan in (
        plan_of(2, DENSE),
        plan_of(2, Strategy.parse("compress(int8)@gpu > all_gather@world > decompress@gpu")),
    ):
        with pytest.raises(fxcomp.errors.BadPlan) as raised:
            digest_under(plan, "ranks")
        found.append(str(raised.value))
    return found


def test_other_options_and_plans_are_refused_by_name():
    for within, word, pins, dense, int8 in run_ranks(2, refused):
        assert "within='balanced' may compress them" in within
        assert "it is 'alphabet'" in word
        assert "leave pins=" in pins
        for text in (dense, int8):
            assert "bucket 0 of the plan is added up by the network" in text or "sums='ranks' asks for" in text
