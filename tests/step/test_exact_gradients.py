"""Mode lossless sends gradients that are casts of 16-bit values in 16 bits, and means have DDP's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks, try_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import DecoderInput, ExactBF16, ExactFP32
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.frontends.what_if import WhatIf, what_if
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import worth_offering
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import DENSE, Device, Strategy

STEPS = 6
BF16, FP16 = torch.bfloat16, torch.float16
Loss = Callable[[nn.Module, Any], Tensor]


class Layers(nn.Module):
    """An embedding, a norm, a layer that is used twice, and a head."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(40, 32), nn.LayerNorm(32)
        self.inner, self.twice, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 40)
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        inner = checkpoint(self._inner, x, use_reentrant=False) if self.checkpoints else self._inner(x)
        return self.head(self.twice(torch.relu(self.twice(x + inner))))

    def _inner(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(self.norm(x)))


class Images(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 16, 3), nn.Linear(16, 40)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.norm(self.first(images))))).mean((2, 3)))


def loss_of(dtype: torch.dtype) -> Loss:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype):
            logits = model(batch[0])
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), batch[1].flatten())

    return loss_fn


def tokens(step: int, rank: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    return drawn[:, :-1], drawn[:, 1:]


def images(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 40, (4,), generator=generator)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = Layers
    batch: Callable[[int, int], tuple[Tensor, Tensor]] = tokens
    dtype: torch.dtype = BF16
    max_grad_norm: float | None = None
    scale: float | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


CASES = {
    "bf16": Case(),
    "fp16": Case(dtype=FP16),
    "images": Case(Images, images),
    "clipped": Case(max_grad_norm=0.05),
    "checkpoints": Case(lambda: Layers(checkpoints=True)),
    "scale 65,536": Case(dtype=FP16, scale=65536.0),
    "scale 1,000": Case(dtype=FP16, scale=1000.0),
    "scale 1": Case(dtype=FP16, scale=1.0),
    "clipped, scaled": Case(dtype=FP16, scale=1000.0, max_grad_norm=0.05),
}


def slow_hosts(ranks: int) -> Cluster:
    return Cluster(ranks, 1, intra=Link(5.0, 10.0), inter=Link(50.0, 0.001))


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def scaler_of(case: Case) -> torch.amp.GradScaler | None:
    if case.scale is None:
        return None
    return torch.amp.GradScaler("cpu", init_scale=case.scale, growth_interval=10_000)


def trained_by_ddp(case: Case, steps: int = STEPS) -> dict[str, Tensor]:
    model, optimizer = made(case)
    parallel, scaler = DistributedDataParallel(model), scaler_of(case)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(case.dtype)(parallel, case.batch(step, dist.get_rank()))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def compiled(case: Case, **options: Any) -> tuple[nn.Module, Any, torch.amp.GradScaler | None]:
    model, optimizer = made(case)
    scaler = scaler_of(case)
    step = fxcomp.compile_step(
        model,
        loss_of(case.dtype),
        optimizer,
        case.batch(0, dist.get_rank()),
        cluster=slow_hosts(dist.get_world_size()),
        costs=CostTable(),
        max_grad_norm=case.max_grad_norm,
        scaler=scaler,
        **{"compress": "lossless", "checks": fxcomp.Checks(race="off", verify=3), **case.options, **options},
    )
    return model, step, scaler


def train(case: Case, steps: int = STEPS, **options: Any) -> tuple[dict[str, Tensor], Plan]:
    model, step, scaler = compiled(case, **options)
    for number in range(steps):
        step(case.batch(number, dist.get_rank()))
        if scaler is not None:
            scaler.update()
    return {name: value.detach().clone() for name, value in model.named_parameters()}, step.plan


def bytes_of(plan: Plan) -> tuple[int, int]:
    """Bytes of all gradients, and of the gradients that are sent in 16 bits."""
    exact = sum(bucket.dense_bytes for bucket in plan.buckets if not bucket.strategy.is_dense)
    return sum(bucket.dense_bytes for bucket in plan.buckets), exact


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, int]:
    return {name: count for name, value in one.items() if (count := int((value != other[name]).sum()))}


def against_ddp(name: str) -> tuple[dict[str, int], int, int]:
    case = CASES[name]
    found, plan = train(case)
    return differing(found, trained_by_ddp(case)), *bytes_of(plan)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_ddps_bits_and_send_exact_gradients_in_16_bits(name: str):
    for differences, whole, exact in run_ranks(2, against_ddp, name):
        assert differences == {}
        assert exact > 0.6 * whole


def of_four() -> tuple[float, str, int, int]:
    case = CASES["bf16"]
    found, plan = train(case, 1)
    differences = differing(found, trained_by_ddp(case, 1))
    values = sum(value.numel() for value in found.values())
    return (
        sum(differences.values()) / values,
        repr(sorted((k, v.sum().item()) for k, v in found.items())),
        *bytes_of(plan),
    )


def test_four_ranks_agree_and_nearly_have_ddps_bits():
    found = run_ranks(4, of_four)
    assert len({digest for _, digest, *_ in found}) == 1
    for share, _, whole, exact in found:
        assert share <= 1e-3  # AdamW's first step magnifies a last bit where a gradient is nearly zero
        assert exact > 0.6 * whole


def means_of_three() -> tuple[int, int]:
    """Count the exact gradients' means that are not the correctly rounded mean, with SGD of rate 1."""
    case, rank = CASES["bf16"], dist.get_rank()
    torch.manual_seed(0)
    model = case.model()
    before = copy.deepcopy(model)
    step = fxcomp.compile_step(
        model,
        loss_of(BF16),
        torch.optim.SGD(model.parameters(), lr=1.0),
        tokens(0, rank),
        compress="lossless",
        cluster=slow_hosts(3),
        costs=CostTable(),
        checks=fxcomp.Checks(race="off", verify="never"),
    )
    exact = {name for bucket in step.plan.buckets if not bucket.strategy.is_dense for name in bucket.names}
    step(tokens(0, rank))
    loss_of(BF16)(before, tokens(0, rank)).backward()
    wrong = total = 0
    for (name, after), old in zip(model.named_parameters(), before.parameters(), strict=True):
        if name in exact:
            gradient = old.grad.double()
            dist.all_reduce(gradient)
            right = old.detach() - (gradient / 3).float()
            wrong, total = wrong + int((right != after.detach()).sum()), total + right.numel()
    return wrong, total


def test_three_ranks_divide_once():
    for wrong, total in run_ranks(3, means_of_three):
        assert total > 3000
        assert wrong <= 1e-4 * total + 1


def refusals() -> list[str]:
    found: list[str] = []
    for options in (
        {"compress": "exact_bf16"},
        {"compress": "reduce_scatter@intra > compress(exact_bf16)@gpu > all_gather@inter > decompress@gpu"},
    ):
        try:
            compiled(Case(dtype=FP16), **options)
        except fxcomp.errors.FxcompError as error:
            found.append(str(error))
    return found


def test_exact_casts_of_other_gradients_are_refused_by_name():
    for first, second in run_ranks(2, refusals):
        assert "exact_bf16 sends torch.bfloat16 values" in first
        assert "these are sums" in second


def without_autocast_later(pins: dict[str, str]) -> None:
    """Autocast is off in the second batch."""
    case = Case()
    casts = [True]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=casts[0]):
            logits = model(batch[0])
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), batch[1].flatten())

    model, optimizer = made(case)
    step = fxcomp.compile_step(
        model,
        loss_fn,
        optimizer,
        tokens(0, dist.get_rank()),
        compress=fxcomp.Compress(within="lossless", pins=pins),
        cluster=slow_hosts(2),
        costs=CostTable(),
        checks=fxcomp.Checks(race="off"),
    )
    assert step.plan.is_dense == bool(pins)
    step(tokens(0, dist.get_rank()))
    casts[0] = False
    step(tokens(1, dist.get_rank()))


def test_a_capture_whose_gradients_are_no_casts_is_refused_only_by_plans_that_send_16_bits():
    for outcome in try_ranks(2, without_autocast_later, {}):
        assert "here it is no cast of a 16-bit value" in outcome.text
    run_ranks(2, without_autocast_later, {"*": "dense"})


def skipped_steps() -> int:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", BF16):
            return (model(batch[0]).float() * batch[1]).sum()

    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    step = fxcomp.compile_step(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.ones(2, 8), torch.ones(2, 8)),
        compress="lossless",
        cluster=slow_hosts(2),
        costs=CostTable(),
        skip_nonfinite=True,
        checks=fxcomp.Checks(race="off", verify=1),
    )
    for scale in (1.0, float("inf"), 1.0):
        step((torch.ones(2, 8), torch.full((2, 8), scale)))
    return step.in_force.runtime.counters.skipped


def test_a_gradient_that_is_not_finite_skips_a_verified_step():
    run_ranks(2, skipped_steps)


class Wide(nn.Module):
    """A parameter in fp64 whose gradient is a cast of a bf16 value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ self.weight.bfloat16()


def of_fp64() -> tuple[bool, bool]:
    torch.manual_seed(0)
    model = Wide()
    step = fxcomp.compile_step(
        model,
        lambda model, batch: model(batch).float().square().sum(),
        torch.optim.AdamW(model.parameters()),
        torch.ones(2, 8),
        compress="lossless",
        cluster=slow_hosts(2),
        costs=CostTable(),
        checks=fxcomp.Checks(race="off"),
    )
    for _ in range(3):
        step(torch.ones(2, 8))
    return step.plan.is_dense, bool(model.weight.isfinite().all())


def test_gradients_of_fp64_stay_fp64():
    assert run_ranks(2, of_fp64) == [(True, True)] * 2


def test_exact_casts_by_the_thread_pool_are_offered_only_where_it_helps():
    cluster = slow_hosts(4)
    for offload in (False, True):
        ways = worth_offering((DENSE,), ElementType.F32_OF_BF16, cluster, offload=offload)
        assert any(Device.CPU in way.devices for way in ways) == offload


def test_a_pin_to_an_exact_cast_is_refused():
    pins = fxcomp.Compress(within="lossless", pins={"*": "exact_bf16"}).pinned
    with pytest.raises(BadOption, match="only the mode 'lossless' finds"):
        pins.check_fits(slow_hosts(2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_means_of_powers_of_two_are_divided_first(ranks: int):
    for compressor in (ExactBF16(), ExactFP32()):
        payload = torch.full((ranks * 5,), 3e38).to(compressor.payload_dtype)
        out = torch.empty(5)
        compressor.decode(payload, ranks, (5,), out)
        reference = compressor.decompress_reference(DecoderInput(payload, ranks, (5,)))
        assert out.isfinite().all()
        assert torch.equal(out, reference)
        assert torch.equal(out, payload[:5].float())


def plan_of_job() -> dict[str, Any]:
    return train(CASES["bf16"], 1)[1].to_json()


def predicted(compress: Any) -> list[str]:
    model, optimizer = made(Case())
    job = fxcomp.Job(model, loss_of(BF16), optimizer, tokens(0, 0))
    found = what_if(job, slow_hosts(2), WhatIf(compress=fxcomp.Compress.of(compress), costs=CostTable()))
    return [str(bucket.strategy) for bucket in found.plan.buckets]


def test_predictions_follow_exact_plans_and_ordered_sums():
    plan = Plan.from_json(run_ranks(2, plan_of_job)[0])
    assert predicted(plan) == [str(bucket.strategy) for bucket in plan.buckets]
    ordered = predicted(fxcomp.Compress(within="lossless", sums="ranks"))
    assert all("exact_" in strategy for strategy in ordered)
    assert any("exact_bf16" in strategy for strategy in predicted("lossless"))


def test_a_named_exact_strategy_is_followed():
    assert all("exact_fp32" in strategy for strategy in predicted("exact_fp32"))


def saved_and_followed(path: str) -> tuple[str, str, dict[str, int]]:
    case = CASES["bf16"]
    found, plan = train(case)
    if dist.get_rank() == 0:
        plan.save(path)
    dist.barrier()
    again, followed = train(case, compress=path)
    given, _ = train(case, compress=plan)
    assert differing(given, found) == {}
    return str(plan), str(followed), differing(found, again)


def test_a_saved_plan_with_exact_gradients_is_followed(tmp_path: Any):
    for plan, followed, differences in run_ranks(2, saved_and_followed, str(tmp_path / "plan.json")):
        assert plan == followed
        assert differences == {}


def test_exact_strategies_parse_and_others_keep_their_values_only_if_dense():
    exact = Strategy.parse("compress(exact_bf16)@gpu > all_gather@world > decompress@gpu")
    assert exact.keeps_values
    assert not exact.is_dense
    assert not Strategy.parse("compress(bf16)@gpu > all_reduce@world > decompress@gpu").keeps_values
