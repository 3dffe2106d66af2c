"""Ranks exchange the optimizer's momentum: by the identity as eager, compressed as the formulas say."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks, try_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.compressors import DecoderInput, EncoderInput, parse_compressor
from fxcomp.errors import BadOption
from fxcomp.passes import move_exchange
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE, Strategy

JOB = JOBS["mlp"]
STEPS = 12
WARM = 4

Make = Callable[[nn.Module], torch.optim.Optimizer]

SGD: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "decay": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "nesterov and decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.9, "maximize": True},
}


def parameters(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def moved(plan: Plan) -> Plan:
    """Let every bucket travel at the momentum, dense ones too."""
    return Plan(tuple(replace(bucket, at=ExchangePoint.MOMENTUM) for bucket in plan.buckets))


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, **options: Any):
    plan = moved(plan_in_turns(model, [strategy], 2))
    warmup = fxcomp.Warmup(**options.pop("warmup", {}))
    return fxcomp.compile_step(
        model,
        cross_entropy,
        optimizer,
        JOB.batch(0, dist.get_rank()),
        compress=fxcomp.Compress(plan=plan, warmup=warmup, steps=options.pop("steps", None)),
        checks=fxcomp.Checks(verify=2),
        costs=fxcomp.CostTable(),
        **options,
    )


class Ahead(torch.optim.Optimizer):
    """Moves by its momentum and more of the gradient before it writes the momentum, as Lion does."""

    def __init__(self, parameters: Any, lr: float):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["mean"] = torch.zeros_like(p)
                mean = self.state[p]["mean"]
                p.sub_(group["lr"] * (0.8 * mean + 0.2 * p.grad))
                mean.lerp_(p.grad, 0.1)


OWN = {"own": True}


def made(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    if options == OWN:
        return Ahead(model.parameters(), 0.05)
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)


def by_the_identity(options: dict[str, Any]) -> tuple[float, float, str]:
    """The distance to eager PyTorch, and how far it went."""
    model, reference = JOB.build(), DistributedDataParallel(JOB.build())
    step = compiled(model, made(model, options), DENSE)
    optimizer = made(reference, options)
    start = parameters(model)
    for i in range(STEPS):
        batch = JOB.batch(i, dist.get_rank())
        step(batch)
        optimizer.zero_grad()
        cross_entropy(reference, batch).backward()
        optimizer.step()
    went = parameters(model) - start
    off = parameters(model) - parameters(reference.module)
    return float(off.norm()), float(went.norm()), replica_fingerprint(model)


@pytest.mark.parametrize("options", [*SGD.values(), OWN], ids=[*SGD, "own"])
def test_by_the_identity_a_step_is_eagers(options):
    results = run_ranks(2, by_the_identity, options)
    for off, went, _ in results:
        assert off < 1e-5 * went
    assert len({fingerprint for _, _, fingerprint in results}) == 1


# Adam


class FormulaA:
    """AdamW until WARM, then compressed momenta in units of a frozen second moment, in plain torch, all ranks in one.

    x_i = beta1 M + (1 - beta1) g_i / d + e_i;  q_i = C(x_i);  e_i = x_i - q_i;  M = mean q_i
    theta = (1 - lr wd) theta - lr M / (1 - beta1^t)
    """

    BETAS, EPS, DECAY, RATE = (0.9, 0.99), 1e-8, 0.1, 0.01

    def __init__(self, ranks: int, compressor: str | None):
        self.model, self.ranks = JOB.build(), ranks
        self.compressor = None if compressor is None else parse_compressor(compressor)
        self.kept = [
            {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "e": [torch.zeros(p.numel()) for _ in range(ranks)]}
            for p in self.model.parameters()
        ]

    def gradients(self, i: int, rank: int) -> list[Tensor]:
        return list(torch.autograd.grad(cross_entropy(self.model, JOB.batch(i, rank)), list(self.model.parameters())))

    def lossy(self, value: Tensor, residual: Tensor) -> Tensor:
        """Return the value that one rank's payload stands for; the residual changes in place."""
        if self.compressor is None:
            return value
        segments, before = (value.numel(),), value.flatten() + residual
        payload = self.compressor.compress_reference(EncoderInput(value.flatten(), residual, segments)).payload
        arrived = self.compressor.decompress_reference(DecoderInput(payload, 1, segments))
        residual.copy_(before - arrived)
        return arrived.view_as(value)

    def step(self, i: int) -> None:
        first, second = self.BETAS
        of_ranks = [self.gradients(i, rank) for rank in range(self.ranks)]
        for k, (p, kept) in enumerate(zip(self.model.parameters(), self.kept, strict=True)):
            mine = [gradients[k] for gradients in of_ranks]
            if i < WARM:
                mean = torch.stack(mine).mean(0)
                kept["m"] = first * kept["m"] + (1 - first) * mean
                kept["v"] = second * kept["v"] + (1 - second) * mean**2
                d = (kept["v"] / (1 - second ** (i + 1))).sqrt() + self.EPS
                update = kept["m"] / d
            else:
                if i == WARM:
                    kept["v"].clamp_(min=0.01 * float(kept["v"].double().mean()))
                    kept["d"] = (kept["v"] / (1 - second**WARM)).sqrt() + self.EPS
                    kept["m"] = kept["m"] / kept["d"]
                sent = [first * kept["m"] + (1 - first) * g / kept["d"] for g in mine]
                kept["m"] = torch.stack([self.lossy(x, e) for x, e in zip(sent, kept["e"], strict=True)]).mean(0)
                update = kept["m"]
            with torch.no_grad():
                p.mul_(1 - self.RATE * self.DECAY).sub_(self.RATE / (1 - first ** (i + 1)) * update)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), lr=self.RATE, betas=self.BETAS, eps=self.EPS, weight_decay=self.DECAY
        )


def apart(value: Tensor, expected: Tensor, unit: Tensor) -> float:
    """Compute the 99th percentile of the elements' differences, over the root mean square of `unit`.

    A code of a value on a threshold is decided by rounding, so one element in a hundred may differ.
    """
    return float((value - expected).flatten().abs().quantile(0.99) / unit.square().mean().sqrt())


def adam_beside_the_formula(compressor: str | None) -> tuple[list[float], str, float, float]:
    model, reference = JOB.build(), FormulaA(dist.get_world_size(), compressor)
    optimizer = reference.optimizer(model)
    strategy = DENSE if compressor is None else Strategy.flat(parse_compressor(compressor))
    step = compiled(model, optimizer, strategy, warmup={"dense_steps": WARM})
    off: list[float] = []
    for i in range(STEPS):
        before = parameters(reference.model)
        step(JOB.batch(i, dist.get_rank()))
        reference.step(i)
        went = parameters(reference.model) - before
        off.append(apart(parameters(model), parameters(reference.model), went))
    kept, wanted = optimizer.state[next(model.parameters())], reference.kept[0]
    second = FormulaA.BETAS[1]
    own = (kept["exp_avg_sq"] / (1 - second**STEPS)).sqrt() + FormulaA.EPS
    frozen = float((own / wanted["d"] - 1).abs().max())
    momentum = apart(kept["exp_avg"] / wanted["d"], wanted["m"], wanted["m"])
    return off, replica_fingerprint(model), frozen, momentum


@pytest.mark.parametrize("compressor", [None, "int4", "sign"])
def test_adam_follows_formula_a(compressor):
    results = run_ranks(2, adam_beside_the_formula, compressor)
    for off, _, frozen, momentum in results:
        assert max(off) < 1e-3
        assert frozen < 1e-5, "the state is one from which plain AdamW could go on"
        assert momentum < 1e-3
    assert len({fingerprint for _, fingerprint, _, _ in results}) == 1


OTHERS: dict[str, Make] = {
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "adam with decay": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adamw upwards": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, maximize=True),
    "muon": lambda m: torch.optim.Muon(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.AdamW(
        [{"params": [m[0].weight], "weight_decay": 0.0}, {"params": [m[2].weight], "lr": 0.001}], lr=0.01
    ),
}


def verified(name: str, compressor: str) -> tuple[int, str]:
    """Train with every step verified by the user's own optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 10, bias=False))
    plan = moved(plan_in_turns(model, [Strategy.flat(parse_compressor(compressor)), DENSE]))
    compress = fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(int8_steps=WARM))
    optimizer = OTHERS[name](model)
    falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    checks = fxcomp.Checks(verify=1)
    costs = fxcomp.CostTable()
    step = fxcomp.compile_step(
        model, cross_entropy, optimizer, JOB.batch(0), compress=compress, checks=checks, costs=costs
    )
    for i in range(STEPS):
        step(JOB.batch(i, dist.get_rank()))
        falling.step()
    return step.steps, replica_fingerprint(model)


@pytest.mark.parametrize("name", OTHERS)
def test_every_step_of_other_optimizers_is_what_they_would_do(name):
    results = run_ranks(2, verified, name, "cmax(4)")
    assert {steps for steps, _ in results} == {STEPS}
    assert len({fingerprint for _, fingerprint in results}) == 1


# Around it


def summed_up(options: dict[str, Any], micro_batches: int) -> tuple[float, float]:
    """The distance to eager PyTorch on the mean of micro-batches, and how far it went."""
    model, reference = JOB.build(), DistributedDataParallel(JOB.build())
    start = parameters(model)
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.05, **options), DENSE, accumulate=micro_batches)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, **options)
    for i in range(STEPS):
        optimizer.zero_grad()
        for k in range(micro_batches):
            batch = JOB.batch(100 * i + k, dist.get_rank())
            step(batch)
            (cross_entropy(reference, batch) / micro_batches).backward()
        optimizer.step()
    off = parameters(model) - parameters(reference.module)
    return float(off.norm()), float((parameters(model) - start).norm())


def test_micro_batches_are_summed_up_before_the_momentum():
    for off, went in run_ranks(2, summed_up, SGD["nesterov and decay"], 3):
        assert off < 1e-5 * went


RESTARTS = (WARM - 1, WARM, WARM + 1, STEPS - 1)


def restarted() -> dict[int, str]:
    """Fingerprints of a job, and of those that go on from its states after so many steps."""
    reference = FormulaA(1, None)
    strategy = Strategy.flat(parse_compressor("sign"))

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = JOB.build()
        optimizer = reference.optimizer(model)
        return model, optimizer, compiled(model, optimizer, strategy, warmup={"dense_steps": WARM})

    model, optimizer, step = start()
    saved: dict[int, Any] = {}
    for i in range(STEPS):
        if i in RESTARTS:
            saved[i] = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
        step(JOB.batch(i, dist.get_rank()))
    found = {0: replica_fingerprint(model)}
    for steps, (of_model, of_optimizer, of_step) in saved.items():
        other, its_optimizer, resumed = start()
        resumed.load_state_dict(of_step)  # first: at the freeze the optimizer's state counts as it is when a step runs
        other.load_state_dict(of_model)
        its_optimizer.load_state_dict(of_optimizer)
        for i in range(steps, STEPS):
            resumed(JOB.batch(i, dist.get_rank()))
        found[steps] = replica_fingerprint(other)
    return found


def test_a_restart_goes_on_to_the_bit():
    results = run_ranks(2, restarted)
    assert set(results[0]) == {0, *RESTARTS}
    assert len({fingerprint for found in results for fingerprint in found.values()}) == 1, results


def rolled_back() -> tuple[str, str]:
    """Fingerprints of a job, and of the same one rolled back to the freeze from beyond it."""
    model, saved = JOB.build(), None
    optimizer = FormulaA(1, None).optimizer(model)
    step = compiled(model, optimizer, Strategy.flat(parse_compressor("sign")), warmup={"dense_steps": WARM})
    for i in range(STEPS):
        if i == WARM:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
        step(JOB.batch(i, dist.get_rank()))
    whole = replica_fingerprint(model)
    assert saved is not None
    for each, state in zip((model, optimizer, step), saved, strict=True):
        each.load_state_dict(state)
    for i in range(WARM, STEPS):
        step(JOB.batch(i, dist.get_rank()))
    return whole, replica_fingerprint(model)


def test_a_job_that_is_rolled_back_to_the_freeze_freezes_again():
    results = run_ranks(2, rolled_back)
    assert len({fingerprint for pair in results for fingerprint in pair}) == 1


def left_out() -> tuple[list[bool], list[str]]:
    model = JOB.build()
    optimizer = torch.optim.AdamW(model.parameters())
    step = compiled(model, optimizer, DENSE, warmup={"dense_steps": 2}, skip_nonfinite=True)
    inputs, target = JOB.batch(0, dist.get_rank())
    moves: list[bool] = []
    for is_finite in (False, True, False, True, True):
        step((inputs if is_finite else inputs * math.inf, target))
        moves.append(step.plan.moves_exchange)
    return moves, [note for note in step.notes if "go on exchanging gradients" in note]


def test_steps_that_were_left_out_are_no_part_of_a_warm_up():
    for moves, notes in run_ranks(2, left_out):
        assert moves == [False, False, False, False, True]
        assert len(notes) == 1
        assert "has been updated in 1 steps so far" in notes[0]
        assert "has been in 2" in notes[0]


def of_nothing() -> None:
    model = JOB.build()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = moved(plan_in_turns(model, [DENSE], 2))
    compress = fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(dense_steps=1))
    batch = JOB.batch(0, dist.get_rank())
    step = fxcomp.compile_step(model, lambda m, b: 0.0 * cross_entropy(m, b), optimizer, batch, compress=compress)
    step(batch)
    step(batch)


def test_second_moments_that_are_all_zero_are_told():
    assert all("second moments, and all of these are zero" in outcome.text for outcome in try_ranks(2, of_nothing))


def without_the_optimizers_state() -> None:
    """Go on after the freeze with the step's state alone."""
    reference = FormulaA(1, None)
    model, other = JOB.build(), JOB.build()
    step = compiled(model, reference.optimizer(model), DENSE, warmup={"dense_steps": WARM})
    for i in range(WARM + 2):
        step(JOB.batch(i, dist.get_rank()))
    resumed = compiled(other, reference.optimizer(other), DENSE, warmup={"dense_steps": WARM})
    resumed.load_state_dict(step.state_dict())
    resumed(JOB.batch(0, dist.get_rank()))


def test_going_on_after_the_freeze_without_the_optimizers_state_is_refused():
    outcomes = try_ranks(2, without_the_optimizers_state)
    assert all("the optimizer has none" in outcome.text for outcome in outcomes), outcomes


def loaded_elsewhere() -> str:
    """Load a state of momenta into a job that exchanges gradients."""
    model, other = JOB.build(), JOB.build()
    step = compiled(model, made(model, SGD["momentum"]), Strategy.flat(parse_compressor("sign")))
    step(JOB.batch(0, dist.get_rank()))
    optimizer = made(other, SGD["momentum"])
    elsewhere = fxcomp.compile_step(other, cross_entropy, optimizer, JOB.batch(0, dist.get_rank()), compress="sign")
    elsewhere.load_state_dict(step.state_dict())
    return ""


def test_residuals_of_another_unit_are_refused():
    outcomes = try_ranks(2, loaded_elsewhere)
    assert all("residuals have another unit" in outcome.text for outcome in outcomes), outcomes


def never_seen() -> tuple[float, float]:
    """Return the largest move of a row that had no gradient before the freeze, and of the others."""
    torch.manual_seed(3)
    model = nn.Embedding(10, 8)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return (model(tokens) - 1).square().sum()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    plan = moved(plan_in_turns(model, [DENSE]))
    compress = fxcomp.Compress(plan=plan, warmup=fxcomp.Warmup(dense_steps=WARM))
    seen, other = torch.arange(8), torch.tensor([9])
    step = fxcomp.compile_step(model, loss, optimizer, seen, compress=compress, checks=fxcomp.Checks(verify=1))
    for _ in range(WARM):
        step(seen)
    before = model.weight.detach().clone()
    step(torch.cat([seen, other]))
    went = (model.weight.detach() - before).abs()
    assert not went[8].any(), "the row without a gradient stays"
    return float(went[9].max()), float(went[:8].max())


def test_a_row_that_had_no_gradient_before_the_freeze_moves_a_bounded_way():
    for first, others in run_ranks(2, never_seen):
        assert first < 15 * others


# Refused


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sgd", {"max_grad_norm": 1.0}, "does not go with max_grad_norm="),
    ("sgd", {"max_grad_value": 1.0}, "does not go with max_grad_value="),
    ("adamw", {}, "there is no warm-up"),
    ("plain", {}, "it keeps no mean of gradients"),
    ("amsgrad", {"warmup": {"dense_steps": 1}}, "several magnitudes of gradients"),
    ("adamw", {"steps": 20}, "after a warm-up of 20 steps, and the job has 20"),
    ("adamw", {"steps": 4, "warmup": {"dense_steps": 5}}, "after a warm-up of 5 steps, and the job has 4"),
]


def refusals() -> list[str]:
    found: list[str] = []
    for make, options, _ in REFUSED:
        with pytest.raises(fxcomp.FxcompError) as refused:
            with_options(make, **copy.deepcopy(options))
        found.append(str(refused.value))
    return found


def with_options(make: str, **options: Any) -> None:
    model = JOB.build()
    optimizers: dict[str, Make] = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "adamw": lambda m: torch.optim.AdamW(m.parameters()),
        "amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    }
    compiled(model, optimizers[make](model), DENSE, **options)


def test_what_is_not_built_is_refused_by_name():
    for texts in run_ranks(2, refusals):
        for (_, _, what), text in zip(REFUSED, texts, strict=True):
            assert what in text


def from_a_plan(named: bool) -> None:
    model = JOB.build()
    plan = plan_in_turns(model, [Strategy.flat(parse_compressor("sign"))])
    compress = fxcomp.Compress(plan=plan, at="momentum") if named else fxcomp.Compress(plan=plan.at_momenta())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fxcomp.compile_step(
        model, cross_entropy, optimizer, JOB.batch(0, dist.get_rank()), compress=compress, max_grad_norm=1.0
    )


@pytest.mark.parametrize(("named", "what"), [(True, 'Leave at="momentum" out'), (False, "Pass plan.at_gradients()")])
def test_a_refusal_says_what_to_do_about_what_was_passed(named, what):
    outcomes = try_ranks(2, partial(from_a_plan, named))
    assert all(what in outcome.text for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    "compress", [{"at": "momentum", "plan": "sign"}, {"plan": moved(plan_in_turns(JOB.build(), [DENSE]))}]
)
def test_a_hook_sees_no_momentum(compress):
    with pytest.raises(BadOption, match="exchanging momenta needs the optimizer"):
        fxcomp.ddp_hook(compress=fxcomp.Compress(**compress))


def mistaken(mistake: str) -> str:
    """Train with a mistake of the compiler; returns what verification says."""

    def not_frozen(move: Any, _: Any) -> Any:
        """Leave the writes of the second moment as they are."""
        return move._moment.magnitude.divisor

    multiplying = SimpleNamespace(**{**vars(move_exchange._aten), "div": torch.ops.aten.mul})
    patches = {
        "growth": patch.object(move_exchange._Move, "_freeze", not_frozen),
        "units": patch.object(move_exchange, "_aten", multiplying),
    }
    try:
        with patches[mistake]:
            adam_beside_the_formula(None)
    except fxcomp.FxcompError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mistake", ["growth", "units"])
def test_verification_sees_mistakes_in_moved_updates(mistake):
    assert all("differs" in said for said in run_ranks(2, mistaken, mistake))
