"""Every compressor trains: on all ranks the same bits, and on the wire exactly the bytes that it declares.

Ranks report numbers, which tests then judge.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.plans import TWO_HOSTS, plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.compressors.examples import ours
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Device, Strategy

STEPS = 5

PARAMETERS = {"powersgd": "2"}
"""For compressors that have no default, others than a ratio of 0.05."""


def text_of(name: str) -> str:
    try:
        return str(parse_compressor(name))
    except ValueError:
        return f"{name}({PARAMETERS.get(name, '0.05')})"


COMPRESSORS = [
    *(text_of(kind.facts.name) for kind in ours() if kind.facts.name not in ("exact_bf16", "exact_fp16")),
    "int8(stochastic=true)",
    "int2(stochastic=true)",
    "shared_int8",
    "randomk(0.05)",
]
FACTS = {text: parse_compressor(text).facts for text in COMPRESSORS}
WHOLE = [text for text, facts in FACTS.items() if not facts.needs_whole_parameters and not facts.is_exact]
"""Compressors of shards: of any part of a gradient, and of sums."""


def kind_of(text: str) -> tuple[object, ...]:
    """Return what a plan by levels depends on."""
    compressor = parse_compressor(text)
    facts = compressor.facts
    return compressor.is_linear, facts.agreement, compressor.has_state, compressor.needs_error_feedback


FIRST_OF_KIND = list({kind_of(text): text for text in WHOLE[::-1]}.values())
REST = [text for text in WHOLE if text not in FIRST_OF_KIND]

Case = tuple[str, str]
"""A compressor, and where it runs."""

Bytes = dict[tuple[str, str], int]


@dataclass(frozen=True)
class Numbers:
    """Hold one rank's findings."""

    losses: tuple[float, ...] = ()
    fingerprint: str = ""
    sent: Bytes = field(default_factory=dict[tuple[str, str], int])
    declared: Bytes = field(default_factory=dict[tuple[str, str], int])
    counted: bool = False
    """Every random stream went on by one a step."""
    error: str = ""


def train_all(cases: list[Case]) -> dict[Case, Numbers]:
    return {case: _attempt(*case) for case in cases}


def _attempt(text: str, place: str) -> Numbers:
    try:
        return _train(text, place)
    except Exception:
        return Numbers(error=traceback.format_exc())


def _train(text: str, place: str) -> Numbers:
    job, rank = JOBS["mlp"], dist.get_rank()
    model = job.build()
    compressor = parse_compressor(text)
    make = Strategy.hierarchical if place == "hierarchical" else Strategy.flat
    device = Device.CPU if place == "cpu" else Device.GPU
    plan = text if place == "uniform" else plan_in_turns(model, [make(compressor, device)], per_bucket=3)
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        OPTIMIZERS["sgd"](model.parameters()),
        job.batch(0, rank),
        cluster=TWO_HOSTS if place == "hierarchical" else None,
        compress=fxcomp.Compress(plan=plan, feedback=ErrorFeedback(allow_diverging=True)),
        checks=fxcomp.Checks(verify=1),
    )
    before = streams(step)
    losses = tuple(step(job.batch(i, rank)).item() for i in range(STEPS))
    return Numbers(
        losses,
        replica_fingerprint(model),
        dict(step.payload_bytes),
        declared_bytes(step.plan, step, place),
        [[key, count + STEPS] for key, count in before] == streams(step),
    )


def streams(step: fxcomp.CompiledStep) -> list[list[int]]:
    """The key and the step of each random stream."""
    saved: Any = step.state_dict()["compressors"]
    return [part["state"].tolist() for parts in saved.values() for part in parts if part["dtype"] == "int64"]


def declared_bytes(plan: Plan, step: fxcomp.CompiledStep, place: str) -> Bytes:
    """Count a rank's bytes in flat collectives: dense buckets, payloads, and proposals."""
    if place == "hierarchical":
        return {}
    parameters = dict(step.training.model.named_parameters())
    found: Bytes = {}
    for bucket in plan.buckets:
        compressor = bucket.strategy.compressor
        size, kind = bucket.dense_bytes, "all_reduce"
        if compressor is not None:
            shapes = [tuple(parameters[name].shape) for name in bucket.names]
            bound = compressor.bound_to(shapes, dist.get_world_size())
            size, kind = bound.payload_bytes(bucket.sizes), "all_reduce" if bound.is_linear else "all_gather"
            if bound.facts.agreement:
                found["all_reduce", "world"] = found.get(("all_reduce", "world"), 0) + bound.proposal_bytes(
                    bucket.sizes
                )
        found[kind, "world"] = found.get((kind, "world"), 0) + size
    return found


def check(everyone: list[dict[Case, Numbers]], case: Case) -> list[Numbers]:
    numbers = [rank[case] for rank in everyone]
    assert not any(n.error for n in numbers), "\n".join(n.error for n in numbers)
    assert len({n.fingerprint for n in numbers}) == 1
    assert all(math.isfinite(loss) for n in numbers for loss in n.losses)
    assert all(n.counted for n in numbers)
    return numbers


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("text", "places"),
    [
        *((text, ("gpu", "cpu")) for text in COMPRESSORS),
        *((text, ("uniform",)) for text in ("int8", "powersgd(2)")),
    ],
    ids=str,
)
def test_all_ranks_hold_the_same_bits_wherever_it_runs_and_send_what_is_declared(text: str, places: tuple[str, ...]):
    cases = [(text, place) for place in places]
    everyone = run_ranks(2, train_all, cases)
    found = [numbers for case in cases for numbers in check(everyone, case)]
    assert len({numbers.fingerprint for numbers in found}) == 1
    for numbers in found:
        assert numbers.sent == numbers.declared


@pytest.mark.parametrize("texts", [FIRST_OF_KIND, pytest.param(REST, marks=pytest.mark.slow)], ids=["kinds", "rest"])
def test_between_hosts_every_rank_holds_the_same_bits(texts: list[str]):
    cases = [(text, "hierarchical") for text in texts]
    everyone = run_ranks(4, train_all, cases)
    for case in cases:
        check(everyone, case)
