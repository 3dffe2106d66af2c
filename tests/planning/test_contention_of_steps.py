"""Contention is told by how much a network lengthens compute, not by links' errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.graphs import COSTS
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from torch.fx import GraphModule

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cluster.link import Link
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task, simulate
from fxcomp.graph.run_passes import finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.kinds import CollectiveKind, Stream
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.planning.timed_steps import StepMeasurement, contention_of
from fxcomp.search.read_workload import graph_tasks

CLUSTER = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(5.0, 0.2))
SHARED = replace(
    COSTS,
    copy_gb_per_s=None,
    launch_us=1.0,
    processors=Processors(1.0, 1.0),
    transport={
        CollectiveKind.ALL_REDUCE: TransportCost(us=5.0, us_per_mb=800.0),
        CollectiveKind.ALL_GATHER: TransportCost(us=5.0, us_per_mb=800.0),
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
    return StepMeasurement(timeline.step_time_us, 0.0, {"all": timeline.busy_us(Stream.COMPUTE)}, 0.0, None, None)


def measurements(captured: Any, costs: CostTable) -> list[StepMeasurement]:
    graph = dense_step(captured, costs)
    alone = [t for t in graph_tasks(graph) if t.stream is Stream.COMPUTE]
    free = [replace(task, after=()) for task in alone]
    return [measured(tasks) for tasks in (free, list(graph_tasks(graph)))]


@pytest.mark.parametrize("planted", [1.0, 2.0, 3.0])
def test_contention_is_found_and_explains_the_step(captured: Any, planted: float):
    seen = measurements(captured, replace(SHARED, contention=planted))
    found = contention_of(SHARED, dense_step(captured, SHARED), *seen)
    assert found.factor == pytest.approx(planted, rel=0.25)
    assert found.error < 0.06
    again = measurements(captured, replace(SHARED, contention=found.factor))
    for ours, theirs in zip(again, seen, strict=True):
        assert ours.step_us == pytest.approx(theirs.step_us, rel=0.05)


def test_a_step_that_the_host_bounds_is_no_error_of_the_network(captured: Any):
    free, dense = measurements(captured, SHARED)
    host_us = 4 * dense.step_us
    bounded, graph = replace(dense, step_us=host_us), dense_step(captured, SHARED)
    assert contention_of(replace(SHARED, host_us=host_us), graph, free, bounded).error < 0.06
    assert contention_of(SHARED, graph, free, bounded).error > 0.5
