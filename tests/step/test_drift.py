"""Steps that come to take another time are noticed by all ranks at once, which measure links again and plan alike."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import JOB, WINDOW, compiled, links_become, same, short_windows, table
from helpers.gathered import gathered
from helpers.jobs import OPTIMIZERS, cross_entropy
from helpers.judged import plans_made
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters
from helpers.virtual_time import LINKS, VirtualTime, virtual_time
from torch import Tensor, nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.errors import BadOption, CannotReplan
from fxcomp.planning import measure_machine
from fxcomp.planning.measure_machine import with_links_of_now
from fxcomp.site import Site
from fxcomp.step.calendar import WINDOW as FULL
from fxcomp.step.drift import FACTOR, Window, drift_since, median_of_window, size_for

AUTO = {"replan": "auto"}

# The rule


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Window(41.234, 4096, 5e3), "steps take 41.23 ms, and took 20"),
        (Window(7.0, 4096, 5e3), "steps take 7 ms, and took 20"),
        (Window(24.0, 4096, 5e3), None),
        (Window(17.0, 4096, 5e3), None),
        (Window(20.0, 4096, 2.4e3), "all_reduces of 4 KiB take 2.4 ms, and took 5"),
        (Window(20.0, 4096, 2.6e3), None),
        (Window(20.0, 4096, 50e3), None),
        (Window(41.0, 4096, 1e3), "steps take 41 ms, and took 20"),
    ],
    ids=["slower", "faster", "a little slower", "a little faster", "links", "links a little", "slow links", "both"],
)
def test_steps_that_change_by_more_than_the_factor_and_faster_links_are_drift(now: Window, said: str | None):
    drift = drift_since(300, Window(20.0, 4096, 5e3), now)
    assert drift == ("" if said is None else f"step 300: {said} when their plan was settled.")


@pytest.mark.parametrize(
    ("step_ms", "small_us", "size"),
    [(100.0, 15e3, 64 << 10), (50.0, 15e3, 32 << 10), (1e3, 100.0, 4 << 20), (0.05, 1e6, 4)],
)
def test_the_all_reduce_takes_a_share_of_a_step(step_ms: float, small_us: float, size: int):
    assert size_for(step_ms, small_us) == size


@pytest.mark.parametrize("now_ms", [16.1, 24.9])
def test_windows_without_an_all_reduce_are_compared_by_step_times(now_ms: float):
    assert drift_since(300, Window(20.0), Window(now_ms)) == ""
    assert drift_since(300, Window(20.0), Window(2 * now_ms)) != ""


def test_noise_and_a_moment_that_is_shorter_than_half_a_window_do_not_move_the_median():
    calm = [20.0 + 7 * step % 5 for step in range(FULL)]
    disturbed = [10 * ms if step < FULL // 3 else ms for step, ms in enumerate(calm)]
    assert median_of_window(disturbed) < FACTOR * median_of_window(calm)
    assert median_of_window(calm[: FULL // 10 - 1]) == -1.0


# On real ranks, in virtual time


def train(factor: float, gbit: float, windows: int, options: dict[str, Any]) -> dict[str, Any]:
    """Links take `factor` times as long from the third window on, and are measured at `gbit` then."""
    clock = VirtualTime()
    with virtual_time(clock), short_windows(), links_become(gbit):
        step = compiled(table(2.0), **options)
        before = step.plan
        for i in range(windows * WINDOW):
            is_slow = i >= 2 * WINDOW and (options["replan"] != "auto" or not plans_made(step))
            clock.factors = {LINKS: factor if is_slow else 1.0}
            step(JOB.batch(i, dist.get_rank()))
        calendar = step.in_force.calendar
    return {
        "notes": step.notes,
        "before": before.is_dense,
        "plan": step.plan.digest,
        "is dense": step.plan.is_dense,
        "compressed": "rt.compress" in step.source,
        "parameters": flat_parameters(step.training.model).tolist(),
        "patience": (calendar.patience, calendar.patient_until),
        "rows": {},
    }


def test_links_that_become_slow_are_measured_again_and_all_ranks_follow_another_plan():
    found = same(run_ranks(2, train, 10.0, 0.2, 8, AUTO))
    drift, planned = found["notes"]
    assert drift.startswith(f"step {3 * WINDOW}: steps take ")
    assert planned.startswith(f"planned again at step {3 * WINDOW}: summing all gradients takes ")
    assert "another plan is followed" in planned
    assert (found["before"], found["is dense"], found["compressed"]) == (True, False, True)
    assert found["patience"][0] == 1


def measured_now() -> tuple[bool, list[str]]:
    """Let a job measure its own links; tell which costs have changed."""
    step = compiled(table(0.001))
    before = step.costs
    step.replan()
    changed = [name for name in before.to_json() if before.to_json()[name] != step.costs.to_json()[name]]
    return all(fit.source != "assumed" for fit in step.costs.collectives.values()), changed


@pytest.mark.slow
def test_the_links_of_the_running_job_are_measured_and_all_other_costs_stay():
    one, other = run_ranks(2, measured_now)
    assert one == other
    assert one[0]
    assert set(one[1]) <= {"collectives", "transport"}


def test_measuring_again_replaces_links_alone(monkeypatch: pytest.MonkeyPatch):
    old, new = table(2.0, launch_us=50.0), table(0.2, launch_us=1.0)
    links = {"collectives": new.collectives, "launch_us": new.launch_us}
    monkeypatch.setattr(measure_machine, "_links", lambda *_: links)
    found = with_links_of_now(old, cast(Site, None))
    assert found.collectives == new.collectives
    assert found.launch_us == 50.0, "as measured in the step"


# Refusals


def refusals() -> list[str]:
    def asked(**options: Any) -> fxcomp.CompiledStep:
        model = JOB.build()
        given: dict[str, Any] = {"costs": table(2.0), **options}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fxcomp.compile_step(model, cross_entropy, optimizer, JOB.batch(0, dist.get_rank()), **gathered(**given))

    cluster = Cluster(2, 1, intra=Link(1.0, 10.0), inter=Link(100.0, 0.1))
    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"plan": "int8"}, CannotReplan),
        ({"cluster": cluster, "race": "off"}, CannotReplan),
        ({"plan": "int8", "replan": "auto"}, BadOption),
        ({"replan": "sometimes"}, BadOption),
        ({"verify": 1}, CannotReplan),
        ({"verify": 1, "replan": "auto"}, BadOption),
        ({"cluster": cluster, "replan": "auto"}, BadOption),
    ]
    texts: list[str] = []
    for options, expected in cases:
        with pytest.raises(expected) as caught:
            asked(**options).replan()
        texts.append(str(caught.value))
    return texts


def test_a_plan_that_cannot_be_made_again_says_why():
    one, other = run_ranks(2, refusals)
    assert one == other
    given, where, auto, unknown, verified, never, fixed = one
    assert "the plan was given" in given
    assert "the links of a given cluster are not measured" in where
    assert "replan='auto' cannot be done here: the plan was given" in auto
    assert verified.startswith("every step is verified")
    assert "replan='auto' cannot be done here: every step is verified" in never
    assert "Checks(verify=2) leaves every other step to time" in never
    assert "replan must be 'off', 'offer', 'auto'; it is 'sometimes'" in unknown
    assert "replan='auto' cannot be done here: the cluster was given" in fixed


def test_alone_there_is_nothing_to_plan():
    model = JOB.build()
    step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), JOB.batch(0))
    with pytest.raises(CannotReplan, match="one rank"):
        step.replan()


def reported(verify: int) -> str:
    return " ".join(compiled(table(2.0), verify=verify).explain().split())


def test_where_every_step_is_verified_the_report_says_that_none_is_timed():
    assert all("every step is verified, so none is timed" in text for text in run_ranks(2, reported, 1))
    assert not any("every step is verified" in text for text in run_ranks(2, reported, 2))


def failing_to_plan(what: str) -> tuple[list[str], bool, str]:
    """Return what is raised where planning again fails on rank 1, whether the plan stays, and the next time's error."""
    with links_become(0.2):
        step = compiled(table(2.0))
        before, costs = step.plan, step.costs
        step(JOB.batch(0, dist.get_rank()))
        fails = dist.get_rank() == 1

        def planned() -> str:
            try:
                return str(step.replan())
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        with patch(what, side_effect=ZeroDivisionError("a mistake of ours")) if fails else nullcontext():
            failed = planned()
        stays = step.plan == before and step.costs == costs
        step(JOB.batch(0, dist.get_rank()))
        return [failed, planned()], stays, step.plan.digest


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("fxcomp.pipeline.Compiler.analyze", "reading the costs"),
        ("fxcomp.planning.decide.Choice.from_json", "reading the choice"),
        ("fxcomp.pipeline.Compiler.emit", "emitting the step"),
        ("fxcomp.state.gradient_state.residual_layout", "emitting the step"),
    ],
)
def test_where_one_rank_cannot_plan_again_all_keep_their_plan_and_none_hangs(what: str, when: str):
    one, other = run_ranks(2, failing_to_plan, what)
    assert one[0] == [
        f"PeerFailed: rank 1 failed in planning again: {when}: ZeroDivisionError: a mistake of ours",
        "True",
    ]
    assert other[0] == ["ZeroDivisionError: a mistake of ours", "True"]
    assert one[1:] == other[1:]
    assert one[1]


# The books: what was applied and what is left out are the gradients, whatever plan was followed when


def books(mode: str, gbit: float, becomes: float, commits: bool) -> tuple[float, bool, str]:
    """Return the distance of Σ mean + mean residual from Σ gradients after a change of plan, and what the notes say.

    The loss is linear in the parameters, so that gradients do not depend on them.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = JOB.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def linear(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return sum((batch[name] * p).sum() for name, p in model.named_parameters())  # pyright: ignore

    def draw(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}

    with links_become(becomes):
        step = fxcomp.compile_step(
            model,
            linear,
            optimizer,
            draw(0),
            costs=table(gbit),
            skip_nonfinite=commits,
            compress=mode,
            checks=fxcomp.Checks(race="off", verify=5),
        )
        start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        due = {name: torch.zeros_like(value) for name, value in start.items()}
        plans, owed = [step.plan], False
        for i in range(24):
            if i == 12:
                step.replan()
            gradients = draw(i)
            owed = owed or bool(step.in_force.runtime.gradients.owed)
            if commits and plans[-1] != step.plan:  # the first step of a plan is left out
                gradients["0.weight"][0, 0] = math.nan
            else:
                for name, gradient in gradients.items():
                    due[name] += 0.1 * gradient.double()
            plans.append(step.plan)
            step(gradients)
    changes = list(dict.fromkeys(map(str, plans)))
    assert len(changes) == 2, [len(changes), step.notes, changes]
    is_exact = [[all(c.needs_error_feedback for c in b.strategy.compressors) for b in p.buckets] for p in plans]
    exact = [{n for b, keeps in zip(p.buckets, kept, strict=True) if keeps for n in b.names}
             for p, kept in zip(plans, is_exact, strict=True)]  # fmt: skip
    worst = 0.0
    for name in sorted(set.intersection(*exact)):  # what is rounded without feedback is lost, whatever plan follows
        parameter = dict(model.named_parameters())[name]
        left = torch.zeros(parameter.numel())
        for piece in step.in_force.state.residuals.slices.get(name, ()):
            piece.add_to(left)
        both = torch.stack([due[name].flatten(), left.double()])
        dist.all_reduce(both)
        applied = (start[name] - parameter.detach().double()).flatten()
        off = applied + 0.1 * both[1] - both[0] / ranks
        worst = max(worst, off.abs().max().item() / due[name].abs().max().item())
    return worst, owed, step.notes[-1]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("commits", [False, True], ids=["", "a step is left out"])
@pytest.mark.parametrize(
    ("ranks", "mode", "gbit", "becomes", "owes"),
    [(2, "balanced", 0.2, 4.0, True), (3, "balanced", 0.2, 4.0, True), (2, "lossy", 0.5, 0.06, False)],
    ids=["two, to dense", "three, to dense", "two, to less"],
)
def test_over_a_change_of_plan_nothing_is_lost(
    ranks: int, mode: str, gbit: float, becomes: float, owes: bool, commits: bool
):
    for worst, owed, note in run_ranks(ranks, books, mode, gbit, becomes, commits):
        assert worst <= 2e-5
        assert owed is owes
        assert "another plan is followed" in note
