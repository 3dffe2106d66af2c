"""A step with a GradScaler trains as eager PyTorch with one: the scale is live, and skipped steps leave no trace."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks, try_ranks
from helpers.scaled import flat, half_loss, network, same_bits, scaler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.errors import BadCall, BadOption, FxcompError, Unsupported

TWO_SHOTS = (
    "compress(int4(block=32))@gpu > all_to_all@world > decompress@gpu > "
    "compress(int8(block=32))@gpu > all_gather@world > decompress@gpu"
)
ON_HOST = "compress(int4(block=32))@cpu > all_gather@world > decompress@cpu"
PLANS = {
    "int8": "int8", "in two shots": TWO_SHOTS, "on the host": ON_HOST, "topk": "topk(0.1)", "powersgd": "powersgd(2)",
    "sidco": "sidco(0.1)", "random": "int4(stochastic=true)",
}  # fmt: skip
STEPS = 40

BAD = (0, 5, 6, 17, 30)
"""The steps in which one rank's gradient is not finite; the first one is among them."""


def counted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> fxcomp.WeightedLoss:
    with torch.autocast("cpu", torch.float16):
        total = nn.functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")
    return fxcomp.WeightedLoss(total, torch.tensor(len(batch[1])))


def batch_at(step: int, rank: int, bad: Sequence[int] = BAD) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    inputs, target = torch.randn(6, 12, generator=draw), torch.randint(5, (6,), generator=draw)
    if step in bad and rank == step % 2:
        inputs[0, 0] = float("nan") if step % 3 else float("inf")
    return inputs, target


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def beside_ddp(accumulate: int, fused: bool) -> tuple[float, list[tuple[float, float]], int]:
    """Train by a dense step and by DDP with a scaler each; returns how far apart they are, and both scales."""
    rank = dist.get_rank()
    model = network()
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    ours, theirs = scaler(), scaler()
    optimizer = adamw(wrapped, fused=fused)
    step = fxcomp.compile_step(
        model,
        half_loss,
        adamw(model),
        batch_at(1, rank),
        scaler=ours,
        accumulate=accumulate,
        compress="dense",
        checks=fxcomp.Checks(verify=1),
    )
    scales: list[tuple[float, float]] = []
    for group in range(10):
        for k in range(accumulate):
            batch = batch_at(group * accumulate + k, rank)
            step(batch)
            loss = half_loss(wrapped, batch) / accumulate
            if k < accumulate - 1:
                with wrapped.no_sync():
                    theirs.scale(loss).backward()
            else:
                theirs.scale(loss).backward()
        ours.update()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        scales.append((ours.get_scale(), theirs.get_scale()))
    return float((flat(model) - flat(wrapped)).abs().max()), scales, step.skipped_steps


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("accumulate", "fused"), [(1, False), (3, False), (1, True)])
def test_a_dense_step_trains_as_ddp_with_a_scaler(accumulate: int, fused: bool):
    for apart, scales, skipped in run_ranks(2, beside_ddp, accumulate, fused):
        assert apart <= (1e-6 if fused else 0.0)
        assert all(mine == theirs for mine, theirs in scales)
        assert skipped == len({number // accumulate for number in BAD if number < 10 * accumulate})
        assert len({mine for mine, _ in scales}) > 1


def eager_is_not_finite(model: nn.Module, mine: torch.amp.GradScaler, batch: tuple[Tensor, Tensor]) -> bool:
    """Return whether some gradient of some rank is not finite in eager PyTorch, at the present scale."""
    twin = copy.deepcopy(model)
    (half_loss(twin, batch) * mine.get_scale()).backward()
    found = torch.tensor(
        float(any(not each.grad.isfinite().all() for each in twin.parameters() if each.grad is not None))
    )
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def owed_over_skips(plan: str) -> tuple[int, bool, bool, float]:
    """Train; returns how many steps were skipped unlike eager's, if states and replicas kept their bits, and a loss."""
    rank = dist.get_rank()
    model, mine = network(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = fxcomp.compile_step(
        model,
        half_loss,
        optimizer,
        batch_at(1, rank),
        scaler=mine,
        compress=plan,
        checks=fxcomp.Checks(verify="never", race="off"),
    )
    unchanged, unlike_eager, left_out = True, 0, set[int]()
    for number in range(STEPS):
        before = copy.deepcopy((model.state_dict(), step.state_dict()))
        is_bad = eager_is_not_finite(model, mine, batch_at(number, rank))
        skipped = step.skipped_steps
        step(batch_at(number, rank))
        mine.update()
        unlike_eager += (step.skipped_steps > skipped) != is_bad
        if step.skipped_steps > skipped:
            left_out.add(number)
            unchanged &= same_bits(before, (model.state_dict(), step.state_dict()))
    whole = flat(model)
    first = whole.clone()
    dist.broadcast(first, 0)
    losses = [half_loss(model, batch_at(10_000 + k, rank)).item() for k in range(4)]
    assert left_out >= set(BAD)  # the scale grows until gradients overflow, too
    return unlike_eager, unchanged, bool(torch.equal(first, whole)), sum(losses) / 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_ranks_owe_is_the_same_to_the_bit_over_a_skipped_step(plan: str):
    for missed, unchanged, same, loss in run_ranks(2, owed_over_skips, plan):
        assert missed == 0
        assert unchanged
        assert same
        assert loss < 5


def test_a_weighted_loss_is_scaled_too():
    model = network()
    twin, ours, theirs = copy.deepcopy(model), scaler(), scaler()
    step = fxcomp.compile_step(model, counted_loss, adamw(model), batch_at(1, 0), scaler=ours, accumulate=2)
    optimizer = adamw(twin)
    for group in range(3):
        for k in range(2):
            inputs, target = batch_at(40 + 2 * group + k, 0)
            half = inputs[:4], target[:4]  # a count of 8 divides without rounding
            step(half)
            theirs.scale(counted_loss(twin, half).sum / 8).backward()
        ours.update()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
    assert torch.allclose(flat(model), flat(twin), rtol=0, atol=1e-6)


def test_calls_that_the_step_has_made_already_fail_loudly():
    model, mine = network(), scaler()
    optimizer = adamw(model)
    step = fxcomp.compile_step(model, half_loss, optimizer, batch_at(1, 0), scaler=mine)
    step(batch_at(1, 0))
    with pytest.raises(BadCall, match=r"scaler\.update\(\) was not called"):
        step(batch_at(2, 0))
    with pytest.raises(RuntimeError, match="already been called"):
        mine.step(optimizer)
    with pytest.raises(RuntimeError):
        mine.unscale_(optimizer)
    mine.update()
    step(batch_at(2, 0))


def forgetting(*who: int) -> list[str]:
    """Leave `scaler.update()` out once on some ranks, and call it later; returns how each step went."""
    model, mine, rank = network(), scaler(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxcomp.compile_step(model, half_loss, optimizer, batch_at(1, rank, ()), scaler=mine, compress="int8")
    went: list[str] = []
    for number in range(4):
        try:
            step(batch_at(number, rank, ()))
            went.append("ran")
        except FxcompError as error:
            is_forgotten = isinstance(error, BadCall) and "scaler.update() was not called" in str(error)
            went.append("update was forgotten" if is_forgotten else type(error).__name__)
        if number != 1 or rank not in who:
            with contextlib.suppress(AssertionError):  # torch's, where no step has run since
                mine.update()
    return went


@pytest.mark.slow
def test_ranks_that_all_forget_update_go_on_once_they_have_called_it():
    assert run_ranks(2, forgetting, 0, 1) == [["ran", "ran", "update was forgotten", "ran"]] * 2


def test_a_rank_that_forgets_update_keeps_nobody_waiting():
    one, other = (each.value for each in try_ranks(2, forgetting, 1, group_timeout_s=30.0))
    assert one[:3] == ["ran", "ran", "PeerFailed"]
    assert other[:3] == ["ran", "ran", "update was forgotten"]
    assert one[3] == other[3] in {"ran", "RanksApart"}, "whether the other rank had begun by then"


def test_a_scale_that_changes_inside_a_group_is_refused_and_the_sums_are_forgotten():
    model, mine = network(), scaler()
    twin = copy.deepcopy(model)
    step = fxcomp.compile_step(model, half_loss, adamw(model), batch_at(1, 0), scaler=mine, accumulate=2)
    step(batch_at(1, 0))
    mine.update(2.0**8)
    with pytest.raises(BadCall, match="changed after 1 of 2 micro-batches"):
        step(batch_at(2, 0))
    theirs, optimizer = scaler(init_scale=2.0**8), adamw(twin)
    for number in (3, 4):
        step(batch_at(number, 0))
        theirs.scale(half_loss(twin, batch_at(number, 0)) / 2).backward()
    theirs.step(optimizer)
    assert torch.equal(flat(model), flat(twin))


def test_two_steps_may_share_a_scaler_that_is_updated_once():
    mine, models = scaler(), [network(), network()]
    steps = [fxcomp.compile_step(each, half_loss, adamw(each), batch_at(1, 0), scaler=mine) for each in models]
    steps[0](batch_at(0, 0))  # not finite
    steps[1](batch_at(1, 0))
    mine.update()
    assert [step.skipped_steps for step in steps] == [1, 0]
    assert mine.get_scale() == 2.0**11


def test_parameters_in_fp16_are_refused_as_unscale_refuses_them():
    model = network().half()
    with pytest.raises(Unsupported, match=r"'0.weight' is torch.float16.*\n.*float32.*autocast"):
        fxcomp.compile_step(model, half_loss, adamw(model), batch_at(1, 0), scaler=scaler())


def test_a_scaler_that_is_not_enabled_is_as_none():
    model = network()
    twin = copy.deepcopy(model)
    mine = scaler(enabled=False)
    steps = [
        fxcomp.compile_step(each, half_loss, adamw(each), batch_at(1, 0), scaler=given)
        for each, given in ((model, mine), (twin, None))
    ]
    for step, number in itertools.product(steps, (1, 2)):
        step(batch_at(number, 0))
        mine.update()
    assert torch.equal(flat(model), flat(twin))
    assert steps[0].source == steps[1].source


def test_the_scalers_state_stays_its_own():
    model, mine = network(), scaler()
    step = fxcomp.compile_step(model, half_loss, adamw(model), batch_at(1, 0), scaler=mine)
    for number in (1, 2, 3, 4):
        step(batch_at(number, 0))
        mine.update()
    assert mine.state_dict()["scale"] == 2.0**13
    mine.load_state_dict({**mine.state_dict(), "scale": 2.0**5})
    before = flat(model).clone()
    step(batch_at(7, 0))
    mine.update()
    assert mine.get_scale() == 2.0**5
    assert not torch.equal(before, flat(model))


def test_what_is_no_scaler_is_refused():
    model = network()
    with pytest.raises(BadOption, match=r"takes a torch\.amp\.GradScaler; it is a int"):
        fxcomp.compile_step(model, half_loss, adamw(model), batch_at(1, 0), scaler=1)  # pyright: ignore[reportArgumentType]
