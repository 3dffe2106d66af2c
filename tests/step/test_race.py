"""Plans race: all ranks take the same turns, nothing owed is lost, and the measured best stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import JOB, compiled, same, table
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters
from helpers.scaled import owed
from helpers.virtual_time import VirtualTime, virtual_time
from torch import Tensor, nn

import fxcomp
from fxcomp.capture.step_capture import StepCapture
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadOption
from fxcomp.options import Checks
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.plan.verified_steps import VerifiedSteps
from fxcomp.search import choose as choosing
from fxcomp.search.choose import uniform
from fxcomp.search.decision import Raced
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.runners import Runner
from fxcomp.step.calendar import Calendar
from fxcomp.step.race import FAR, LONGEST, MOST_AFTER_HEATS, WARM_STEPS, Race

# The race by itself, on numbers


def runner(name: str, predicted_ms: float, loss: float = 0.0) -> Runner:
    strategy = DENSE if name == "dense" else Strategy.parse("compress(int8) > all_gather@world > decompress")
    return Runner(name, Plan((Bucket((name,), (1,), strategy),)), 1e3 * predicted_ms, 0.5, loss)


def raced(*entrants: tuple[Runner, float], **more: Any) -> Raced:
    """The end of a race whose steps take exactly so long, but for what `noise` multiplies them by."""
    noise: Callable[[int], float] = more.get("noise", lambda _: 1.0)
    race = Race([each for each, _ in entrants], WARM_STEPS, Calendar().free_steps)
    while race.result is None:
        ms = entrants[race.turn.number][1]
        race.end_turn([ms * noise(step) for step in race.turn.steps])
    return race.result


def test_the_fastest_stays_whatever_was_predicted():
    found = raced((runner("int8", 10.0), 30.0), (runner("bf16", 14.0), 15.0), (runner("dense", 20.0), 20.0))
    assert found.stays.name == "bf16"
    assert [each.measured_ms for each in found.runners] == [30.0, 15.0, 20.0]


def test_a_tie_goes_to_the_plan_that_loses_less():
    found = raced(
        (runner("int8", 10.0, 1e-4), 19.98), (runner("bf16", 14.0, 1e-6), 19.99), (runner("dense", 20.0), 20.0)
    )
    assert found.stays.name == "dense"


def test_a_slow_runner_is_out_after_its_heat():
    found = raced((runner("int8", 10.0, 1e-4), 10.0), (runner("bf16", 15.0), 18.0), (runner("dense", 20.0), 20.0))
    assert found.stays.name == "int8"
    assert [each.steps for each in found.runners][1:] == [1, 1]
    assert found.share <= 0.01


@pytest.mark.one_in(2)
@pytest.mark.parametrize("times", [0.9 * FAR, 1.1 * FAR, 5.0, 200.0])
def test_a_runner_that_is_predicted_far_from_the_best_does_not_run(times: float):
    slow = [runner(name, 10.0 * times) for name in ("bf16", "dense")]
    found = raced((runner("int8", 10.0, 1e-4), 10.0), *((each, 10.0 * times) for each in slow))
    assert found.stays.name == "int8"
    assert found.share <= 0.01
    assert {each.measured_ms is None for each in found.runners[1:]} == {times > FAR}


def test_the_prediction_of_a_runner_is_compared_with_the_best_measured():
    """int8 takes three times as long as predicted, so dense may still be the best."""
    found = raced((runner("int8", 10.0, 1e-4), 30.0), (runner("dense", 25.0), 25.0))
    assert found.stays.name == "dense"


def test_few_runners_continue_after_their_heats():
    entrants = [(runner(f"int{bits}", 10.0), 10.0 + 0.01 * bits) for bits in range(2, 8)]
    found = raced(*entrants)
    assert sum(each.steps > 2 for each in found.runners) <= MOST_AFTER_HEATS, "two counted steps: a heat and an appeal"
    assert found.last_step - found.first_step <= LONGEST
    assert found.stays.measured_ms == pytest.approx(10.0, rel=0.01)


def test_what_slow_runners_cost_keeps_no_faster_one_from_its_heat():
    slow = (runner("int8", 10.0), 500.0), (runner("int4", 12.0), 400.0)
    found = raced((runner("dense", 20.0), 20.0), *slow, (runner("topk", 14.0), 12.0))
    assert found.stays.name == "topk"


def test_noise_does_not_decide():
    draw = torch.Generator().manual_seed(0)
    factors = (1 + 0.05 * torch.randn(1000, generator=draw)).tolist()
    found = raced(
        (runner("int8", 18.0, 1e-4), 17.0), (runner("bf16", 14.0, 1e-6), 19.0), (runner("dense", 20.0), 20.0),
        noise=factors.__getitem__,
    )  # fmt: skip
    assert found.stays.name == "int8"
    assert found.last_step - found.first_step <= LONGEST


@pytest.mark.one_in(2)
@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("lasts", [1, 2, 4])
def test_a_machine_that_is_disturbed_for_a_moment_does_not_decide(moment: int, lasts: int):
    """Every step of the moment takes three times as long, a whole heat's if it lasts."""
    disturbed = range(WARM_STEPS + moment, WARM_STEPS + moment + lasts)
    found = raced(
        (runner("int8", 16.0, 1e-4), 16.0), (runner("bf16", 18.0, 1e-6), 18.5), (runner("dense", 20.0), 21.0),
        noise=lambda step: 3.0 if step in disturbed else 1.0,
    )  # fmt: skip
    assert found.stays.name == "int8"


def test_what_is_predicted_to_be_far_behind_is_not_heard_again():
    found = raced((runner("int8", 10.0, 1e-4), 10.0), (runner("bf16", 13.0), 30.0), (runner("dense", 12.0), 24.0))
    assert [each.steps for each in found.runners][1:] == [1, 2]


def test_verified_steps_and_steps_that_a_rank_did_not_time_do_not_count():
    seen: list[int] = []
    race = Race([runner("int8", 10.0), runner("dense", 20.0)], WARM_STEPS, Calendar(VerifiedSteps(2)).free_steps)
    while race.result is None:
        seen += race.turn.steps
        race.end_turn([None] * len(race.turn.steps))
    assert all(step % 2 for step in seen)
    assert race.result.last_step <= WARM_STEPS + LONGEST
    assert race.result.winner == 0, "nobody knows better: the plan in force stays"


def test_one_of_several_batches_is_enough():
    race = Race([runner("int8", 10.0), runner("dense", 20.0)], WARM_STEPS, Calendar().free_steps)
    while race.result is None:
        ms = (30.0, 20.0)[race.turn.number]
        race.end_turn([None if step % 3 else ms for step in race.turn.steps])
    assert race.result.stays.name == "dense"


def test_a_bad_option_is_refused():
    with pytest.raises(BadOption, match="race must be 'auto', 'off'; it is 'fast'"):
        Checks(race="fast")


# On real ranks, in virtual time


def trained(gbit: float, factor: float, options: dict[str, Any], steps: int = LONGEST) -> dict[str, Any]:
    """Steps of a job whose compression and decompression take `factor` times what the table says."""
    clock = VirtualTime({"compress": factor, "decompress": factor})
    with virtual_time(clock):
        step = compiled(table(gbit), **{"race": "auto", **options})
        plans, parameters, when_over = [step.plan.digest], [], dict[str, Any]()
        choice = step.in_force.decision.choice
        assert choice is not None
        predicted_us = {each.plan.digest: each.step_us for each in choice.runners}
        for i in range(steps):
            step(JOB.batch(i, dist.get_rank()))
            if step.in_force.is_warm:
                assert step.timeline.step_time_us == pytest.approx(predicted_us[step.plan.digest]), "the plan's own"
            assert ("rac" in " ".join(step.counted_notes)) is step.is_racing
            if step.raced is not None and not when_over:
                when_over = {"source": step.source, "predicted_us": step.timeline.step_time_us}
            if step.plan.digest != plans[-1]:
                plans.append(step.plan.digest)
                parameters.append(flat_parameters(step.training.model).tolist())
    return {
        "raced": step.raced,
        "when_over": when_over,
        "source": step.source,
        "predicted": choice.plan.digest,
        "plans": plans,
        "text": step.explain() if dist.get_rank() == 0 else "",
        "notes": step.notes,
        "plan": step.plan.digest,
        "parameters": [*parameters, flat_parameters(step.training.model).tolist()],
        "rows": {},
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("gbit", "factor"), [(1.5, 0.5), (0.8, 1.0), (0.8, 2.0)], ids=["dear", "right", "cheap"])
def test_the_race_ends_on_the_measured_best_whatever_the_table_says_of_compression(gbit: float, factor: float):
    """The table's compression is twice too dear, right, or twice too cheap."""
    found = same(run_ranks(2, trained, gbit, factor, {}))
    result: Raced = found["raced"]
    known = [each for each in result.runners if each.measured_ms is not None]
    assert len(known) >= 3
    best = min(known, key=lambda each: each.measured_ms or 0.0)
    assert result.stays.measured_ms == pytest.approx(best.measured_ms, rel=0.02)
    assert found["plan"] == result.stays.plan.digest
    assert (result.stays.plan.digest == found["predicted"]) is (factor == 1)
    assert len(found["plans"]) >= len(known)
    assert result.share <= 0.02
    assert "raced" in found["notes"][0]
    assert found["when_over"]["source"] == found["source"], "what is shown is the winner, also before it runs again"
    assert found["when_over"]["predicted_us"] == pytest.approx(result.stays.step_us, rel=0.1)
    for each in known:
        assert each.name in found["text"]


def captures(lengths: int) -> tuple[int, int]:
    """Count the captures of a job with batches of several lengths in a race, and their plans."""
    again, seen = StepCapture.again, list[int]()

    def counted(capture: StepCapture, batch: Any, varying: Mapping[int, frozenset[int]]) -> Any:
        seen.append(len(batch[0]))
        return again(capture, batch, varying)

    with virtual_time(VirtualTime()), patch.object(StepCapture, "again", counted):
        step = compiled(table(0.3), race="auto", within="lossy", verify="never")
        while step.is_racing:
            batch = JOB.batch(step.steps, dist.get_rank())
            step(tuple(t.repeat_interleave(2, 0)[: 2 * len(t) - step.steps % lengths] for t in batch))  # never one row
        assert step.raced is not None
        return len(seen), len(step.raced.runners)


@pytest.mark.slow
def test_plans_that_race_do_not_displace_each_others_captures():
    (found, plans), _ = run_ranks(2, captures, 4)
    assert plans >= 5
    assert found <= 2 * plans + 1, "another length as it is, then any length; 13 where plans displace each other's"


# The books: what was applied and what is owed are the gradients, after every step of a race


def books(cluster: Cluster | None, gbit: float, feedback: ErrorFeedback) -> dict[str, Any]:
    """Measure Σ updates + owed − Σ gradients after each step of a race, in today's learning rates if they count.

    The loss is linear in the parameters, so gradients do not depend on them. In the middle a state is saved; two steps
    later it is loaded again, with the parameters of then. Two steps follow the race, the first of which brings what was
    left out under the plans that lost.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def linear(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return sum((batch[name] * p).sum() for name, p in model.named_parameters())  # pyright: ignore

    def draw(number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * number + rank)
        return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}

    def exact(always: Mapping[str, Plan], _: Any, prices: StepPrices, __: Any) -> tuple[Runner, ...]:
        """Dense, and compressors that all have feedback: what bf16's sums are rounded by is owed by nobody."""
        named = [Strategy.flat(parse_compressor(name)) for name in ("int4", "topk(0.1)")]
        workload, costs, where = prices.workload, prices.costs, prices.cluster
        if where.has_levels:
            named += [Strategy.hierarchical(parse_compressor("topk(0.3)"))]
        plans = [always["dense"], *(uniform(str(strategy), workload, costs, where) for strategy in named)]
        return tuple(Runner(str(plan.buckets[-1]), plan, 1e3, 0.5, 0.1) for plan in plans)

    def rate(step: int) -> float:
        return 0.1 * (step + 1) if feedback.scale_with_lr else 1.0

    model = JOB.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate(0))
    off, plans = [0.0], list[str]()
    with virtual_time(VirtualTime()), patch.object(choosing, "pick_runners", exact):
        step = fxcomp.compile_step(
            model,
            linear,
            optimizer,
            draw(0),
            costs=table(gbit),
            cluster=cluster,
            compress=fxcomp.Compress(feedback=feedback),
            checks=fxcomp.Checks(verify=5),
        )
        start = flat_parameters(model).double()
        due = torch.zeros_like(start)
        saved: tuple[Any, Tensor, Tensor] | None = None
        while step.raced is None or step.steps < step.raced.last_step + 2:
            if step.steps == 7:
                saved = step.state_dict(), due.clone(), flat_parameters(model)
            if len(plans) == 9 and saved is not None:
                step.load_state_dict(saved[0])
                due = saved[1]
                nn.utils.vector_to_parameters(saved[2], model.parameters())
            gradients, lr = draw(len(plans)), rate(step.steps)
            due += lr * torch.cat([gradients[name].flatten() for name, _ in model.named_parameters()]).double()
            optimizer.param_groups[0]["lr"] = lr
            step(gradients)
            optimizer.param_groups[0]["lr"] = rate(step.steps)
            plans.append(step.plan.digest)
            kept = owed(step)
            left = torch.cat([kept[name] for name, _ in model.named_parameters()])
            both = torch.stack([due, left])
            dist.all_reduce(both)
            applied = start - flat_parameters(model).double()
            off.append(((applied + both[1] - both[0] / ranks).abs().max() / due.abs().max()).item())
        return {
            "off": max(off),
            "plans": plans,
            "plan": "",
            "notes": step.notes,
            "parameters": flat_parameters(model).tolist(),
            "rows": {},
            "first": step.raced.first_step,
        }


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("ranks", "cluster", "feedback"),
    [
        (2, None, CLASSIC),
        (4, Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1)), CLASSIC),
        (2, None, ErrorFeedback(scale_with_lr=True)),
    ],
    ids=["flat", "by level", "learning rates that rise"],
)
def test_at_every_switch_of_a_race_nothing_owed_is_lost(ranks: int, cluster: Cluster | None, feedback: ErrorFeedback):
    found = run_ranks(ranks, books, cluster, 0.3, feedback)
    assert max(rank["off"] for rank in found) <= 1e-5
    seen = same(found)
    assert len(set(seen["plans"])) >= 3
    assert seen["first"] == 7 + WARM_STEPS, "a race that was not over begins again where a state was loaded"
