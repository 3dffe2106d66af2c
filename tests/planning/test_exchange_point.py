"""Left to the compiler, the mean stands where the whole job is over sooner, and else the reason is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.frontends.job import Job, load_job
from fxcomp.frontends.what_if import WhatIf, rewritten, what_if
from fxcomp.plan.compress import Compress, Warmup
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import ExchangePoint
from fxcomp.planning import exchange_point
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import Choice, predict_us
from fxcomp.search.exchanged import Exchanged, first_that_pays, job_us, long, stretches

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "mlp.py")
AUTO = Compress(within="aggressive", steps=3000)


def job(make: Any = torch.optim.AdamW, **changes: Any) -> Job:
    known = load_job(EXAMPLE)
    return replace(known, optimizer=make(known.model.parameters(), lr=0.01), **changes)


def asked(of: Job, compress: Compress = AUTO, text: str = "8x1", inter: str = "10mbit") -> Explanation:
    where = Cluster.parse(text, intra=Link(5.0, 12.0), inter=Link.parse(inter))
    return what_if(of, where, WhatIf(device="h100", compress=compress, step_ms=10.0))


def exchanged(found: Explanation) -> Exchanged:
    assert found.choice is not None
    assert found.choice.exchanged is not None
    return found.choice.exchanged


def moved(found: Explanation) -> set[str]:
    return set(found.plan.moved)


def why(found: Explanation) -> str:
    """Find the note on gradients that are exchanged."""
    assert not found.plan.moves_exchange
    (note,) = (note for note in found.notes if note.startswith("aggressive: ranks exchange gradients, because"))
    return note


@pytest.fixture(scope="module")
def slow() -> Explanation:
    return asked(job())


def test_on_a_slow_link_matrices_go_by_cmax_at_the_momentum_and_vectors_as_in_balanced_mode(slow: Explanation):
    for bucket in slow.plan.buckets:
        if bucket.at is ExchangePoint.MOMENTUM:
            assert {str(each) for each in bucket.strategy.compressors} == {"cmax(chunk=8)"}
            assert all(name.endswith("weight") for name in bucket.names)
        else:
            assert {str(each) for each in bucket.strategy.compressors} <= {"bf16"}
    assert {"0.weight", "2.weight"} <= moved(slow)
    assert slow.is_chosen
    assert exchanged(slow).pays


def test_the_job_is_its_warm_up_and_the_rest(slow: Explanation, balanced: Explanation):
    def price(plan: Any) -> float:
        return predict_us(slow.workload, plan, slow.costs, slow.cluster)

    assert balanced.choice is not None
    found, warmup = exchanged(slow), Warmup(int4_steps=600)
    warm, then = stretches(warmup.stages(slow.plan), 3000, price)
    assert (warm.steps, then.steps) == (600, 2400)
    assert {str(c) for b in warm.plan.buckets for c in b.strategy.compressors} <= {"int4", "bf16"}
    assert not warm.plan.moves_exchange
    assert then.step_us == pytest.approx(slow.step_us)
    assert found.momenta_us == pytest.approx(job_us([warm, then]))
    assert found.gradients_us == pytest.approx(3000 * price(balanced.choice.fastest))
    assert found.momenta_us < found.gradients_us


@pytest.fixture(scope="module")
def balanced() -> Explanation:
    return asked(job(), Compress())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", [None, 3000])
@pytest.mark.parametrize("at", ["auto", "gradient"])
@pytest.mark.parametrize("mode", list(Mode))
def test_aggressive_alone_exchanges_momenta_and_balanceds_plan_without_them(
    mode: Mode, at: str, steps: int | None, balanced: Explanation
):
    found = asked(job(), Compress(within=mode.value, at=at, steps=steps))
    compares = mode is Mode.AGGRESSIVE and at == "auto"
    assert found.plan.moves_exchange is (compares and steps is not None)
    assert found.mode == mode.value
    assert any("ranks exchange gradients" in note for note in found.notes) is (compares and steps is None)
    if mode is Mode.AGGRESSIVE and not found.plan.moves_exchange:
        assert found.plan == balanced.plan


def test_what_is_measured_stays_at_the_gradient():
    found = asked(job(), replace(AUTO, measured=True))
    assert not found.plan.moves_exchange
    assert not any("ranks exchange gradients" in note for note in found.notes)


def test_without_the_jobs_length_the_note_says_how_to_give_it():
    assert 'steps= is not given, and whole jobs are compared: pass Compress(within="aggressive", steps=N), on' in why(
        asked(job(), replace(AUTO, steps=None))
    )


@pytest.mark.parametrize("steps", [1, 2999])
def test_a_job_that_is_shorter_than_what_was_measured_exchanges_gradients(steps: int):
    assert f"fewer than 3,000 steps have ended above dense's loss by momenta, and this has {steps:,}" in why(
        asked(job(), replace(AUTO, steps=steps))
    )


def test_a_job_that_is_too_short_exchanges_gradients_and_one_step_more_pays(slow: Explanation, monkeypatch: Any):
    assert exchanged(slow).pays_from == 3000, "no report says that a shorter job pays than is offered"
    monkeypatch.setattr(exchange_point, "LEAST_STEPS", 1)

    def faster(steps: int) -> Explanation:
        return asked(job(), replace(AUTO, steps=steps), inter="30mbit")

    since = exchanged(faster(3000)).pays_from
    assert since is not None
    assert since > 21
    assert f"it pays from {since} steps on" in why(faster(since - 1))
    assert faster(since).plan == faster(3000).plan
    assert "after a warm-up of 20 steps, and the job has 20" in why(asked(job(), replace(AUTO, steps=20)))


def test_a_warm_up_that_is_given_counts(slow: Explanation):
    found = asked(job(), replace(AUTO, warmup=Warmup(dense_steps=50)))
    dense = found.plan.with_strategies([bucket.strategy.uncompressed for bucket in found.plan.buckets]).at_gradients()
    dense_us = predict_us(slow.workload, dense, found.costs, found.cluster)
    assert exchanged(found).momenta_us == pytest.approx(50 * dense_us + 2950 * found.step_us)


class InHalf(nn.Module):
    """Matrices of numbers of 16 bits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.bfloat16()).float()


def in_half() -> Job:
    known = job()
    model = InHalf(known.model)
    return replace(known, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def of_vectors() -> Job:
    model = nn.LayerNorm(64)
    return replace(
        job(), model=model, optimizer=torch.optim.AdamW(model.parameters()), loss_fn=lambda m, batch: m(batch[0]).sum()
    )


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: job(torch.optim.RMSprop), "it keeps no mean of gradients"),
        (lambda: job(torch.optim.SGD), "it keeps no mean of gradients"),
        (lambda: job(lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True)), "several magnitudes"),
        (lambda: job(max_grad_norm=1.0), "does not go with max_grad_norm=: the norm of the mean"),
        (lambda: job(max_grad_value=1.0), "does not go with max_grad_value="),
        (in_half, "is bf16, and momenta are exchanged in f32"),
        (of_vectors, "there is no matrix"),
    ],
)
def test_where_momenta_cannot_be_exchanged_gradients_are_and_the_reason_is_said(make: Any, what: str):
    assert what in why(asked(make()))


def test_residuals_that_know_the_learning_rate_keep_gradients():
    scaled = replace(AUTO, feedback=ErrorFeedback(scale_with_lr=True))
    assert "does not go with ErrorFeedback(scale_with_lr=...)" in why(asked(job(torch.optim.AdamW), scaled))


def test_other_optimizers_of_adams_kind_may():
    assert "2.weight" in moved(asked(job(torch.optim.NAdam)))


def test_what_was_not_measured_at_denses_loss_exchanges_gradients():
    found = asked(job(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)))
    assert "only under Adam's kind of update" in why(found)


def test_on_a_fast_network_nothing_changes():
    found = asked(job(), inter="400gbit")
    assert found.plan.is_dense
    assert why(found)


def test_one_rank_exchanges_nothing():
    found = asked(job(), text="1x1")
    assert not found.plan.moves_exchange
    assert not any("aggressive" in note for note in found.notes)


def test_two_ranks_and_levels_have_ways_too():
    for text in ("2x1", "3x2"):
        found = asked(job(), text=text)
        assert "2.weight" in moved(found)
        found.plan.check_fits(found.cluster)


def test_what_is_pinned_stays_where_it_is():
    found = asked(job(), replace(AUTO, pins={"0.weight": "int8"}))
    assert moved(found) >= {"2.weight"}
    assert "0.weight" not in moved(found)
    (bucket,) = (bucket for bucket in found.plan.buckets if "0.weight" in bucket.names)
    assert str(bucket.strategy.compressor) == "int8"


def test_the_choice_is_data(slow: Explanation):
    assert slow.choice is not None
    assert Choice.from_json(slow.choice.to_json()) == slow.choice


def test_dump_shows_the_same_choice():
    where = Cluster.parse("8x1", intra=Link(5.0, 12.0), inter=Link.parse("10mbit"))
    assert "cmax" in rewritten(job(), where, AUTO).source


def test_the_first_job_that_pays_is_found():
    assert first_that_pays(lambda steps: steps >= 37) == 37
    assert first_that_pays(lambda steps: 1 // steps >= 0) == 1, "no job has no steps"
    assert first_that_pays(lambda steps: steps >= 64) == 64
    assert first_that_pays(lambda _: False) is None


@pytest.mark.parametrize(("us", "text"), [(1.5e6, "1.5 s"), (90e6, "1.5 min"), (7200e6, "2 h")])
def test_times_of_jobs_are_written_in_their_unit(us: float, text: str):
    assert long(us) == text
