"""A running step whose exchange point is left to the compiler: all ranks choose alike, warm up, and say so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks, try_ranks
from helpers.replicas import replica_fingerprint

import fxcomp
from fxcomp.cluster.link import Link
from fxcomp.errors import BadOption, CannotReplan
from fxcomp.options import StepOptions

JOB = JOBS["mlp"]
SLOW = fxcomp.Cluster.parse("3x1", intra=Link(5.0, 12.0), inter=Link.parse("1mbit"))
WARM, STEPS = 5, 9


def compiled(make: Any, steps: int | None = 3000, **options: Any) -> tuple[torch.nn.Module, fxcomp.CompiledStep]:
    model = JOB.build()
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        make(model.parameters(), lr=0.01),
        JOB.batch(0, dist.get_rank()),
        compress=fxcomp.Compress(within="aggressive", steps=steps, warmup=fxcomp.Warmup(int8_steps=WARM)),
        cluster=SLOW,
        costs=fxcomp.CostTable(),
        **options,
    )
    return model, step


def trained() -> dict[str, Any]:
    model, step = compiled(torch.optim.AdamW, checks=fxcomp.Checks(verify=3))
    digests = [step.plan.digest]
    for i in range(STEPS):
        step(JOB.batch(i, dist.get_rank()))
        digests.append(step.plan.digest)
    reason = ""
    try:
        step.replan()
    except CannotReplan as error:
        reason = str(error)
    return {
        "digests": digests,
        "moved": step.plan.moved,
        "racing": step.is_racing or step.raced is not None,
        "fingerprint": replica_fingerprint(model),
        "report": step.explain(),
        "replan": reason,
    }


def test_ranks_choose_alike_warm_up_and_exchange_momenta():
    results = run_ranks(3, trained)
    first = results[0]
    assert all(each["digests"] == first["digests"] for each in results)
    assert len({each["fingerprint"] for each in results}) == 1
    changes = [k for k in range(1, len(first["digests"])) if first["digests"][k] != first["digests"][k - 1]]
    assert changes[0] == WARM + 1, "the plan of momenta is entered by the step after the warm-up"
    assert first["moved"]
    assert first["racing"], "beside bf16, which test_race_at_momenta.py is about"
    assert "at the momentum" in first["report"]
    assert "chosen for the whole job" in first["replan"]


def said(make: Any, **options: Any) -> tuple[str, tuple[str, ...]]:
    _, step = compiled(make, **options)
    return "\n".join(step.in_force.decision.notes), step.plan.moved


@pytest.mark.parametrize(
    ("make", "options", "what"),
    [
        (partial(torch.optim.Adam, amsgrad=True), {}, "several magnitudes"),
        (torch.optim.AdamW, {"max_grad_norm": 1.0}, "max_grad_norm="),
        (torch.optim.AdamW, {"steps": 5}, "fewer than 3,000 steps"),
        (torch.optim.AdamW, {"steps": None}, "steps= is not given"),
    ],
)
def test_where_it_may_not_or_does_not_pay_ranks_exchange_gradients_and_say_why(make, options, what):
    for notes, moved in run_ranks(3, partial(said, make, **options)):
        assert moved == ()
        assert "aggressive: ranks exchange gradients, because" in notes
        assert what in notes


def of_other_lengths() -> None:
    compiled(torch.optim.AdamW, steps=3000 + dist.get_rank())


def test_jobs_of_other_lengths_are_told_apart():
    assert all("steps" in outcome.text for outcome in try_ranks(3, of_other_lengths))


def test_a_choice_for_the_whole_job_is_not_made_again():
    with pytest.raises(BadOption, match=r'(?s)has chosen for the whole job.*pass at="gradient"'):
        StepOptions(compress=fxcomp.Compress(within="aggressive", steps=100), checks=fxcomp.Checks(replan="auto"))


def alone() -> tuple[int, str]:
    model = JOB.build()
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        torch.optim.AdamW(model.parameters()),
        JOB.batch(0),
        compress=fxcomp.Compress(within="aggressive", steps=100),
    )
    step(JOB.batch(0))
    return len(step.plan.buckets), step.explain()


def test_one_rank_trains_as_ever():
    ((buckets, report),) = run_ranks(1, alone)
    assert buckets == 0
    assert "one rank: nothing to communicate" in report.lower()
