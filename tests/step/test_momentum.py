"""Momentum correction: dense, it is the optimizer's own; compressed, it is what the formulas say; nothing is lost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import TWO_HOSTS, plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.compressors import Compressor, DecoderInput, EncoderInput, parse_compressor
from fxcomp.plan.compress import Warmup
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Device, Strategy

JOB = JOBS["mlp"]
MOMENTUM, RATE = 0.9, 0.05


def flat(name: str | None, device: Device = Device.GPU) -> Strategy:
    return Strategy.flat(parse_compressor(name) if name else None, device)


def parameters(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def compiled(
    strategies: Sequence[Strategy],
    per_bucket: int = 2,
    *,
    weight_decay: float = 0.0,
    warm_up: Mapping[str, int] | None = None,
    verify: int = 1,
    **options: Any,
) -> fxcomp.CompiledStep:
    model = JOB.build()
    return fxcomp.compile_step(
        model,
        cross_entropy,
        torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=weight_decay),
        JOB.batch(0, dist.get_rank()),
        **gathered(
            plan=plan_in_turns(model, list(strategies), per_bucket),
            feedback=ErrorFeedback(momentum=MOMENTUM),
            warmup=Warmup(**(warm_up or {})),
            verify=verify,
            **options,
        ),
    )


# Dense


def dense(strategies: list[Strategy], cluster: Any) -> tuple[float, str]:
    """The distance to eager PyTorch with the optimizer's own momentum."""
    step = compiled(strategies, 1, cluster=cluster)
    reference = DistributedDataParallel(JOB.build())
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE, momentum=MOMENTUM)
    for i in range(30):
        batch = JOB.batch(i, dist.get_rank())
        step(batch)
        optimizer.zero_grad()
        cross_entropy(reference, batch).backward()
        optimizer.step()
    distance = (parameters(step.training.model) - parameters(reference.module)).abs().max().item()
    return distance, replica_fingerprint(step.training.model)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ranks", "strategies", "cluster"),
    [
        (3, [Strategy.flat(None)], None),
        (4, [Strategy.hierarchical(None), Strategy.flat(None)], TWO_HOSTS),
    ],
    ids=["three", "hierarchical"],
)
def test_a_dense_plan_trains_as_with_the_optimizers_momentum(ranks: int, strategies: Any, cluster: Any):
    found = run_ranks(ranks, dense, strategies, cluster)
    assert max(distance for distance, _ in found) <= 2e-6
    assert len({fingerprint for _, fingerprint in found}) == 1


# By the formulas


class Simulated:
    """One rank by the formulas, in plain torch: velocity, residual, compressor's reference, mean over the ranks."""

    def __init__(self, plan: Plan, states: Callable[[int], Tensor | None]):
        self.model = JOB.build()
        self.plan = plan
        self.ranks = dist.get_world_size()
        self.velocity = {name: torch.zeros(p.numel()) for name, p in self.model.named_parameters()}
        self.residual = {name: torch.zeros(p.numel()) for name, p in self.model.named_parameters()}
        self.states = [states(number) for number in range(len(plan.buckets))]

    def step(self, batch: Any, plan: Plan) -> None:
        named = dict(self.model.named_parameters())
        gradients = dict(zip(named, torch.autograd.grad(cross_entropy(self.model, batch), named.values()), strict=True))
        with torch.no_grad():
            for number, bucket in enumerate(plan.buckets):
                mean = self._mean(number, bucket.names, bucket.sizes, bucket.strategy.compressor, gradients)
                for name, part in zip(bucket.names, mean.split(list(bucket.sizes)), strict=True):
                    named[name].add_(part.view_as(named[name]), alpha=-RATE)

    def _mean(
        self,
        number: int,
        names: Sequence[str],
        sizes: Sequence[int],
        compressor: Compressor | None,
        gradients: dict[str, Tensor],
    ) -> Tensor:
        for name in names:
            self.velocity[name] = MOMENTUM * self.velocity[name] + gradients[name].flatten()
        velocity = torch.cat([self.velocity[name] for name in names])
        if compressor is None:
            dist.all_reduce(velocity)
            return velocity / self.ranks
        residual, state = torch.cat([self.residual[name] for name in names]), self.states[number]
        scale = self.ranks if compressor.is_linear else 1
        new = compressor.compress_reference(EncoderInput(velocity / scale, residual, tuple(sizes), state))
        self.states[number] = new.state if state is not None else None
        payload, copies = new.payload, 1
        if compressor.is_linear:
            dist.all_reduce(payload)
        else:
            copies, parts = self.ranks, [torch.empty_like(new.payload) for _ in range(self.ranks)]
            dist.all_gather(parts, new.payload)
            payload = torch.cat(parts)
        decodes = self.states[number] if compressor.facts.decode_needs_state else None
        sent = new.residual == 0
        for name, left, gone in zip(names, new.residual.split(list(sizes)), sent.split(list(sizes)), strict=True):
            self.residual[name] = left.clone()
            if compressor.sends_values:
                self.velocity[name][gone] = 0
        return compressor.decompress_reference(DecoderInput(payload, copies, tuple(sizes), None, decodes))


def simulate(names: list[str | None], device: Device, options: dict[str, int]) -> dict[str, Any]:
    """Steps of a compiled plan beside the formulas."""
    step = compiled([flat(name, device if name else Device.GPU) for name in names], warm_up=options)

    def state(number: int) -> Tensor | None:
        compressor = step.in_force.plans[-1].buckets[number].strategy.compressor
        kept = compressor is not None and compressor.has_state
        return step.in_force.state.compressor_states.of(number).clone() if kept else None

    other = Simulated(step.in_force.plans[-1], state)
    apart = 0.0
    for i in range(16):
        batch = JOB.batch(i, dist.get_rank())
        step(batch)
        other.step(batch, step.plan)
        apart = max(apart, (parameters(step.training.model) - parameters(other.model)).abs().max().item())
    assert step.in_force.state.velocities is not None
    return {
        "apart": apart,
        "moved": (parameters(other.model) - parameters(JOB.build())).abs().max().item(),
        "fingerprint": replica_fingerprint(step.training.model),
        "unsent": (step.in_force.state.velocities.arena != 0).float().mean().item(),
        "source": step.source,
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ranks", "names", "device", "options"),
    [
        (2, ["topk(0.05)"], Device.GPU, {}),
        (2, ["dgc(0.05)"], Device.GPU, {}),
        (2, ["int4"], Device.GPU, {}),
        (2, ["topk(0.05)", "sign", None, "randomk(0.1)"], Device.GPU, {}),
        (3, ["topk(0.05)", "sign", None, "randomk(0.1)"], Device.GPU, {}),
        (3, ["topk(0.05)", "int4"], Device.CPU, {}),
        (2, ["topk(0.02)", "sign"], Device.GPU, {"dense_steps": 4, "int4_steps": 5}),
    ],
    ids=["topk", "dgc", "int4", "mixed", "mixed, three", "pool, three", "warm-up"],
)
def test_a_compressed_plan_follows_the_formulas(ranks: int, names: Any, device: Device, options: Any):
    found = run_ranks(ranks, simulate, names, device, options)
    for rank in found:
        assert rank["apart"] <= (0 if ranks == 2 else 1e-6)  # thirds are rounded
        assert rank["moved"] > 1e-2
        assert rank["unsent"] > 0.5
        assert rank["source"].count("rt.accumulate") == 2 if len(names) < 3 else 4
        assert "rt.mask_velocity" in rank["source"] or names == ["int4"]
    assert len({rank["fingerprint"] for rank in found}) == 1


def sharded() -> str:
    """Each rank of a host has the velocity of its shard, on the device and on the host."""
    step = compiled(
        [Strategy.hierarchical(parse_compressor(name), device) for name, device in SHARDED], 1, cluster=TWO_HOSTS
    )
    for i in range(8):
        step(JOB.batch(i, dist.get_rank()))
    assert step.in_force.state.velocities is not None
    for number, bucket in enumerate(step.plan.buckets):
        held = step.in_force.state.velocities.of(number)
        assert abs(2 * len(held) - bucket.elements) <= 1
        assert held.abs().max() > 0
        slices = step.in_force.state.velocities.slices
        whole = sum(piece.values.abs().sum() for name in bucket.names for piece in slices.get(name, ()))
        assert whole == pytest.approx(held.abs().sum().item(), rel=1e-5)
    return replica_fingerprint(step.training.model)


SHARDED = [("topk(0.05)", Device.GPU), ("int4", Device.GPU), ("topk(0.05)", Device.CPU), ("bf16", Device.GPU)]


def test_between_hosts_velocities_are_the_shards():
    assert len(set(run_ranks(4, sharded))) == 1


def with_decay() -> float:
    """The optimizer's weight decay pulls by itself, outside of the velocity."""
    step = compiled([flat(None)], weight_decay=0.1)
    model = JOB.build()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(5):
        step(JOB.batch(i, dist.get_rank()))
        gradients = torch.autograd.grad(cross_entropy(model, JOB.batch(i, dist.get_rank())), list(model.parameters()))
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                dist.all_reduce(g)
                v.mul_(MOMENTUM).add_(g / 2)
                p.sub_(RATE * (v + 0.1 * p))
    return (parameters(step.training.model) - parameters(model)).abs().max().item()


def test_weight_decay_is_outside_of_the_velocity():
    assert max(run_ranks(2, with_decay)) <= 1e-6


# Steps that are left out, states that are saved, plans that change


def left_out(names: list[str | None], device: Device) -> dict[str, Any]:
    """Two equal steps, of which one meets a gradient that is not finite, once, on one rank."""
    plans = [flat(name, device if name else Device.GPU) for name in names]
    step, clean = (compiled(plans, 1, skip_nonfinite=True) for _ in range(2))
    unchanged = False
    for i in range(6):
        inputs, target = JOB.batch(i, dist.get_rank())
        if i == 3:
            assert step.in_force.state.velocities is not None
            before = step.in_force.state.velocities.arena.clone(), parameters(step.training.model)
            step((torch.full_like(inputs, math.nan if dist.get_rank() else 1.0), target))
            after = step.in_force.state.velocities.arena, parameters(step.training.model)
            unchanged = all(map(torch.equal, before, after))
        for each in (step, clean):
            each((inputs, target))
    assert clean.in_force.state.velocities is not None
    return {
        "unchanged": unchanged,
        "skipped": (step.skipped_steps, clean.skipped_steps),
        "finite": bool(step.in_force.state.velocities.arena.isfinite().all())
        if step.in_force.state.velocities
        else False,
        "apart": (parameters(step.training.model) - parameters(clean.training.model)).abs().max().item(),
        "fingerprint": replica_fingerprint(step.training.model),
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", [Device.GPU, Device.CPU])
def test_a_step_that_is_left_out_leaves_velocities_as_they_were(device: Device):
    found = run_ranks(2, left_out, ["topk(0.05)", None, "int4", "randomk(0.1)"], device)
    for rank in found:
        assert rank["unchanged"]
        assert rank["finite"]
        assert rank["skipped"] == (1, 0)
        assert rank["apart"] <= 1e-4
    assert len({rank["fingerprint"] for rank in found}) == 1


def resumed(names: list[str | None], per_bucket: int) -> bool:
    """A state goes on in a fresh step, with other buckets, as if nothing had happened."""
    rank = dist.get_rank()
    step = compiled([flat(name) for name in names], warm_up={"dense_steps": 2})
    fresh = compiled([flat(name) for name in names], per_bucket, warm_up={"dense_steps": 2})
    for i in range(5):
        step(JOB.batch(i, rank))
    fresh.load_state_dict(step.state_dict())
    fresh.training.model.load_state_dict(step.training.model.state_dict())
    for i in range(5, 8):
        for each in (step, fresh):
            each(JOB.batch(i, rank))
    return torch.equal(parameters(step.training.model), parameters(fresh.training.model))


def test_a_saved_state_has_the_velocities_whatever_the_buckets():
    assert run_ranks(3, resumed, ["topk(0.05)"], 4) == [True] * 3


STEPS = 22


def switched_back(strategies: list[Strategy], others: list[Strategy], cluster: Any) -> dict[str, Any]:
    """A compressed plan becomes dense; the mean velocity over all ranks before and after it, and what was owed."""
    step, dense = (compiled(plan, 1, cluster=cluster, verify=7) for plan in (strategies, others))
    for i in range(STEPS):
        step(JOB.batch(i, dist.get_rank()))
    before, owed = mean_of(step, "velocities"), mean_of(step, "residuals")
    step.in_force.switch(replace(step.in_force.decision, plan=dense.plan), "going back to dense")
    after = mean_of(step, "velocities")
    start = parameters(step.training.model)
    step(JOB.batch(STEPS, dist.get_rank()))
    applied = (start - parameters(step.training.model)) / RATE
    return {
        "dense": step.plan == dense.plan,
        "apart": (before - after).abs().max().item(),
        "size": before.abs().max().item(),
        "owed": owed.abs().max().item(),
        "lost": (applied - mean_of(step, "velocities") - owed).abs().max().item(),
        "fingerprint": replica_fingerprint(step.training.model),
    }


def mean_of(step: fxcomp.CompiledStep, what: str) -> Tensor:
    """Of all ranks, in the model's order and the gradient's unit, from what would be saved."""
    saved = step.state_dict()[what]
    means: list[Tensor] = []
    for name, parameter in step.training.model.named_parameters():
        mean = torch.zeros(parameter.numel())
        for kept in saved.get(name, ()):
            weight = kept["weight"][0] / kept["weight"][1]
            mean[kept["start"] :][: len(kept["values"])] += weight * kept["values"]
        means.append(mean)
    flat = torch.cat(means)
    dist.all_reduce(flat)
    return flat


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ranks", "names", "others", "cluster"),
    [
        (2, ["topk(0.05)", "int4"], [Strategy.flat(None)], None),
        (3, ["randomk(0.1)", "topk(0.05)"], [Strategy.flat(None)], None),
        (4, ["topk(0.05)", "bf16"], [Strategy.flat(None), Strategy.hierarchical(None)], TWO_HOSTS),
    ],
    ids=["two", "three", "hierarchical"],
)
def test_momentum_goes_on_where_a_plan_is_given_up(ranks: int, names: Any, others: Any, cluster: Any):
    kinds = [Strategy.hierarchical, Strategy.flat] if cluster else [Strategy.flat, Strategy.flat]
    strategies = [kind(parse_compressor(name)) for kind, name in zip(kinds, names, strict=True)]
    if cluster:
        strategies = [strategies[0], strategies[0], strategies[1], strategies[1]]
    found = run_ranks(ranks, switched_back, strategies, others, cluster)
    for rank in found:
        assert rank["dense"]
        assert rank["size"] > 1e-3
        assert rank["apart"] <= 1e-6 * rank["size"]
        assert rank["owed"] > 1e-3
        assert rank["lost"] <= 1e-5, "what was left out arrives once, and is no part of the velocity"
    assert len({rank["fingerprint"] for rank in found}) == 1


# The prediction


def priced(names: list[str | None]) -> dict[str, float]:
    """Return the costs of the graph's and the search's velocity tasks."""
    step = compiled([flat(name) for name in names], 1)
    report = step.explain()
    assert "accumulate" in step.source
    workload_us = sum(
        span.task.duration_us for span in step.timeline.spans if re.match("corrected|next_velocity", span.task.name)
    )
    return {"graph": workload_us, "report": float(len(report))}


def test_velocities_are_part_of_the_predicted_step():
    for rank in run_ranks(2, priced, ["topk(0.05)", None]):
        assert rank["graph"] > 0
        assert rank["report"] > 0
