"""A cost that has become wrong is named, and all ranks plan again alike; with nothing wrong nothing is said."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import EVERY, JOB, JUDGED, POINTS, WINDOW, compiled, same, table
from helpers.jobs import JOBS, cross_entropy
from helpers.judged import plans_made
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters
from helpers.virtual_time import VirtualTime, no_surprise, scheduled, slower, virtual_time
from torch import Tensor, nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.codegen.program import Program
from fxcomp.compressors import parse_compressor
from fxcomp.cost.table import CostTable
from fxcomp.graph.lines import CostKind
from fxcomp.plan.strategy import Strategy
from fxcomp.step.drift.predicted_costs import predict_costs


def train(
    costs: CostTable,
    factors: dict[Any, float],
    steps: int,
    options: dict[str, Any],
    seen: bool = True,
    jitter: float = 0.0,
    surprise: Callable[[Program], float] = no_surprise,
) -> dict[str, Any]:
    """Steps in which `factors` hold from the first comparison on, until the costs have been put right.

    A whole step takes so many times longer than its lines explain as `surprise` says.
    """
    clock = VirtualTime(sees_threads=seen, jitter=jitter, surprise=surprise)
    with virtual_time(clock):
        step = compiled(costs, **options)
        before, sources = step.plan, [step.source]
        first = predict_costs(step.in_force.program).predicted_us
        for i in range(steps):
            clock.factor = slower(factors if i >= JUDGED and not plans_made(step) else {})
            step(JOB.batch(i, dist.get_rank()))
        text = step.explain()
    return {
        "notes": step.notes,
        "before": before.is_dense,
        "plan": step.plan.digest,
        "is dense": step.plan.is_dense,
        "compressed": "rt.compress" in step.source,
        "sources": [*sources, step.source],
        "parameters": flat_parameters(step.training.model).tolist(),
        "text": text,
        "costs": step.costs,
        "first": {str(cost): us for cost, us in first.items()},
        "rows": {str(row.cost): (row.predicted_us, row.second_us) for row in step.monitor.timed},
    }


WIRE = {(CostKind.COLLECTIVE, ""): 10.0}
AUTO = {"replan": "auto"}


@pytest.mark.parametrize(("ranks", "seen"), [(2, False), (3, True)], ids=["ends at waits", "told of ends"])
@pytest.mark.one_in(2)
def test_a_link_that_becomes_slower_is_named_and_all_ranks_plan_anew(ranks: int, seen: bool):
    found = same(run_ranks(ranks, train, table(2.0), WIRE, 5 * JUDGED, AUTO, seen))
    assert (found["before"], found["is dense"], found["compressed"]) == (True, False, True)
    assert len(found["notes"]) == 2, "what was put right is not found again"
    assert "all_reduce@world" in found["notes"][0]
    times = re.search(r"takes (\S+) x what the table says", found["notes"][0])
    assert times is not None
    assert float(times[1]) == pytest.approx(10.0, rel=0.05)
    assert "mbit, not 2gbit" in found["notes"][0]
    assert found["notes"][1].startswith("planned again at step ")
    assert "another plan is followed" in found["notes"][1]
    speeds = [8 * fit.gb_per_s(kind) for (kind, _), fit in found["costs"].collectives.items() if fit.ranks == ranks]
    assert all(speed == pytest.approx(0.2, rel=0.03) for speed in speeds[:4]), "of every collective over that link"


def test_a_link_that_becomes_faster_lets_compression_go_and_what_was_left_out_arrives():
    found = same(run_ranks(2, train, table(0.2), {(CostKind.COLLECTIVE, ""): 0.05}, 5 * JUDGED, AUTO))
    assert (found["before"], found["is dense"], found["compressed"]) == (False, True, False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verify", [2, EVERY * WINDOW])
def test_drift_is_seen_between_steps_that_are_verified(verify: int):
    """Every timed step would be a verified one, if it were the first of each `EVERY`."""
    found = same(run_ranks(2, train, table(2.0), WIRE, 3 * JUDGED, {**AUTO, "verify": verify}))
    assert "all_reduce@world" in found["notes"][0]
    assert found["notes"][1].startswith(f"planned again at step {2 * JUDGED}")


def reported(verify: int) -> str:
    return " ".join(compiled(table(2.0), verify=verify).explain().split())


def test_where_every_step_is_verified_the_report_says_that_none_is_timed():
    assert all("every step is verified, so none is timed" in text for text in run_ranks(2, reported, 1))
    assert not any("every step is verified" in text for text in run_ranks(2, reported, 2))


COMPRESSING = {(CostKind.COMPRESS, "int4@gpu"): 40.0}
COMPUTE = {(CostKind.COMPUTE, ""): 8.0, (CostKind.UPDATE, ""): 8.0}


def test_a_compressor_that_becomes_slower_is_named_and_replaced():
    found = same(run_ranks(2, train, table(0.2), COMPRESSING, 5 * JUDGED, AUTO))
    assert "compressing int4@gpu takes 40 x what the table says" in found["notes"][0]
    assert found["compressed"]
    assert "int4," not in found["sources"][1], "another compressor does it"
    points = found["costs"].compressors["int4@gpu"].points
    assert [point.encode_us for point in points] == pytest.approx([40 * point.encode_us for point in POINTS])
    assert [point.decode_us for point in points] == [point.decode_us for point in POINTS]


def test_compute_that_becomes_slower_is_named_and_put_right():
    found = same(run_ranks(2, train, table(0.2), COMPUTE, 5 * JUDGED, AUTO))
    assert "updates takes 8 x what the table says" in found["notes"][0]
    assert "compute takes 8 x what the table says" in found["notes"][0]
    for what in ("compute", "updates"):
        predicted, measured = found["rows"][what]
        assert predicted == pytest.approx(8 * found["first"][what])
        assert measured == pytest.approx(predicted)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_with_nothing_wrong_nothing_is_said(jitter: float):
    found = same(run_ranks(2, train, table(0.2), {}, 6 * JUDGED, AUTO, True, jitter))
    assert found["notes"] == []
    assert len(found["rows"]) > 5


# The books: what was applied and what is left out are the gradients, whatever plan was followed when


def books(mode: str, gbit: float, factor: float, commits: bool) -> tuple[float, bool, str]:
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

    clock = VirtualTime(sees_threads=True)
    with virtual_time(clock):
        step = fxcomp.compile_step(
            model,
            linear,
            optimizer,
            draw(0),
            costs=table(gbit),
            skip_nonfinite=commits,
            compress=mode,
            checks=fxcomp.Checks(replan="auto", race="off", verify=5),
        )
        scheduled(step, EVERY, WINDOW)
        start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        due = {name: torch.zeros_like(value) for name, value in start.items()}
        plans, owed = [step.plan], False
        for i in range(3 * JUDGED):
            clock.factor = slower({(CostKind.COLLECTIVE, ""): factor} if i >= 4 and not plans_made(step) else {})
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
    return worst, owed, step.notes[1]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("commits", [False, True], ids=["", "a step is left out"])
@pytest.mark.parametrize(
    ("ranks", "mode", "gbit", "factor", "owes"),
    [(2, "balanced", 0.2, 0.05, True), (3, "balanced", 0.2, 0.05, True), (2, "lossy", 0.5, 8.0, False)],
    ids=["two, to dense", "three, to dense", "two, to less"],
)
def test_over_a_change_of_plan_nothing_is_lost(
    ranks: int, mode: str, gbit: float, factor: float, owes: bool, commits: bool
):
    for worst, owed, note in run_ranks(ranks, books, mode, gbit, factor, commits):
        assert worst <= 2e-5
        assert owed is owes
        assert "another plan is followed" in note


def watched_by_level() -> bool:
    """Compile a plan whose shards are of uneven sizes; tell whether ranks have something to compare."""
    cluster = Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1))
    job = JOBS["mlp"]
    model = job.build()
    plan = plan_in_turns(model, [Strategy.hierarchical(parse_compressor("topk(0.05)"))], per_bucket=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = job.batch(0, dist.get_rank())
    step = fxcomp.compile_step(model, cross_entropy, optimizer, batch, costs=table(2.0), cluster=cluster, compress=plan)
    return step.monitor.watch is not None


def test_ranks_with_uneven_shards_compare_the_same_costs():
    assert run_ranks(4, watched_by_level) == [True] * 4


def slower_between_hosts_that_differ(factors: dict[Any, float]) -> dict[str, Any]:
    """Go by the hosts' first ranks: rank 1 of three sends nothing between hosts, and compresses nothing."""
    steps = "reduce@intra > compress(int8)@gpu > all_gather@inter > decompress@gpu > broadcast@intra"
    cluster = Cluster.parse("2+1", intra=Link(5.0, 5.0), inter=Link(50.0, 0.02))
    plan = plan_in_turns(JOB.build(), [Strategy.parse(steps)], per_bucket=3)
    return train(table(2.0), factors, 3 * JUDGED, {"plan": plan, "cluster": cluster})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "what", "said"),
    [
        (CostKind.COLLECTIVE, "all_gather@inter", "all_gather@inter of up to .* takes 40 x"),
        (CostKind.COMPUTE, "", None),
    ],
    ids=["link", "nothing"],
)
def test_where_hosts_differ_each_cost_is_judged_by_the_ranks_that_have_it(kind: CostKind, what: str, said: str | None):
    found = same(run_ranks(3, slower_between_hosts_that_differ, {(kind, what): 40.0 if said else 1.0}))
    if said is None:
        assert not found["notes"]
    else:
        assert len(found["notes"]) == 1
        assert re.search(said, found["notes"][0])
