"""A step in which any rank's gradient is not finite never happened: on no rank, in no parameter, state or residual."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import OPTIMIZERS, mlp
from helpers.ranks import run_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Device, Strategy
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport

STEPS = 6
BAD_STEP = 2


def flat(name: str, device: Device = Device.GPU) -> Strategy:
    return Strategy.flat(parse_compressor(name), device)


PLANS = {
    "mixed": [flat("int4"), DENSE, flat("sign"), flat("topk(0.1)")],
    "pool": [DENSE, flat("int4", Device.CPU), flat("topk(0.1)", Device.CPU), flat("bf16")],
    "linear": [flat("bf16"), flat("bf16", Device.CPU), DENSE, flat("int4")],
    "states": [flat("int4(stochastic=true)"), flat("powersgd(1)"), flat("sidco(0.3)"), flat("int8(stochastic=true)")],
    "states on the pool": [
        *(flat(name, Device.CPU) for name in ("int4(stochastic=true)", "powersgd(2)", "sidco(0.3)")),
        flat("topk(0.3)"),
    ],
}
"""The strategies of 2.bias, 2.weight, 0.bias and 0.weight."""


@dataclass(frozen=True)
class Case:
    """Which rank's gradient of which parameter is not finite in the bad step."""

    plan: str
    parameter: str
    value: float
    rank: int
    optimizer: str = "sgd"
    everywhere: bool = False
    bad_step: int = BAD_STEP


NAN, INF = float("nan"), float("inf")

CASES = {
    2: [
        *(Case("mixed", name, value, 1) for name, value in (("2.bias", NAN), ("2.weight", INF), ("0.weight", NAN))),
        Case("mixed", "0.weight", -INF, 0, "adamw"),
        # Not with sign: where a gradient is 0 its residual becomes 0 only to rounding, whose sign shows.
        Case("pool", "2.weight", NAN, 1, "dampening", bad_step=0),
        Case("pool", "0.bias", INF, 1),
        Case("linear", "2.bias", NAN, 0, everywhere=True),
        *(Case("states", name, value, 1) for name, value in (("2.bias", NAN), ("2.weight", INF), ("0.bias", NAN))),
        Case("states", "0.weight", INF, 0, everywhere=True),
        Case("states on the pool", "2.bias", NAN, 1),
    ],
    3: [
        Case("mixed", "0.bias", INF, 1),
        Case("pool", "2.weight", NAN, 0),
        Case("linear", "2.weight", INF, 1, everywhere=True),
        Case("states", "2.bias", NAN, 1),
        Case("states on the pool", "2.weight", NAN, 0),
    ],
}
"""By number of ranks."""


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, dict[str, Tensor]]) -> Tensor:
    """Cross-entropy, and a poison that is added to gradients: zeros do nothing."""
    inputs, target, poison = batch
    loss = nn.functional.cross_entropy(model(inputs), target)
    return loss + sum((poison[name] * p).sum() for name, p in model.named_parameters())


def batch(step: int, case: Case | None) -> Any:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    poison = {name: torch.zeros(p.shape) for name, p in mlp().named_parameters()}
    if case is not None and case.rank == dist.get_rank():
        poison[case.parameter].view(-1)[7] = case.value
    return (
        torch.randn(8, 20, generator=generator),
        torch.randint(0, 10, (8,), generator=generator),
        poison,
    )


def compiled(case: Case) -> tuple[fxcomp.CompiledStep, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = mlp()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    names = [(name, p.numel()) for name, p in reversed(list(model.named_parameters()))]
    plan = Plan(tuple(Bucket((n,), (k,), s) for (n, k), s in zip(names, PLANS[case.plan], strict=True)))
    options = ErrorFeedback(everywhere=case.everywhere, allow_diverging=True)
    step = fxcomp.compile_step(
        model,
        loss_fn,
        optimizer,
        batch(0, None),
        skip_nonfinite=True,
        compress=fxcomp.Compress(plan=plan, feedback=options),
        checks=fxcomp.Checks(verify=2),
    )
    return step, optimizer


def numbers(step: fxcomp.CompiledStep, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], Tensor]:
    """Parameters and the optimizer's state; and residuals."""
    exact = [p.detach().clone() for p in step.training.model.parameters()]
    exact += [v.clone() for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return exact, step.in_force.state.residuals.arena.clone()


def skip(cases: list[Case]) -> list[dict[str, Any]]:
    return [follow(case) for case in cases]


@functools.cache
def without_the_bad_step(case: Case) -> tuple[list[Tensor], Tensor, int]:
    """Train as a case does, but for its bad step."""
    step, optimizer = compiled(case)
    for i in range(STEPS):
        if i != case.bad_step:
            step(batch(i, None))
    return *numbers(step, optimizer), step.skipped_steps


def follow(case: Case) -> dict[str, Any]:
    step, optimizer = compiled(case)
    rolled_back = 0.0
    unchanged = True
    for i in range(STEPS):
        if i == case.bad_step:
            exact, residual = numbers(step, optimizer)
            kept = step.in_force.state.compressor_states.state_dict()["compressors"]
            step(batch(i, case))
            exact_after, residual_after = numbers(step, optimizer)
            kept_after = step.in_force.state.compressor_states.state_dict()["compressors"]
            unchanged = all(map(torch.equal, exact, exact_after))
            pairs = (pair for name in kept for pair in zip(kept[name], kept_after[name], strict=True))
            unchanged &= all(torch.equal(before["state"], after["state"]) for before, after in pairs)
            rolled_back = (residual_after - residual).abs().max().item()
        else:
            step(batch(i, None))
    exact, residual = numbers(step, optimizer)
    expected, expected_residual, skipped = without_the_bad_step(replace(case, parameter="", value=0.0, rank=0))
    return {
        "unchanged": unchanged,
        "rolled_back": rolled_back,
        "skipped": (step.skipped_steps, skipped),
        "distance": max((a - b).abs().max().item() for a, b in zip(exact, expected, strict=True)),
        "residual_distance": (residual - expected_residual).abs().max().item(),
        "residual_size": expected_residual.abs().max().item(),
        "parameters": torch.cat([p.detach().flatten() for p in step.training.model.parameters()]).tolist(),
        "note": step.counted_notes,
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(ranks, plan) for ranks, cases in CASES.items() for plan in dict.fromkeys(c.plan for c in cases)],
)
def test_a_step_that_is_not_finite_never_happened(ranks: int, plan: str):
    found = run_ranks(ranks, skip, [case for case in CASES[ranks] if case.plan == plan])
    for rank, first in ((rank, first) for outcomes in found for rank, first in zip(outcomes, found[0], strict=True)):
        assert rank["skipped"] == (1, 0)
        assert rank["unchanged"]
        assert rank["residual_size"] > 1e-4
        assert rank["rolled_back"] <= 1e-6
        # What compression then rounds the other way, now and then, is bounded by its own steps.
        assert rank["distance"] <= 1e-3
        assert rank["residual_distance"] <= 2e-2
        assert rank["note"] == (f"1 of {STEPS} steps left out: a gradient was not finite",)
        assert rank["parameters"] == first["parameters"]


def one_rank() -> list[float]:
    case = Case("mixed", "0.weight", NAN, 0)
    torch.manual_seed(5)
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch(0, None), skip_nonfinite=True, max_grad_norm=1.0)
    step(batch(0, None))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    loss = step(batch(1, case))
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return [float(torch.equal(before, after)), float(loss.isnan()), step.skipped_steps]


def test_one_rank_alone_leaves_such_a_step_out_too():
    assert run_ranks(1, one_rank) == [[1.0, 1.0, 1]]


def without_skipping() -> bool:
    case = Case("mixed", "0.weight", NAN, 1)
    torch.manual_seed(5)
    model = mlp()
    step = fxcomp.compile_step(model, loss_fn, OPTIMIZERS["plain"](model.parameters()), batch(0, None), compress="int4")
    step(batch(0, case))
    return bool(nn.utils.parameters_to_vector(model.parameters()).isfinite().all()) or step.skipped_steps > 0


def test_without_it_parameters_become_not_finite_on_all_ranks_as_in_eager():
    assert run_ranks(2, without_skipping) == [False, False]


# The kernel


@pytest.mark.parametrize("elements", [1, 7, 1000, (1 << 14) + 1, 300_000])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_value_that_is_not_finite_is_found_wherever_it_lies(elements: int, value: float):
    runtime = Runtime(NullTransport(), torch.device("cpu"))
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 5e37
    other = torch.zeros(5)
    assert runtime.all_finite((other, values))
    for place in {0, elements // 2, elements - 1}:
        bad = values.clone()
        bad[place] = value
        assert not runtime.all_finite((other, bad))
        assert runtime.counters.skipped
    assert runtime.all_finite((values.view(1, -1).expand(3, -1),))  # not contiguous: plain torch
