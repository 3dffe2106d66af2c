"""Contention is told by steps on several networks, not by links' errors; the gathering network gathers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.graphs import COSTS
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from torch import Tensor
from torch.fx import GraphModule

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.cluster.cluster import Cluster, Level, Processors
from fxcomp.cluster.link import Link
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, simulate
from fxcomp.graph.run_passes import finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.kinds import CollectiveKind, Stream
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.planning.measure_contention import (
    GATHERED,
    AllGatherStandIn,
    as_slowest,
    contention_of,
    networks,
    summed_bytes,
)
from fxcomp.planning.measure_step import StepMeasurement
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.runtime.transport import NullTransport
from fxcomp.search.read_workload import graph_tasks

CLUSTER = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(5.0, 0.2))
SHARED = replace(
    COSTS,
    copy_gb_per_s=None,
    launch_us=1.0,
    processors=Processors(1.0, 1.0),
    transport={
        CollectiveKind.ALL_REDUCE: TransportCost(us=5.0, us_per_mb=800.0),
        CollectiveKind.ALL_GATHER: TransportCost(us=5.0, us_per_mb=800.0, speed=0.9),
    },
)


@pytest.fixture(scope="module")
def captured() -> Any:
    model = JOBS["mlp"].build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return capture(Training.of(model, cross_entropy, optimizer), JOBS["mlp"].batch(0))


def dense_step(captured: Any, costs: CostTable) -> GraphModule:
    """Two buckets, so that the first one's collective has compute beside it."""
    gradients = Compiler(CLUSTER).analyze(captured.graph, costs).gradients
    halves = gradients[:2], gradients[2:]
    buckets = [
        Bucket(tuple(g.name for g in half), tuple(g.elements for g in half), Strategy.flat(None)) for half in halves
    ]
    return finished(Compiler(CLUSTER, 0).emit(captured, Plan(tuple(buckets)), costs)).graph


def measured(tasks: list[Task] | tuple[Task, ...]) -> StepMeasurement:
    """A step that takes what these tasks are predicted to."""
    timeline = simulate(tasks, SHARED.processors)
    return StepMeasurement(timeline.step_time_us, 0.0, {"all": timeline.busy_us(Stream.COMPUTE)}, 0.0, None, None, {})


def as_gathers(graph: GraphModule, costs: CostTable) -> list[Task]:
    summed, tasks = summed_bytes(graph), []
    for task in graph_tasks(graph):
        if task.name in summed:
            what = CollectiveKind.ALL_GATHER, Level.WORLD, summed[task.name] / GATHERED, CLUSTER
            price = costs.collective(*what)
            task = replace(task, duration_us=price.us, load=price.load, overlap_speed=price.overlap_speed)
        tasks.append(task)
    return tasks


def measurements(captured: Any, costs: CostTable) -> list[StepMeasurement]:
    graph = dense_step(captured, costs)
    alone = [t for t in graph_tasks(graph) if t.stream is Stream.COMPUTE]
    free = [replace(task, after=()) for task in alone]
    return [measured(tasks) for tasks in (free, list(graph_tasks(graph)), as_gathers(graph, costs))]


@pytest.mark.parametrize("planted", [1.0, 2.0, 3.0])
def test_contention_is_found_and_explains_both_steps(captured: Any, planted: float):
    seen = measurements(captured, replace(SHARED, contention=planted))
    found = contention_of(SHARED, dense_step(captured, SHARED), CLUSTER, seen)
    assert found.factor == pytest.approx(planted, rel=0.25)
    assert found.error < 0.06
    again = measurements(captured, replace(SHARED, contention=found.factor))
    for ours, theirs in zip(again, seen, strict=True):
        assert ours.step_us == pytest.approx(theirs.step_us, rel=0.05)


def test_the_larger_of_both_errors_is_told(captured: Any):
    free, dense, gathered = measurements(captured, SHARED)
    longer = replace(gathered, step_us=3 * gathered.step_us)
    found = contention_of(SHARED, dense_step(captured, SHARED), CLUSTER, [free, dense, longer])
    assert found.error > 0.3


def test_a_step_that_the_host_bounds_is_no_error_of_the_network(captured: Any):
    free, dense, gathered = measurements(captured, SHARED)
    host_us = 4 * gathered.step_us
    seen = [free, *(replace(each, step_us=host_us) for each in (dense, gathered))]
    graph = dense_step(captured, SHARED)
    assert contention_of(replace(SHARED, host_us=host_us), graph, CLUSTER, seen).error < 0.06
    assert contention_of(SHARED, graph, CLUSTER, seen).error > 0.5


def test_gathers_are_run_only_where_processors_are_shared(captured: Any):
    graph, somewhere = dense_step(captured, SHARED), NullTransport()
    assert [type(each) for each in networks(graph, somewhere, SHARED.processors, CLUSTER)] == [
        NullTransport,
        NullTransport,
        AllGatherStandIn,
    ]
    spare = replace(SHARED, processors=Processors(2.0, 1.0))
    assert len(networks(graph, somewhere, spare.processors, CLUSTER)) == 2


class Recording(NullTransport):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Any:
        self.calls.append((f"sum or max, {level}", value.numel(), 0))
        return super().all_reduce(value, level, lane, how)

    def start(self, transfer: Transfer) -> Any:
        if transfer.pattern is Pattern.ALL_GATHER:
            self.calls.append((f"gather, {transfer.level}", transfer.value.numel(), transfer.out.numel()))
        return super().start(transfer)


def test_only_sums_over_all_ranks_are_sent_as_gathers():
    network = Recording()
    gathers = AllGatherStandIn(network, ranks=3)
    bucket = torch.arange(10.0)
    gathers.all_reduce(bucket, "world", "main").wait()
    gathers.all_reduce(torch.ones(2), "world", "main").wait()
    gathers.all_reduce(torch.ones(8), "world", "main", "max").wait()
    gathers.all_reduce(torch.ones(8), "intra", "main").wait()
    assert network.calls == [
        ("gather, world", 2, 6),
        ("gather, world", 1, 3),
        ("sum or max, world", 8, 0),
        ("sum or max, intra", 8, 0),
    ]
    assert bucket.tolist() == list(range(10)), "the step's own values stay"


def test_what_else_a_step_sends_goes_its_own_way():
    runtime = Runtime(AllGatherStandIn(NullTransport(), ranks=2), torch.device("cpu"))
    value = torch.arange(4.0)
    kinds = {"all_gather": 2, "reduce_scatter": 2, "all_to_all": (1, 3), "reduce": (4, 0), "broadcast": 1}
    found = {kind: runtime.wait(runtime.launch(kind, kind, value, cut, "world")) for kind, cut in kinds.items()}
    assert {kind: result.tolist() for kind, result in found.items()} == {
        "all_gather": [0.0, 1.0, 2.0, 3.0] * 2,
        "reduce_scatter": [0.0, 1.0],
        "all_to_all": [0.0, 0.0],
        "reduce": [0.0, 1.0, 2.0, 3.0],
        "broadcast": [0.0, 1.0, 2.0, 3.0],
    }


def test_a_network_that_would_need_memory_of_its_own_is_left_out(captured: Any):
    many = Cluster(1 << 16, 1, intra=Link(5.0, 5.0), inter=Link(5.0, 0.2))
    assert len(networks(dense_step(captured, SHARED), NullTransport(), SHARED.processors, many)) == 2


def test_all_measurements_are_those_of_the_rank_that_computes_the_longest():
    def one(step_us: float, compute_us: float) -> StepMeasurement:
        return StepMeasurement(step_us, 0.0, {"a": 0.6 * compute_us, "b": 0.2 * compute_us}, 0.2 * compute_us, 5, 1, {})

    everyone = [[[110.0, 100.0], [420.0, 120.0]], [[310.0, 300.0], [400.0, 330.0]]]
    for here in ([one(110.0, 100.0), one(420.0, 120.0)], [one(310.0, 300.0), one(400.0, 330.0)]):
        alone, dense = as_slowest(here, everyone)
        assert (alone.compute_us, dense.compute_us) == (pytest.approx(300.0), pytest.approx(330.0))
        assert (alone.step_us, dense.step_us) == (310.0, 420.0)
        assert alone.region_us == pytest.approx({"a": 180.0, "b": 60.0})
