"""`fxcomp.ddp_hook` under DistributedDataParallel does what a compiled step with the same plan does.

Cases that can share a spawn do: ranks report numbers, which the tests judge.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks, try_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadCall, BadOption, BadState, FxcompError
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

TOPK = Strategy.parse("compress(topk(0.01)) > all_gather@world > decompress")
TWO_SHOTS = Strategy.parse(
    "compress(int4) > all_to_all@world > decompress > compress(int4) > all_gather@world > decompress"
)
MIXED = Plan(
    (
        Bucket(("2.bias", "2.weight"), (10, 3000), TWO_SHOTS),
        Bucket(("0.weight",), (3000,), TWO_SHOTS),
        Bucket(("0.bias", "0.weight"), (300, 3000), TOPK, (0, 3000)),
    )
)
"""Buckets that are not DDP's: the first weight goes in two of them."""

STEPS = 6
SMALL = 0.02
"""MB of a bucket of DDP, of which the model has two then."""


def batches() -> Iterator[Any]:
    for step in range(STEPS):
        yield JOBS["mlp"].batch(step, dist.get_rank())


def wrapped(model: nn.Module, hook: fxcomp.DdpHook | None, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp


def trained(
    hook: fxcomp.DdpHook | None, *, micro: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    """Train with SGD, with so many accumulated backward passes a step; returns the parameters."""
    model = JOBS["mlp"].build().to(dtype)
    ddp = wrapped(model, hook, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            with ddp.no_sync() if part < micro - 1 else nullcontext():
                inputs, target = JOBS["mlp"].batch(step * micro + part, dist.get_rank())
                cross_entropy(ddp, (inputs.to(dtype), target)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def compiled(plan: Plan, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model = JOBS["mlp"].build().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cast = [(inputs.to(dtype), target) for inputs, target in batches()]
    with fxcomp.compile_step(
        model, cross_entropy, optimizer, cast[0], compress=plan, checks=fxcomp.Checks(verify="never")
    ) as step:
        for batch in cast:
            step(batch)
    return [p.detach().clone() for p in model.parameters()]


def distance(mine: list[Tensor], theirs: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))


def fingerprint(parameters: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()


def parities() -> dict[str, Any]:
    expected = compiled(MIXED)
    found: dict[str, Any] = {"print": fingerprint(expected)}
    for name, options in {
        "plain": {},
        "static graph": {"static_graph": True},
        "find unused": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True},
    }.items():
        hook = fxcomp.ddp_hook(compress=MIXED)
        found[name] = distance(trained(hook, **options), expected)
        hook.close()
    narrow = Plan(tuple(replace(bucket, element_type=ElementType.BF16) for bucket in MIXED.buckets))
    found["bf16"] = distance(
        trained(fxcomp.ddp_hook(compress=narrow), dtype=torch.bfloat16), compiled(narrow, torch.bfloat16)
    )
    dense = fxcomp.ddp_hook(compress="dense")
    found["dense"] = distance(trained(dense), trained(None))
    found["accumulated"] = distance(trained(fxcomp.ddp_hook(compress="dense"), micro=2), trained(None, micro=2))
    return found


def test_the_hook_trains_as_the_compiled_step_does_bit_for_bit():
    ranks = run_ranks(2, parities)
    assert len({found.pop("print") for found in ranks}) == 1
    for found in ranks:
        assert set(found.values()) == {0.0}, found


class Branches(nn.Module):
    """Two branches, of which a pass uses what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, inputs: Tensor, which: str) -> Tensor:
        used = [getattr(self, name)(inputs) for name in ("left", "right") if name[0] in which]
        return sum(used)  # type: ignore[return-value]


BRANCHES = Plan(
    (
        Bucket(("right.bias", "right.weight"), (10, 200), TWO_SHOTS),
        Bucket(("left.bias", "left.weight"), (10, 200), TOPK),
    )
)


def unused() -> list[tuple[bool, bool, bool]]:
    """Return if the right branch has moved, is owed something, and is owed as before, after each pass."""
    torch.manual_seed(3)
    model = Branches()
    hook = fxcomp.ddp_hook(compress=BRANCHES)
    ddp = wrapped(model, hook, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[tuple[bool, bool, bool]] = []
    owed = torch.zeros(200)
    for number, which in enumerate(("lr", "lr", "l", "l", "lr" if dist.get_rank() else "l", "lr")):
        before = model.right.weight.detach().clone()
        optimizer.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        ddp(torch.randn(4, 20), which).square().sum().backward()
        optimizer.step()
        now = hook.state_dict()["residuals"]["right.weight"][0]["values"]
        found.append((not torch.equal(before, model.right.weight), bool(now.any()), torch.equal(now, owed)))
        owed = now
    hook.close()
    return found


def infinite() -> tuple[bool, float, float]:
    """Return if an infinity of rank 1 shows here, and the way of residuals in that pass and in another."""
    hook, model = fxcomp.ddp_hook(compress=MIXED), JOBS["mlp"].build()
    ddp = wrapped(model, hook)
    moved, shown = [], []
    for step, batch in enumerate(batches()):
        before = residuals(hook)
        inputs, target = batch
        if step == STEPS - 1 and dist.get_rank() == 1:
            inputs[0, 0] = torch.inf
        model.zero_grad()
        cross_entropy(ddp, (inputs, target)).backward()
        if step:
            moved.append(distance(before, residuals(hook)))
        shown.append(not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
    hook.close()
    assert not any(shown[:-1])
    return shown[-1], moved[-1], moved[-2]


def scaled() -> tuple[float, float, list[float]]:
    """Return the loss of the sum of gradients, its largest, and the scales, while the scale falls and rises."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    hook, model = fxcomp.ddp_hook(scaler=scaler, compress=MIXED), JOBS["mlp"].build()
    ddp, scales = wrapped(model, hook), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sent, made = torch.zeros(10, 300), torch.zeros(10, 300)
    for step in range(STEPS):
        inputs, target = JOBS["mlp"].batch(step, dist.get_rank())
        if step in (2, 3):
            inputs[0, 0] = torch.inf if dist.get_rank() else 1.0
        optimizer.zero_grad()
        scaler.scale(cross_entropy(ddp, (inputs, target))).backward()
        scaler.unscale_(optimizer)
        if step not in (2, 3):
            sent += model[2].weight.grad
            made += torch.autograd.grad(cross_entropy(model, (inputs, target)), model[2].weight)[0]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state = hook.state_dict()
    for piece in state["residuals"]["2.weight"]:
        weight = piece["weight"][0] / piece["weight"][1] * dist.get_world_size() / state["scale of the loss"]
        made.view(-1)[piece["start"] : piece["start"] + piece["values"].numel()] -= weight * piece["values"]
    dist.all_reduce(made)
    hook.close()
    return (made / dist.get_world_size() - sent).abs().max().item(), sent.abs().max().item(), scales


def scaled_by_another() -> list[int]:
    """Return numbers of warnings of a scaler that is not handed over: one that scales nothing, and one in use."""
    counts = list[int]()
    for scales in (False, True):
        hook, scaler = fxcomp.ddp_hook(compress=MIXED), torch.amp.GradScaler("cpu")
        ddp = wrapped(JOBS["mlp"].build(), hook)
        loss = cross_entropy(ddp, JOBS["mlp"].batch(0, dist.get_rank()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (scaler.scale(loss) if scales else loss).backward()
        hook.close()
        counts.append(sum("Pass scaler=scaler where compress= is passed" in str(each.message) for each in caught))
    return counts


def shared() -> str:
    """Return the error of a hook that is registered with two models."""
    hook = fxcomp.ddp_hook(compress="dense")
    for _ in range(2):
        ddp = wrapped(JOBS["mlp"].build(), hook)
        try:
            cross_entropy(ddp, JOBS["mlp"].batch(0)).backward()
        except FxcompError as error:
            return str(error)
    return ""


def residuals(hook: fxcomp.DdpHook) -> list[Tensor]:
    kept = hook.state_dict().get("residuals", {})
    return [piece["values"] for name in sorted(kept) for piece in kept[name]]


def resumed() -> tuple[bool, list[int]]:
    """Return if training that is saved and loaded goes on bit for bit, and the steps in metrics and states."""
    job, halves, steps = JOBS["mlp"], [], []
    model = job.build()
    hook, saved = fxcomp.ddp_hook(compress=MIXED), {}
    for is_loaded in (False, True):
        if is_loaded:
            model, hook = job.build(), fxcomp.ddp_hook()
            model.load_state_dict(saved["model"])
            hook.load_state_dict(saved["hook"])
        ddp = wrapped(model, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, batch in enumerate(batches()):
            if step == STEPS // 2 and not is_loaded:
                parameters = {name: value.clone() for name, value in model.state_dict().items()}
                saved = {"model": parameters, "hook": hook.state_dict()}
            if step >= STEPS // 2 or not is_loaded:
                optimizer.zero_grad()
                cross_entropy(ddp, batch).backward()
                optimizer.step()
                steps.append(hook.metrics()["step"])
        halves.append([p.detach().clone() for p in model.parameters()])
        steps.append(hook.state_dict()["steps"])
        hook.close()
    return distance(*halves) == 0, steps


def used_after_closing() -> str:
    hook = fxcomp.ddp_hook(compress="int8")
    ddp = wrapped(JOBS["mlp"].build(), hook)
    batch = JOBS["mlp"].batch(0, dist.get_rank())
    cross_entropy(ddp, batch).backward()
    hook.close()
    with pytest.raises(BadCall) as refusal:
        cross_entropy(ddp, batch).backward()
    return str(refusal.value)


def test_a_closed_hook_says_what_to_set_up_again():
    for said in run_ranks(2, used_after_closing):
        assert said.startswith(
            "the averaging of these gradients has been closed.\n  Set it up again, on all ranks: a new"
        )


def resumed_by_name(name: str) -> tuple[bool, bool]:
    """Return if int4's residuals are kept one pass after loading under a plan of this name, and the plan."""
    job, model = JOBS["mlp"], JOBS["mlp"].build()
    before = fxcomp.ddp_hook(compress="int4")
    ddp = wrapped(model, before)
    for step in range(8):
        cross_entropy(ddp, job.batch(step, dist.get_rank())).backward()
    saved, plan = before.checkpoint(), before.plan
    before.close()
    after, model = fxcomp.ddp_hook(compress=name), job.build()
    after.load_state_dict(saved)
    ddp = wrapped(model, after)
    cross_entropy(ddp, job.batch(8, dist.get_rank())).backward()
    has_kept, is_same = bool(residuals(after)), after.plan == plan
    after.close()
    return has_kept, is_same


def chosen() -> tuple[str, str]:
    """The plan's digest, and the report."""
    slow = fxcomp.Cluster.parse("2x1, intra 100gbit, inter 0.01gbit@50us")
    hook = fxcomp.ddp_hook(
        cluster=slow, costs=CostTable(), compress=fxcomp.Compress(within="balanced", pins={"*.bias": "dense"})
    )
    with pytest.raises(FxcompError, match="there is no plan yet"):
        hook.report()
    job, model = JOBS["mlp"], JOBS["mlp"].build()
    ddp = wrapped(model, hook)
    for step in range(8):
        cross_entropy(ddp, job.batch(step, dist.get_rank())).backward()
        assert (hook.plan is None) == (step < 5)
    assert hook.plan is not None
    assert not hook.plan.is_dense
    digest, report = hook.plan.digest, hook.report()
    hook.close()
    return digest, report


def kept() -> dict[str, Any]:
    return {
        "scaled by another": scaled_by_another(),  # first: hooks keep the scalers that they were given
        "unused": unused(),
        "infinite": infinite(),
        "scaled": scaled(),
        "shared": shared(),
        "resumed": resumed(),
        "resumed by its name": resumed_by_name("int4"),
        "resumed by another": resumed_by_name("topk(0.1)"),
        "chosen": chosen(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, kept)


def test_what_is_owed_to_a_parameter_that_no_rank_uses_waits(ranks: list[dict[str, Any]]):
    for found in ranks:
        moved, owed, same = zip(*found["unused"], strict=True)
        assert moved == (True, True, False, False, True, True)
        assert all(owed)
        assert same == (False, False, True, True, False, False)


def test_an_infinity_shows_on_all_ranks_and_leaves_residuals_alone(ranks: list[dict[str, Any]]):
    for found in ranks:
        shown, moved, moves_else = found["infinite"]
        assert shown
        assert moved < 1e-6 < moves_else


def test_a_hook_serves_one_model(ranks: list[dict[str, Any]]):
    assert all("this hook serves another model already" in found["shared"] for found in ranks)


def test_nothing_is_lost_while_the_scale_of_the_loss_falls_and_rises(ranks: list[dict[str, Any]]):
    for found in ranks:
        lost, largest, scales = found["scaled"]
        assert lost < 1e-6 * largest + 1e-7
        assert len(set(scales)) > 2


def test_a_scaler_that_is_not_handed_over_is_warned_of(ranks: list[dict[str, Any]]):
    for found in ranks:
        assert found["scaled by another"] == [0, 1]


def test_a_loaded_state_goes_on_bit_for_bit_under_its_plan(ranks: list[dict[str, Any]]):
    for found in ranks:
        is_same, steps = found["resumed"]
        assert is_same
        assert steps == [1, 2, 3, 4, 5, 6, 6, 4, 5, 6, 6]  # each half ends with that of its state


def test_a_plan_that_is_named_again_is_the_saved_one_and_nothing_owed_waits(ranks: list[dict[str, Any]]):
    assert all(found["resumed by its name"] == (True, True) for found in ranks)
    assert all(found["resumed by another"] == (True, False) for found in ranks)


def test_after_some_dense_passes_all_ranks_follow_one_plan(ranks: list[dict[str, Any]]):
    assert len({digest for digest, _ in (found["chosen"] for found in ranks)}) == 1
    for found in ranks:
        assert "2 hosts x 1 rank" in found["chosen"][1]


def killed() -> None:
    hook, model = fxcomp.ddp_hook(compress=MIXED), JOBS["mlp"].build()
    ddp = wrapped(model, hook)
    for step, batch in enumerate(batches()):
        if step == 4 and dist.get_rank() == 1:
            os._exit(1)
        cross_entropy(ddp, batch).backward()


def test_a_killed_rank_ends_backward_on_the_others():
    survivor, _ = try_ranks(2, killed, group_timeout_s=30.0)
    assert survivor.error in ("LostTouch", "PeerFailed")
    assert "did not end" in survivor.text


def test_options_that_need_the_optimizer_are_refused():
    with pytest.raises(BadOption, match=r"ErrorFeedback.scale_with_lr needs the optimizer, which DistributedDataPara"):
        fxcomp.ddp_hook(compress=fxcomp.Compress(feedback=fxcomp.ErrorFeedback(scale_with_lr=True)))


def test_what_is_no_scaler_is_refused_where_the_hook_is_made():
    other: Any = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(BadOption, match=r"scaler= takes a torch.amp.GradScaler; it is a SGD"):
        fxcomp.ddp_hook(scaler=other)


@pytest.mark.parametrize("state", [3, "hook.pt", {"weight": 1}])
def test_what_is_no_state_is_refused_before_the_first_pass(state: Any):
    with pytest.raises(BadState, match=r"(?s)not a saved state.*state_dict\(\) or checkpoint\(\)"):
        fxcomp.ddp_hook().load_state_dict(state)
