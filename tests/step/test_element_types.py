"""Parameters of any floating type, and of several: gradients travel in their own, compressors are given fp32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.plans import TWO_HOSTS, plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters, replica_fingerprint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.plan.strategy import Strategy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STEPS = 8
Batch = tuple[Tensor, Tensor]


class Mixed(nn.Module):
    """Matrices of one type, and a norm between them in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first = nn.Linear(20, 96, dtype=dtype)
        self.norm = nn.LayerNorm(96)
        self.last = nn.Linear(96, 10, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.to(self.dtype)).to(FP32))
        return self.last(hidden.relu().to(self.dtype)).to(FP32)


def build(dtype: torch.dtype) -> Mixed:
    torch.manual_seed(0)
    return Mixed(dtype)


def batch_of(number: int, rank: int) -> Batch:
    """Classes that a linear layer can tell."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(32, 20, generator=generator)
    return x, x[:, :10].argmax(1)


def loss_fn(model: Any, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, foreach=False)  # fp16 has no 1e-8


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


@dataclass(frozen=True)
class Trained:
    """The findings of a rank."""

    fingerprint: str
    losses: tuple[float, ...]
    apart: float
    """From eager DistributedDataParallel: the largest distance of a parameter."""
    sent: dict[tuple[str, str], int]


def train(case: Case) -> Trained:
    rank, model = dist.get_rank(), build(case.dtype)
    plan = plan_in_turns(model, [Strategy.parse(case.strategy)])
    reference = DistributedDataParallel(copy.deepcopy(model))
    step = fxcomp.compile_step(
        model,
        loss_fn,
        OPTIMIZERS[case.optimizer](model),
        batch_of(0, rank),
        cluster=case.cluster,
        **gathered(plan=plan, verify=1 if case.steps < 5 else "sampled", replan="off", **case.options),
    )
    eager = OPTIMIZERS[case.optimizer](reference)
    losses: list[float] = []
    for number in range(case.steps):
        batch = batch_of(number, rank)
        losses.append(step(batch).item())
        eager.zero_grad()
        loss_fn(reference, batch).backward()
        if (limit := case.options.get("max_grad_norm")) is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), limit)
        eager.step()
    apart = (flat_parameters(model) - flat_parameters(reference)).abs().max().item()
    sent = dict(step.payload_bytes)
    step.close()
    return Trained(replica_fingerprint(model), tuple(losses), apart, sent)


@dataclass(frozen=True)
class Case:
    """The options that a model is trained with."""

    dtype: torch.dtype
    strategy: str
    optimizer: str = "sgd"
    cluster: Any = None
    steps: int = 4
    options: dict[str, Any] = field(default_factory=dict[str, Any])


DENSE = "all_reduce@world"
POWERSGD = str(Strategy.flat(parse_compressor("powersgd(2)")))
INT8 = "compress(int8) > all_gather@world > decompress"
BF16_ALONE = "compress(bf16) > all_reduce@world > decompress"
TOPK = "compress(topk(0.1)) > all_gather@world > decompress"
TWO_SHOTS = "compress(int4) > all_to_all@world > decompress > compress(int4) > all_gather@world > decompress"
INSIDE = "reduce_scatter@intra > compress(int8) > all_gather@inter > decompress > all_gather@intra"
ON_POOL = "compress(int8)@cpu > all_gather@world > decompress@cpu"
INSIDE_ON_POOL = "reduce_scatter@intra > compress(int8)@cpu > all_gather@inter > decompress@cpu > all_gather@intra"
LEVELS = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"

UNCOMPRESSED = [
    Case(dtype, DENSE, name) for dtype, name in ((BF16, "sgd"), (BF16, "adamw"), (FP16, "adamw"), (FP64, "sgd"))
]
SENT = [Case(BF16, BF16_ALONE, steps=1), Case(BF16, INT8, steps=14)]
COMPRESSED = [
    *(Case(BF16, strategy, steps=14) for strategy in (TWO_SHOTS, TOPK, POWERSGD)),
    Case(FP16, ON_POOL, steps=14),
    Case(BF16, TOPK, steps=14, options={"skip_nonfinite": True}),
]
IN_ANOTHER_ORDER = [
    Case(FP16, DENSE),
    Case(BF16, LEVELS, cluster=TWO_HOSTS),
    Case(BF16, DENSE, options={"max_grad_norm": 0.5}),
]
AROUND = [
    Case(dtype, strategy, cluster=TWO_HOSTS, steps=14) for dtype, strategy in ((BF16, INSIDE), (FP64, INSIDE_ON_POOL))
]


def all_of(cases: Sequence[Case]) -> list[Trained]:
    return [train(case) for case in cases]


def trained(ranks: int, cases: Sequence[Case]) -> list[list[Trained]]:
    """Return for each case what each rank found; all hold the same bits."""
    found = [list(each) for each in zip(*run_ranks(ranks, all_of, cases), strict=True)]
    for case, each in zip(cases, found, strict=True):
        assert len({one.fingerprint for one in each}) == 1, f"{case}: replicas differ"
    return found


@pytest.fixture(scope="module")
def on_two() -> list[list[Trained]]:
    return trained(2, [*UNCOMPRESSED, *SENT, *COMPRESSED])


@pytest.fixture(scope="module")
def on_four() -> list[list[Trained]]:
    return trained(4, [*IN_ANOTHER_ORDER, *AROUND])


def test_dense_gradients_of_every_type_are_bitwise_those_of_ddp_on_two_ranks(on_two: list[list[Trained]]):
    assert [one.apart for each in on_two[: len(UNCOMPRESSED)] for one in each] == [0.0, 0.0] * len(UNCOMPRESSED)


@pytest.mark.slow
def test_on_four_ranks_sums_are_rounded_in_another_order(on_four: list[list[Trained]]):
    assert max(one.apart for each in on_four[: len(IN_ANOTHER_ORDER)] for one in each) < 0.02


ELEMENTS = {name: p.numel() for name, p in build(BF16).named_parameters()}
DENSE_BYTES = sum((4 if "norm" in name else 2) * count for name, count in ELEMENTS.items())


def test_bytes_on_the_wire_are_those_of_the_tensors(on_two: list[list[Trained]]):
    dense, bf16, int8 = (each[0].sent for each in (on_two[0], *on_two[len(UNCOMPRESSED) :][: len(SENT)]))
    payload = sum(parse_compressor("int8").payload_bytes((count,)) for count in ELEMENTS.values())
    assert dense == {("all_reduce", "world"): DENSE_BYTES}
    assert int8 == {("all_gather", "world"): payload}
    assert bf16 == {("all_reduce", "world"): 2 * sum(ELEMENTS.values())}


def test_compressed_gradients_train(on_two: list[list[Trained]]):
    for case, each in zip(COMPRESSED, on_two[-len(COMPRESSED) :], strict=True):
        assert_trains(case, each)
    assert_trains(SENT[1], on_two[len(UNCOMPRESSED) + 1])


@pytest.mark.slow
def test_dense_hops_around_a_compressor_travel_in_the_gradients_type(on_four: list[list[Trained]]):
    found = on_four[-len(AROUND) :]
    assert found[0][0].sent["reduce_scatter", "intra"] == DENSE_BYTES
    for case, each in zip(AROUND, found, strict=True):
        assert_trains(case, each)


def assert_trains(case: Case, each: list[Trained]) -> None:
    losses = each[0].losses
    assert sum(losses[-4:]) < 0.85 * sum(losses[:4]), f"{case}: {losses}"


# Large values


class Weight(nn.Module):
    """A loss whose gradient is the batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, size, dtype=FP16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w.to(FP32) * x).sum()


def apply(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def means_of_large(cases: list[tuple[str, int]]) -> list[list[float]]:
    found: list[list[float]] = []
    for strategy, micro_batches in cases:
        model = Weight(64)
        plan = plan_in_turns(model, [Strategy.parse(strategy)])
        given = torch.full((1, 64), 3e4)
        step = fxcomp.compile_step(
            model,
            apply,
            torch.optim.SGD(model.parameters(), lr=1.0),
            given,
            accumulate=micro_batches,
            compress=plan,
            checks=fxcomp.Checks(verify=1, replan="off"),
        )
        for _ in range(micro_batches):
            step(given)
        found.append([model.w.min().item(), model.w.max().item()])
        step.close()
    return found


def test_large_fp16_gradients_do_not_overflow_in_the_mean():
    cases = [(DENSE, 1), (INT8, 1), (DENSE, 3)]
    for found in run_ranks(4, means_of_large, cases):
        assert found == [[-30000.0, -30000.0]] * len(cases)


def test_norms_of_fp16_gradients_are_taken_in_fp32():
    model, given = Weight(1 << 20), torch.full((1, 1 << 20), 100.0)
    step = fxcomp.compile_step(
        model,
        apply,
        torch.optim.SGD(model.parameters(), lr=1.0),
        given,
        max_grad_norm=1024.0,
        checks=fxcomp.Checks(verify=1),
    )
    step(given)
    assert (model.w + 1.0).abs().max().item() < 2e-3


# Autocast


def autocast(dtype: torch.dtype) -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


def under_autocast(dtypes: Sequence[torch.dtype]) -> list[float]:
    rank = dist.get_rank()
    found: list[float] = []
    for dtype in dtypes:
        model, loss = build(FP32), autocast(dtype)
        reference = DistributedDataParallel(copy.deepcopy(model))
        step = fxcomp.compile_step(
            model, loss, sgd(model), batch_of(0, rank), compress=plan_in_turns(model, [Strategy.parse(DENSE)])
        )
        eager = sgd(reference)
        for number in range(STEPS):
            step(batch_of(number, rank))
            eager.zero_grad()
            loss(reference, batch_of(number, rank)).backward()
            eager.step()
        found.append((flat_parameters(model) - flat_parameters(reference)).abs().max().item())
        step.close()
    return found


def test_both_types_of_autocast_are_bitwise_eagers():
    assert run_ranks(2, under_autocast, [BF16, FP16]) == [[0.0, 0.0]] * 2
