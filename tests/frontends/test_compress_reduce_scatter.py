"""`fxcomp.compress_reduce_scatter`: plain FSDP's gradients are compressed on their way to who holds the parameters.

Cases that can share a spawn do: ranks report numbers, which the tests judge.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.cost.table import CostTable
from fxcomp.errors import FxcompError
from fxcomp.frontends import hook_trial
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy

WIDTH = 30
"""No multiple of three: the last rank's part of a layer is filled up with zeros."""
STEPS = 4


def model_of(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def sharded(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    model = model_of().to(dtype)
    for layer in model[:3]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, WIDTH, generator=generator)
    dtype = next(iter(model.parameters())).dtype
    return (model(inputs.to(dtype)).float() - inputs[:, :5].cumsum(1).tanh()).square().mean()


def local(model: nn.Module) -> Tensor:
    """All that this rank holds."""
    return torch.cat([p.detach().to_local().flatten().float() for p in model.parameters()])  # type: ignore[union-attr]


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def trained(
    model: nn.Module, steps: Sequence[int] = range(STEPS), *, clip: float | None = None, micro: int = 1
) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)  # type: ignore[operator]
            loss_of(model, step * micro + part).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return local(model)


def compressed(plan: Any, model: nn.Module | None = None, **options: Any) -> tuple[Any, fxcomp.ShardScatter]:
    model = sharded() if model is None else model
    return model, fxcomp.compress_reduce_scatter(model, plan=plan, costs=CostTable(), **options)


def owed_of(scatter: fxcomp.ShardScatter) -> dict[str, Tensor]:
    """What this rank's next gradients bring, by parameter."""
    return {name: pieces[0]["values"] for name, pieces in scatter.state_dict()["residuals"].items()}


# Dense


def compare_dense() -> dict[str, bool]:
    bf16: Any = {"dtype": torch.bfloat16, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "one batch, clipped": ({}, {"clip": 0.05}),
        "whole gradients summed up": ({}, {"micro": 2}),
        "trained in bf16": (bf16, {}),
        "sums forced": ({"force": True}, {}),
    }
    found: dict[str, bool] = {}
    for case, (options, how) in cases.items():
        both: list[Tensor] = []
        for ours in (False, True):
            given = dict(options)
            force = given.pop("force", False)
            model = sharded(**given)
            if force:
                model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            scatter = compressed("dense", model)[1] if ours else None
            both.append(trained(model, **how))
            if scatter is not None:
                scatter.close()
        found[case] = torch.equal(*both)
    return found


def test_a_dense_plan_trains_as_fully_shard_does_to_the_bit():
    for found in run_ranks(3, compare_dense):
        assert len(found) == 4
        assert all(found.values()), found


# Compressed


def reference_step(name: str, gradients: list[dict[str, Tensor]], kept: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Compress as docs/sharding.md says, rank by rank; `kept` is replaced. Parts are cut here by torch.chunk."""
    compressor, ranks = parse_compressor(name), len(gradients)
    means: dict[str, Tensor] = {}
    for module in ("3", "2.0", "1.0", "0.0"):
        names = [f"{module}.weight", f"{module}.bias"]
        for owner in range(ranks):
            payloads: list[Tensor] = []
            segments: tuple[int, ...] = ()
            for rank in range(ranks):
                parts = [part_of(gradients[rank][each], owner, ranks) for each in names]
                waiting = [part_of(kept[rank][each], owner, ranks) for each in names]
                segments = tuple(map(Tensor.numel, parts))
                made = compressor.compress_reference(EncoderInput(torch.cat(parts), torch.cat(waiting), segments))
                payloads.append(made.payload)
                assert made.residual is not None
                for each, left in zip(names, made.residual.split(segments), strict=True):
                    put_part(kept[rank][each], left, owner, ranks)
            given = DecoderInput(torch.cat(payloads), ranks, segments, None, None)
            for each, mean in zip(names, compressor.decompress_reference(given).split(segments), strict=True):
                put_part(means.setdefault(each, torch.zeros_like(gradients[0][each])), mean, owner, ranks)
    return means


def rows(value: Tensor, owner: int, ranks: int) -> Tensor:
    chunks = value.chunk(ranks)
    return chunks[owner] if owner < len(chunks) else value[:0]


def part_of(value: Tensor, owner: int, ranks: int) -> Tensor:
    most = value.chunk(ranks)[0].numel()
    part = rows(value, owner, ranks).flatten()
    return torch.cat([part, part.new_zeros(most - part.numel())])


def put_part(value: Tensor, part: Tensor, owner: int, ranks: int) -> None:
    there = rows(value, owner, ranks)
    there.copy_(part[: there.numel()].view(there.shape))


def compare_with_reference(name: str) -> dict[str, Any]:
    me, ranks = dist.get_rank(), dist.get_world_size()
    model, scatter = compressed(name)
    alone = [model_of() for _ in range(ranks)]
    kept = [{n: torch.zeros_like(p) for n, p in alone[0].named_parameters()} for _ in range(ranks)]
    apart = 0.0
    for step in range(3):
        gradients: list[dict[str, Tensor]] = []
        for rank, each in enumerate(alone):
            each.zero_grad()
            loss_of(each, step, rank).backward()
            gradients.append({n: p.grad.clone() for n, p in each.named_parameters() if p.grad is not None})
        expected = reference_step(name, gradients, kept)
        model.zero_grad()
        loss_of(model, step).backward()
        for each, gradient in whole_gradients(model).items():
            apart = max(apart, float((gradient - expected[each]).abs().max()))
    owes = owed_of(scatter)
    owed_apart = max(float((owes[n] - kept[me][n].flatten()).abs().max()) for n in owes)
    return {"apart": apart, "owed apart": owed_apart, "owes": len(owes), "report": scatter.report()}


@pytest.mark.parametrize("name", ["int4", "topk(0.1)"])
def test_each_part_is_compressed_with_its_residual_and_averaged_by_its_owner(name: str):
    for found in run_ranks(3, compare_with_reference, name):
        assert found["apart"] <= 1e-7
        assert found["owed apart"] <= 1e-7
        assert found["owes"] == 8
        assert "2.0.weight" not in found["report"]
        assert "Error feedback keeps" in found["report"]


def send_bytes(plan: str) -> tuple[int, float]:
    """Count the payload bytes that this rank sends in a pass, and compare losses."""
    model, scatter = compressed(plan)
    moved: list[int] = []
    transport = scatter._job.site.transport
    plain = transport.all_to_all

    def counted(move: Any) -> Any:
        moved.append(move.value.numel() * move.value.element_size())
        return plain(move)

    transport.all_to_all = counted  # type: ignore[method-assign]
    loss_of(model, 0).backward()
    sent = sum(moved)
    trained(model, range(20))
    mine = loss_of(model, 99).item()
    native = sharded()
    trained(native, range(20))
    return sent, mine / loss_of(native, 99).item()


def test_int8_sends_a_quarter_and_trains_alike():
    elements = sum(p.numel() for p in model_of().parameters())
    for sent, ratio in run_ranks(2, send_bytes, "int8"):
        assert elements <= sent <= 1.2 * elements  # fp32 has four times as many
        assert abs(ratio - 1) < 0.01


def add_up(plan: str, wins: str) -> dict[str, Any]:
    """Add up what is applied over steps in which plan and dense take turns, and what is owed at the end."""

    def times(_: Any, __: Any) -> list[float]:
        return [1.0, 2.0] if wins == "plan" else [2.0, 1.0]

    hook_trial.Trial.medians_us = times  # type: ignore[method-assign,assignment]
    model, scatter = compressed(None, mode="aggressive")
    job = scatter._job
    alone = model_of()
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in alone.named_parameters()}
    applied = copy.deepcopy(total)
    seen: list[bool] = []
    for step in range(40):
        if step == 6:  # as if it had been chosen
            job.plan.choice = job.plan.choice and _with(job.plan.choice, plan)
            job.plan.follow(job.plan.choice.plan)
            job._trial = hook_trial.Trial(True, False, job.passes + 2, job._ready._clock)
        for rank in range(dist.get_world_size()):
            alone.zero_grad()
            loss_of(alone, step, rank).backward()
            for n, p in alone.named_parameters():
                assert p.grad is not None
                total[n] += p.grad.double() / dist.get_world_size()
        model.zero_grad()
        loss_of(model, step).backward()
        seen.append(job._compresses)
        for n, gradient in whole_gradients(model).items():
            applied[n] += gradient.double()
    left = owed_of(scatter)
    apart = 0.0
    for n in total:
        mine = left.get(n, torch.zeros(total[n].numel())).double()
        dist.all_reduce(mine)
        owed = mine.view(total[n].shape) / dist.get_world_size()
        apart = max(apart, float((applied[n] + owed - total[n]).norm() / total[n].norm()))
    return {
        "apart": apart,
        "owes": sum(float(v.abs().sum()) for v in left.values()),
        "seen": seen,
        "notes": job.plan.notes,
    }


def _with(choice: Any, plan: str) -> Any:
    import dataclasses

    way = Strategy.two_shots(parse_compressor(plan), None)
    return dataclasses.replace(choice, plan=choice.plan.with_strategies([way] * len(choice.plan.buckets)))


@pytest.mark.parametrize("wins", ["plan", "dense"])
def test_nothing_owed_is_lost_while_plan_and_dense_take_turns_and_after(wins: str):
    for found in run_ranks(2, add_up, "topk(0.1)", wins):
        assert found["apart"] <= 1e-6
        assert found["seen"][8:31] == [True] * 6 + [False] * 6 + [True] * 6 + [False] * 5
        assert found["seen"][31:] == [wins == "plan"] * 9  # seen when a pass has ended
        assert (found["owes"] > 0) == (wins == "plan")
        assert ("dense is followed" in found["notes"][-1]) == (wins == "dense")


# Not finite


def spoil_one_element(layer: nn.Module, _: Any) -> None:
    """Let the gradient of the last bias have an infinity, once; its place is in the last rank's part."""
    last = torch.tensor([0.0, 0.0, 0.0, 0.0, torch.inf])

    def spoil(gradient: Tensor) -> Tensor:
        hook.remove()
        return gradient + last

    hook = layer.get_parameter("bias").register_hook(spoil)


def skip_on_all_ranks(last: str) -> dict[str, Any]:
    """An infinity comes on one rank, in a module that travels as `last`; the others are int4."""
    me = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    model = sharded()
    ways = {"int4": Strategy.two_shots(parse_compressor("int4"), None), "dense": Strategy.two_shots(None, None)}
    planned = fxcomp.compress_reduce_scatter(sharded(), plan="int4", costs=CostTable()).plan
    assert planned is not None
    plan = planned.with_strategies([ways[last if "3.bias" in each.names else "int4"] for each in planned.buckets])
    scatter = compressed(plan, model, scaler=scaler)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()

    for number in range(3):
        step(number)
    before, parameters = owed_of(scatter), local(model)
    if me == 0:
        hook = model[3].register_forward_pre_hook(spoil_one_element)
    step(3)
    after = owed_of(scatter)
    found: dict[str, Any] = {
        "scale": scaler.get_scale(),
        "moved": bool((local(model) != parameters).any()),
        "same": before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before),
        "owes": sum(float(value.abs().sum()) for value in before.values()),
    }
    if me == 0:
        hook.remove()
    step(4)  # in the unit of the new scale
    found["moves again"] = bool((local(model) != parameters).any())
    found["smaller"] = sum(float(v.abs().sum()) for v in owed_of(scatter).values()) / found["owes"]
    scatter.close()
    return found


@pytest.mark.parametrize("last", ["int4", "dense"])
def test_an_infinity_is_skipped_by_all_ranks_and_leaves_residuals_to_the_bit(last: str):
    for found in run_ranks(3, skip_on_all_ranks, last):
        assert found["scale"] == 4.0
        assert not found["moved"]
        assert found["same"]
        assert found["owes"] > 0
        assert found["moves again"]
        assert 0.2 < found["smaller"] < 0.9  # half, and what the step has changed


# State


def train_and_save(plan: Any, given: bytes | None, steps: int) -> bytes:
    """Train from states, if there are any; return this rank's state, and what gradients and states hold in all."""
    model, scatter = compressed(plan)
    if given is not None:
        scatter.load_state_dict(torch.load(io.BytesIO(given), weights_only=True)[dist.get_rank()])
    owed = total_owed(scatter)
    trained(model, range(steps))
    saved = {"state": scatter.state_dict(), "tensors": scatter.checkpoint(), "owed": owed, "after": total_owed(scatter)}
    saved["plan"] = str(scatter.plan)
    scatter.close()
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def total_owed(scatter: fxcomp.ShardScatter) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    mine = owed_of(scatter) if scatter.plan is not None else {}
    for name, p in model_of().named_parameters():
        value = mine.get(name, torch.zeros(p.numel())).double()
        dist.all_reduce(value)
        found[name] = value / dist.get_world_size()
    return found


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[n] - other[n]).norm() / other[n].norm()) for n in other)


def saved_by(ranks: int, plan: Any, given: list[Any] | None, steps: int) -> list[dict[str, Any]]:
    """Run ranks that go on from states, one for each; what they return crosses processes as bytes."""
    file = io.BytesIO()
    torch.save(given, file)
    everyone = run_ranks(ranks, train_and_save, plan, None if given is None else file.getvalue(), steps)
    return [torch.load(io.BytesIO(each), weights_only=True) for each in everyone]


def test_four_ranks_become_three_and_four_again_and_owe_the_same():
    four = saved_by(4, "int4", None, 3)
    states = [each["tensors"] for each in four]
    three = saved_by(3, None, [[states[0], states[3]], states[1], states[2]], 0)
    assert "compress(int4)" in three[0]["plan"]  # the saved plan is followed
    assert largest_difference(three[0]["owed"], four[0]["after"]) <= 1e-6
    again = saved_by(4, None, [*(each["state"] for each in three), None], 0)
    assert largest_difference(again[3]["owed"], four[0]["after"]) <= 1e-6
    assert all(key.startswith(f"rank{rank}.") for rank, each in enumerate(four) for key in each["tensors"])


def go_on() -> dict[str, Any]:
    model, scatter = compressed("topk(0.1)")
    trained(model, range(3))
    saved, before = copy.deepcopy(scatter.state_dict()), [p.detach().to_local().clone() for p in model.parameters()]
    straight = trained(model, range(3, 6))
    again, fresh = compressed(None)
    for parameter, value in zip(again.parameters(), before, strict=True):
        parameter.detach().to_local().copy_(value)
    fresh.load_state_dict(saved)
    found: dict[str, Any] = {"same": torch.equal(trained(again, range(3, 6)), straight)}
    dense, third = compressed("dense")
    third.load_state_dict(saved)
    loss_of(dense, 0).backward()
    found["delivered"] = not owed_of(third)
    int8, fourth = compressed("int8")
    fourth.load_state_dict(saved)
    loss_of(int8, 0).backward()
    found["delivered by int8"] = not owed_of(fourth)
    exact, rounded = (torch.cat([g.flatten() for g in whole_gradients(each).values()]) for each in (dense, int8))
    found["rounded"] = float((rounded - exact).norm() / exact.norm())
    with told(found, "other shapes"):
        third.load_state_dict({**saved, "residuals": {"3.bias": [{**saved["residuals"]["3.bias"][0], "size": 6}]}})
    for each in (scatter, fresh, third, fourth):
        each.close()
    with told(found, "closed"):
        loss_of(model, 0).backward()
    return found


def test_a_loaded_state_goes_on_to_the_bit_and_dense_gradients_bring_what_is_owed():
    for found in run_ranks(2, go_on):
        assert found["same"]
        assert found["delivered"]
        assert found["delivered by int8"]
        assert 0 < found["rounded"] < 0.02
        assert found["other shapes"].startswith("BadState: ")
        assert found["closed"].startswith("StepClosed: ")


# Refused


@contextmanager
def told(found: dict[str, Any], what: str) -> Generator[None]:
    try:
        yield
    except FxcompError as error:
        found[what] = f"{type(error).__name__}: {error}"


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def refused(case: str, model: nn.Module, **options: Any) -> None:
        with told(found, case):
            fxcomp.compress_reduce_scatter(model, **options)

    refused("two dimensions", sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))))
    refused("nothing sharded", model_of())
    refused("low rank", sharded(), plan="powersgd(4)")
    refused("two shots", sharded(), plan=str(Strategy.two_shots(parse_compressor("int4"), parse_compressor("int8"))))
    refused("another plan", sharded(), plan=Plan(()))
    refused("no values", fully_shard(nn.Linear(4, 4, device="meta")))
    refused("momentum", sharded(), error_feedback=fxcomp.ErrorFeedback(momentum=0.9))
    refused("different options", sharded(), mode="balanced" if dist.get_rank() else "aggressive")
    twice = sharded()
    fxcomp.compress_reduce_scatter(twice, plan="int8")
    refused("twice", twice)
    divided, scatter = compressed("int8")
    divided.set_gradient_divide_factor(3.0)
    with told(found, "a divisor"):
        loss_of(divided, 0).backward()
    scatter.close()
    with told(found, "too early"):
        compressed(None)[1].report()
    return found


def test_what_cannot_be_scattered_is_refused_with_what_to_do():
    for found in run_ranks(2, refusals):
        for case, error, words in (
            ("two dimensions", "UnsupportedFeature", 'average_replicas(model, mesh["replicate"])'),
            ("nothing sharded", "BadOption", "nothing that is sharded"),
            ("low rank", "BadPlan", "needs whole parameters"),
            ("two shots", "BadPlan", "compressed once at most"),
            ("another plan", "BadPlan", "the plan has no bucket of"),
            ("no values", "UnsupportedParameter", "'weight' has no values yet"),
            ("momentum", "BadOption", "fully_shard leaves yours"),
            ("different options", "ModelsDiffer", "mode"),
            ("twice", "UnsupportedFeature", "call it once a model"),
            ("a divisor", "UnsupportedFeature", "set_gradient_divide_factor"),
            ("too early", "FxcompError", "there is no plan yet"),
        ):
            assert found[case].startswith(error), (case, found[case])
            assert words in found[case], (case, found[case])
