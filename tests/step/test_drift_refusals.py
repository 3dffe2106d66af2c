"""A plan that cannot be made again says why; a link's latency and bandwidth are told apart; every line is timed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import JUDGED, compiled, table
from helpers.gathered import gathered
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, linear_step, one_bucket, two_buckets
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks
from helpers.virtual_time import VirtualTime, slower, virtual_time

import fxcomp
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import Link
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption, CannotReplan
from fxcomp.graph.captured import Captured
from fxcomp.graph.lines import TIMED_METHODS, CostKind
from fxcomp.pipeline import Compiler
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.plan import Plan
from fxcomp.step.drift.correct import describe, link_factors, with_links
from fxcomp.step.drift.judge import LEAST_RATIO, Finding, Row, agreed_rows, judge
from fxcomp.step.drift.predicted_costs import Cost, predict_costs
from fxcomp.step.drift.watch import timing_interval

JOB = JOBS["mlp"]
DENSE = "all_reduce@world"
INT8 = "compress(int8)@gpu > all_gather@world > decompress@gpu"
ON_CPU = "reduce_scatter@intra > compress(topk(0.25))@cpu > all_gather@inter > decompress@cpu > all_gather@intra"


def refusals() -> list[str]:
    def asked(**options: Any) -> fxcomp.CompiledStep:
        model = JOB.build()
        given: dict[str, Any] = {"costs": table(2.0), **options}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fxcomp.compile_step(model, cross_entropy, optimizer, JOB.batch(0, dist.get_rank()), **gathered(**given))

    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"plan": "int8"}, CannotReplan),
        ({"replan": "off"}, CannotReplan),
        ({}, CannotReplan),
        ({"plan": "int8", "replan": "auto"}, BadOption),
        ({"replan": "sometimes"}, BadOption),
        ({"verify": 1}, CannotReplan),
        ({"verify": 1, "replan": "auto"}, BadOption),
    ]
    texts: list[str] = []
    for options, expected in cases:
        with pytest.raises(expected) as caught:
            asked(**options).replan()
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_planned_anew_says_why():
    one, other = run_ranks(2, refusals)
    assert one == other
    given, off, early, auto, unknown, verified, never = one
    assert "with plan= and no costs=" in given or "the plan was given" in given
    assert "replan='off'" in off
    assert "too few steps have been timed" in early
    assert "replan='auto' cannot be done here: the plan was given" in auto
    assert verified.startswith("every step is verified")
    assert "replan='auto' cannot be done here: every step is verified" in never
    assert "Checks(verify=2) leaves every other step to time" in never
    assert "replan must be 'off', 'offer', 'auto'; it is 'sometimes'" in unknown


def test_alone_there_is_nothing_to_plan():
    model = JOB.build()
    step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), JOB.batch(0))
    with pytest.raises(CannotReplan, match="one rank"):
        step.replan()


def failing_to_plan(what: str) -> tuple[list[str], bool, str]:
    """Return what is raised where planning again fails on rank 1, whether the plan stays, and the next time's error."""
    clock = VirtualTime(sees_threads=True, factor=slower({(CostKind.COLLECTIVE, ""): 10.0}))
    with virtual_time(clock):
        step = compiled(table(2.0))
        before, costs = step.plan, step.costs
        for i in range(JUDGED):
            step(JOB.batch(i, dist.get_rank()))
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
        ("fxcomp.step.monitor.corrected", "correcting the costs"),
        ("fxcomp.pipeline.Compiler.analyze", "reading the costs"),
        ("fxcomp.planning.decide.Choice.from_json", "reading the choice"),
        ("fxcomp.pipeline.Compiler.emit", "emitting the step"),
        ("fxcomp.state.gradient_state.residual_layout", "emitting the step"),
    ],
)
def test_where_one_rank_cannot_plan_anew_all_keep_their_plan_and_none_hangs(what: str, when: str):
    one, other = run_ranks(2, failing_to_plan, what)
    assert one[0] == [
        f"PeerFailed: rank 1 failed in planning again: {when}: ZeroDivisionError: a mistake of ours",
        "True",
    ]
    assert other[0] == ["ZeroDivisionError: a mistake of ours", "True"]
    assert one[1:] == other[1:]
    assert one[1]


CLUSTER = Cluster(2, 1, intra=Link(1.0, 10.0), inter=Link(100.0, 0.1))


@pytest.mark.parametrize(
    ("latency", "wire"), [(1.0, 4.0), (1.0, 0.25), (6.0, 1.0), (5.0, 3.0)], ids=["wire", "faster", "latency", "both"]
)
def test_a_links_latency_and_bandwidth_are_told_apart(latency: float, wire: float):
    costs, parts = CostTable(), list[tuple[int, float, float]]()
    for size in (1_000, 100_000, 10_000_000):
        alpha_us, whole_us = 200.0, 200.0 + size / 100.0
        parts.append((size, whole_us, latency * alpha_us + wire * (whole_us - alpha_us)))
    finding = Finding(Cost(CostKind.COLLECTIVE, "all_reduce@world", 10_000_000), 1.0, 2.0, tuple(parts))
    assert link_factors(finding, costs, CLUSTER) == pytest.approx((latency, wire), rel=0.16)


@pytest.mark.parametrize("sizes", [(10_000_000,), (1_000, 10_000_000)])
def test_a_collective_that_seems_to_take_no_time_is_corrected_to_the_least_that_is_believed(sizes: tuple[int, ...]):
    """A rank that comes late sees only the end of a collective, and the shortest time of all ranks counts."""
    costs = CostTable()
    rows = [Row(Cost(CostKind.COLLECTIVE, "all_reduce@world", size), 200.0 + size / 100.0, 0.0, 0.0) for size in sizes]
    (finding,) = judge(rows, 200_000.0, 0.01)
    assert finding.ratio == pytest.approx(LEAST_RATIO)
    assert "a rank's link is" in describe(finding, costs, CLUSTER)
    for size in sizes:
        before, after = (
            table.collective_us(CollectiveKind.ALL_REDUCE, Level.WORLD, size, CLUSTER)
            for table in (costs, with_links(costs, [finding], CLUSTER))
        )
        assert 0.0 < after < before


def row(kind: CostKind, predicted: float, first: float | None, second: float | None, what: str = "") -> Row:
    return Row(Cost(kind, what), predicted, first, second)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([row(CostKind.COMPUTE, 100.0, 150.0, 150.0)], [CostKind.COMPUTE]),
        ([row(CostKind.COMPUTE, 100.0, 150.0, 100.0)], []),  # one hiccup
        ([row(CostKind.COMPUTE, 100.0, 150.0, 60.0)], []),  # once up, once down
        ([row(CostKind.COMPUTE, 100.0, 150.0, None)], []),
        ([row(CostKind.PACK, 1.0, 5.0, 5.0)], []),  # nobody would notice in the step
        ([row(CostKind.COMPUTE, 100.0, 110.0, 110.0), row(CostKind.START, 20.0, 9.0, 9.0)], []),  # told apart otherwise
        ([row(CostKind.COMPUTE, 100.0, 100.0, 100.0), row(CostKind.START, 20.0, 90.0, 90.0)], [CostKind.START]),
        ([row(CostKind.COMPUTE, 100.0, 50.0, 50.0)], [CostKind.COMPUTE]),
    ],
)
def test_a_cost_is_wrong_only_twice_in_a_row_and_beyond_the_steps_error(rows: list[Row], found: list[CostKind]):
    assert [finding.cost.kind for finding in judge(rows, 200.0, 0.1)] == found


def test_of_a_collective_the_shortest_counts_of_all_else_the_middle():
    costs = [Cost(CostKind.COLLECTIVE, "all_reduce@world", 8), Cost(CostKind.COMPUTE)]
    mine = [[10.0, 30.0, 30.0, 5.0, 4.0, -1.0], [10.0, 20.0, 50.0, 5.0, 8.0, 9.0], [10.0, 25.0, 40.0, 5.0, 5.0, 7.0]]
    collective, compute = agreed_rows(costs, mine)
    assert (collective.predicted_us, collective.first_us, collective.second_us) == (10.0, 20.0, 30.0)
    assert (compute.predicted_us, compute.first_us, compute.second_us) == (5.0, 5.0, None)


def test_a_cost_is_compared_by_the_ranks_that_have_it_each_with_its_own_prediction():
    costs = [Cost(CostKind.COLLECTIVE, "all_gather@inter", 8), Cost(CostKind.COMPRESS, "int8@gpu"), Cost(CostKind.PACK)]
    nothing = [-1.0, -1.0, -1.0]
    everyone = [
        [*nothing, 10.0, 20.0, 20.0, *nothing],
        [4.0, 8.0, 9.0, 5.0, 10.0, 15.0, *nothing],
        [4.0, 6.0, 7.0, *nothing, *nothing],
    ]
    gather, compress = agreed_rows(costs, everyone)
    assert (gather.predicted_us, gather.first_us, gather.second_us) == (4.0, 6.0, 7.0)
    assert (compress.predicted_us, compress.first_us, compress.second_us) == (10.0, 20.0, 25.0)


BY_FIRST_RANKS = "reduce@intra > compress(int8(block=2))@gpu > all_gather@inter > decompress@gpu > broadcast@intra"


@pytest.mark.parametrize("shape", ["2+1", "1+2", "3+2", "2x2"])
def test_only_ranks_that_hold_something_between_hosts_compare_what_is_done_there(shape: str):
    cluster = Cluster.parse(shape, intra=Link(5.0, 5.0), inter=Link(25.0, 0.125))
    captured = Captured(linear_step(), None, (), False, ("fc.bias", "fc.weight"), (), lambda _: True)
    first_ranks = {group[0] for group in cluster.groups(Level.INTRA)}
    for rank in range(cluster.world_size):
        predicted = predict_costs(Compiler(cluster, rank).emit(captured, one_bucket(BY_FIRST_RANKS), COSTS))
        between = [str(cost) for cost in predicted.costs if "@inter" in cost.what or "int8" in cost.what]
        assert bool(between) is (rank in first_ranks), f"rank {rank} compares {between}"


@pytest.mark.parametrize(("step_us", "every"), [(1e3, 10), (50e3, 6), (1e6, 1)])
def test_short_steps_are_timed_less_often(step_us: float, every: int):
    assert timing_interval(step_us) == every
    assert timing_interval(step_us, works_later=True) == 10, "no line goes aside in a step that is timed"


@pytest.mark.parametrize(
    ("plan", "cluster"),
    [(two_buckets(DENSE, INT8), TWO), (one_bucket(ON_CPU), TWO_BY_TWO), (one_bucket(DENSE), TWO_BY_TWO)],
    ids=["two", "offloaded", "dense"],
)
@pytest.mark.parametrize("commits", [False, True], ids=["", "commits"])
def test_every_line_and_every_task_of_the_prediction_is_known(plan: Plan, cluster: Cluster, commits: bool):
    graph = linear_step(buffer=True, clip=True)
    captured = Captured(graph, None, (), False, ("fc.bias", "fc.weight"), (), lambda _: True)
    program = Compiler(cluster, 0, skip_nonfinite=commits).emit(captured, plan, COSTS)
    predicted = predict_costs(program)
    lines = program.source[program.source.index("def step(") :].splitlines()
    body = "\n".join(line for line in lines if not line.startswith(" " * 8))  # without what is taken back
    silent = ("wait", "d2h", "h2d")
    for method in TIMED_METHODS:
        known = sum(1 for name, _ in predicted.lines if name == method)
        assert known == (0 if method in silent else body.count(f"rt.{method}("))
    assert len(predicted.collectives) == body.count("rt.launch(")
    assert all(collective.wait is not None for collective in predicted.collectives)
    costly = {span.task.name for span in program.timeline.spans if span.task.duration_us > 0}
    assert costly - set(predicted.tasks) <= {name for name in costly if name.startswith(("d2h", "h2d"))}
    assert sum(predicted.predicted_us.values()) > 0


def test_two_costs_that_fell_together_leave_neither_below_nothing():
    """Compute and starts are judged together, and what both gained is booked on one of them."""
    fell = (Row(Cost(CostKind.COMPUTE), 1000.0, 200.0, 200.0), Row(Cost(CostKind.START), 1000.0, 300.0, 300.0))
    (found,) = judge(fell, 2500.0, 0.1)
    assert 0 < found.measured_us < found.predicted_us
