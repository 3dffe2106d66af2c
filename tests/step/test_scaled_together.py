"""A scaler together with all else that a step does: what is applied and owed are all gradients, as eager PyTorch's."""

from __future__ import annotations

import copy
import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.drifting import links_become, short_windows, table
from helpers.ranks import run_ranks
from helpers.scaled import Summing, same_bits
from helpers.scaled_jobs import SMALL, Found, Job, Work, small_batch
from helpers.virtual_time import LINKS, VirtualTime, virtual_time
from torch import Tensor, nn

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import parse_compressor
from fxcomp.cost.table import CostTable
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search import choose as choosing
from fxcomp.search.choose import uniform
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.runners import Runner
from fxcomp.step import calendar
from fxcomp.step.errors import adaptation, error_looks

IN_TWO_SHOTS = (
    "compress(int4(block=32))@gpu > all_to_all@world > decompress@gpu > "
    "compress(int4(block=32))@gpu > all_gather@world > decompress@gpu"
)


def check(found: list[Found], seed: int) -> Found:
    for each in found:
        each.check(seed)
        assert each.plans == found[0].plans
        assert each.notes == found[0].notes
    return found[0]


# Books, under one plan


def kept_books(plans: Mapping[str, dict[str, Any]], steps: int, seed: int) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for name, options in plans.items():
        job = Job(seed, **options)
        job.run(steps)
        found[name] = job.found()
    return found


OWING: dict[str, dict[str, Any]] = {
    "int4": {"plan": "int4"},
    "in two shots": {"plan": IN_TWO_SHOTS},
    "micro-batches": {"plan": "topk(0.1)", "micro_batches": 3},
    "powersgd": {"plan": "powersgd(2)"},
    "sidco": {"plan": "sidco(0.1)"},
    "sign": {"plan": "sign"},
    "verified": {"plan": "int4", "verify": 1},
    "verified now and then": {"plan": IN_TWO_SHOTS, "verify": 3, "micro_batches": 3},
}


def test_what_was_applied_and_what_is_owed_are_all_gradients_whatever_the_scale_was():
    plans = {name: OWING[name] for name in ("int4", "micro-batches")}
    found = run_ranks(2, kept_books, plans, 24, 3)
    for name in plans:
        check([each[name] for each in found], 3)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, tuple(OWING)), (3, ("in two shots", "powersgd"))])
def test_over_many_steps_nothing_that_is_owed_is_lost_under_any_plan(ranks: int, names: Sequence[str]):
    """The scale may grow every fourth step, and falls where a step is left out."""
    found = run_ranks(ranks, kept_books, {name: OWING[name] for name in names}, 120, 5, timeout_s=1200)
    for name in names:
        check([each[name] for each in found], 5)


# Plans that change


def exact(always: Mapping[str, Plan], _: Any, prices: StepPrices, __: Any) -> tuple[Runner, ...]:
    """Dense, and compressors that have feedback: what bf16's sums are rounded by is owed by nobody."""
    named = [Strategy.flat(parse_compressor(name)) for name in ("int4", "topk(0.1)")]
    plans = [
        always["dense"],
        *(uniform(str(strategy), prices.workload, prices.costs, prices.cluster) for strategy in named),
    ]
    return tuple(Runner(str(plan.buckets[-1]), plan, 1e3, 0.5, 0.1) for plan in plans)


def raced(seed: int, often: float) -> Found:
    with virtual_time(VirtualTime()), patch.object(choosing, "pick_runners", exact):
        job = Job(seed, often=often, race="auto", costs=table(0.3), verify=5)
        job.run(1)
        while job.step.is_racing:
            job.run(1)
        job.run(3)
    return job.found()


@pytest.mark.parametrize(
    ("often", "seed"),
    [(0.3, 6), pytest.param(0.8, 7, marks=pytest.mark.slow), pytest.param(0.1, 8, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_plans_race_while_steps_are_left_out(often: float, seed: int):
    found = check(run_ranks(2, raced, seed, often), seed)
    assert len(set(found.plans)) >= 2
    assert any(note.startswith("raced") for note in found.notes)


def planned_anew(seed: int) -> Found:
    with links_become(0.2):
        job = Job(seed, often=0.05, costs=table(2.0), verify=5, within="lossy")
        job.run(32)
        job.step.replan()
        job.run(16)
    return job.found()


@pytest.mark.slow
def test_a_step_that_is_planned_anew_goes_on_with_its_scale():
    found = check(run_ranks(2, planned_anew, 9), 9)
    assert any(note.startswith("planned again") for note in found.notes)
    assert len(found.plans) == 2


# A plan that follows the gradients

WHERE = Cluster.parse("2x1, inter 10mbit@20us, intra 100gbit")
CHANGES_AT = 70


@contextmanager
def soon() -> Generator[None]:
    """Look at gradients every third step, and meet for answers every tenth."""
    with (
        patch.multiple(error_looks, LOOKS=3, LOOKS_SHARE=1e9, FIRST=3),
        patch.object(calendar, "SETTLED", 3),
        patch.object(adaptation, "MEETING", 10),
    ):
        yield


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def few_directions_first(step: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Gradients of a low rank, and of a high one later: a plan that follows them changes."""
    draw = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    inputs, targets = torch.randn(32, 64, generator=draw), torch.randn(32, 16, generator=draw)
    return (inputs if step >= CHANGES_AT else inputs * (torch.arange(64) < 2)), targets


DEEP = Work(deep, squared, few_directions_first, lambda _: ("0.weight", "2.bias", "4.weight"))


def followed(seed: int, steps: int, often: float, micro_batches: int) -> tuple[Found, int, list[str]]:
    """Return how many looks were taken, and how the plan moved, too."""
    options: dict[str, Any] = {"within": 0.2, "measured": True, "cluster": WHERE, "costs": CostTable(), "replan": "off"}
    options |= {"feedback": ErrorFeedback(everywhere=True)}  # else what int8 loses is owed by nobody
    with soon():
        job = Job(seed, DEEP, lambda p: Summing(p, lr=0.05), micro_batches, often, **options)
        job.run(steps)
    assert job.step.errors is not None
    return job.found(), job.step.errors.looks, [str(move) for move in job.step.moves]


@pytest.mark.slow
@pytest.mark.parametrize(("often", "micro_batches"), [(0.1, 1), (0.5, 1), (0.2, 3)])
def test_a_plan_follows_the_gradients_of_steps_that_were_not_left_out(often: float, micro_batches: int):
    results = run_ranks(2, followed, 12, 200, often, micro_batches)
    found = check([each for each, _, _ in results], 12)
    looks, moves = results[0][1:]
    assert results[1][1:] == (looks, moves)
    assert looks > 10
    assert moves
    assert len(found.plans) >= 2


# Parameters that some batches leave out


class Heads(nn.Module):
    """A trunk, and a head for each task; a batch says which."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(12, 32), nn.ModuleList(nn.Linear(32, 5) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def of_head(model: nn.Module, batch: tuple[Tensor, Tensor, int]) -> Tensor:
    inputs, target, head = batch
    with torch.autocast("cpu", torch.float16):
        return nn.functional.cross_entropy(model(inputs, head).float(), target)


def head_batch(step: int, rank: int, number: int) -> tuple[Tensor, Tensor, int]:
    """Each rank and each micro-batch may use another head; there are steps in which nobody uses one."""
    return *small_batch(step, rank, number), random.Random(f"{step // 2} {rank} {number}").randrange(3)


HEADS = Work(Heads, of_head, head_batch, lambda batch: ("trunk.weight", "trunk.bias", f"heads.{batch[2]}.weight"))
UNUSED: dict[str, dict[str, Any]] = {
    "int4": {"plan": "int4"},
    "in two shots": {"plan": IN_TWO_SHOTS, "verify": 1},
    "micro-batches": {"plan": "topk(0.1)", "micro_batches": 3},
    "adamw": {"plan": "int4", "optimizers": lambda p: torch.optim.AdamW(p, lr=0.01)},
}


def with_unused(seed: int, steps: int) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for name, options in UNUSED.items():
        job = Job(seed, HEADS, find_unused_parameters=True, **options)
        job.run(steps)
        found[name] = job.found()
    return found


@pytest.mark.slow
def test_what_no_rank_uses_is_owed_what_it_was_over_steps_that_are_left_out():
    results = run_ranks(2, with_unused, 15, 100)
    for name in UNUSED:
        check([each[name] for each in results], 15)


# Several optimizers


def of_halves(seed: int, steps: int) -> Found:
    job = Job(seed, optimizers=lambda p: [Summing(p[k::2], lr=0.1) for k in range(2)], plan=IN_TWO_SHOTS)
    job.run(steps)
    return job.found()


@pytest.mark.slow
def test_several_optimizers_skip_a_step_together_and_the_scale_falls_once():
    check(run_ranks(2, of_halves, 16, 20), 16)


# Saved and loaded

SAVED_AT, ENDS_AT = 10, 18
"""Two steps after the scale grew or fell, in the middle of an interval of four."""


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def killed(plan: str, micro_batches: int) -> tuple[bool, bool, int]:
    """Return if a job that was started again goes on to the bit, if it did inside an interval, and how many skips."""
    job = Job(17, SMALL, momentum, micro_batches, 0.2, plan=plan)
    job.run(SAVED_AT)
    saved = copy.deepcopy([job.model.state_dict(), *_optimizers(job), job.scaler.state_dict(), job.step.state_dict()])
    job.run(ENDS_AT - SAVED_AT)
    again = Job(17, SMALL, momentum, micro_batches, 0.2, plan=plan)
    again.run(1)
    again.model.load_state_dict(saved[0])
    again.step.training.optimizers[0].load_state_dict(saved[1])
    again.beside.load(saved[2])
    again.step.load_state_dict(saved[3])
    again.run(ENDS_AT - SAVED_AT)
    ends = [[each.model.state_dict(), *_optimizers(each), each.step.state_dict()] for each in (job, again)]
    is_same = same_bits(*ends) and job.scaler.state_dict() == again.scaler.state_dict()
    assert not job.beside.wrong + again.beside.wrong
    return is_same, saved[2]["_growth_tracker"] > 0, job.step.skipped_steps


def _optimizers(job: Job) -> list[dict[str, Any]]:
    return [each.state_dict() for each in job.step.training.optimizers]


@pytest.mark.parametrize(
    ("plan", "micro_batches"),
    [
        (IN_TWO_SHOTS, 3),
        *(pytest.param(p, 1, marks=pytest.mark.slow) for p in ("powersgd(2)", "sidco(0.1)")),
    ],
)
def test_a_job_that_is_saved_in_the_middle_of_a_growth_interval_goes_on_to_the_bit(plan: str, micro_batches: int):
    for same, is_inside, skipped in run_ranks(2, killed, plan, micro_batches):
        assert same
        assert is_inside
        assert skipped >= 2


def loaded_in_a_race(seed: int) -> Found:
    """Load a state in the middle of a race, with the parameters and the scaler of then."""
    with virtual_time(VirtualTime()), patch.object(choosing, "pick_runners", exact):
        job = Job(seed, race="auto", costs=table(0.3), optimizers=plain)
        job.run(6)
        assert job.step.is_racing
        saved = copy.deepcopy([job.model.state_dict(), job.scaler.state_dict(), job.step.state_dict()])
        job.run(4)
        job.model.load_state_dict(saved[0])
        job.beside.load(saved[1])
        job.step.load_state_dict(saved[2])
        while job.step.is_racing:
            job.run(1)
        job.run(2)
    return job.found()


def plain(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.slow
def test_a_state_is_loaded_in_the_middle_of_a_race():
    check(run_ranks(2, loaded_in_a_race, 18), 18)


# All at once


def all_at_once(seed: int) -> Found:
    """A race, a plan that follows the gradients and the costs, three micro-batches, two optimizers, some verified."""
    clock = VirtualTime()
    with (
        virtual_time(clock),
        patch.object(choosing, "pick_runners", exact),
        soon(),
        short_windows(),
        links_become(0.03),
    ):
        job = Job(
            seed, DEEP, lambda p: [Summing(p[k::2], lr=0.05) for k in range(2)], 3, 0.1, within=0.2, measured=True,
            race="auto", replan="auto", verify=7, costs=table(0.3), feedback=ErrorFeedback(everywhere=True),
        )  # fmt: skip
        job.run(60)
        clock.factors = {LINKS: 10.0}
        job.run(100)
    return job.found()


@pytest.mark.slow
def test_a_scaler_goes_with_all_at_once():
    found = check(run_ranks(2, all_at_once, 19), 19)
    assert len(found.plans) >= 2
