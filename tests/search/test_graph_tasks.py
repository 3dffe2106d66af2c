"""The search's tasks of a plan and the tasks read from the final graph predict the same step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
from helpers.graphs import COSTS
from helpers.jobs import JOBS, captured_step, cross_entropy
from helpers.plans import plan_in_turns
from torch import Tensor, nn

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline, simulate
from fxcomp.graph.captured import Captured
from fxcomp.graph.dump import dump
from fxcomp.graph.run_passes import finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.kinds import CollectiveKind, ElementType, Stream
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import HOSTS, RACKS, Device, Strategy
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.workload import Workload

SLOW = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(50.0, 0.02))
FAST = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(5.0, 12.0))
SHARED = Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(50.0, 0.02))

INT8, TOPK, BF16 = (parse_compressor(text) for text in ("int8", "topk(0.01)", "bf16"))
MIXED = [
    Strategy.flat(INT8),
    Strategy.flat(None),
    Strategy.flat(TOPK, Device.CPU),
    Strategy.flat(BF16),
    Strategy.flat(INT8, Device.CPU),
]
LEVELS = [
    Strategy.hierarchical(INT8),
    Strategy.hierarchical(None),
    Strategy.flat(TOPK),
    Strategy.hierarchical(TOPK, Device.CPU),
]

AGREED = [
    Strategy.flat(parse_compressor("powersgd(1)")),
    Strategy.flat(parse_compressor("shared_int8")),
    Strategy.flat(parse_compressor("sidco(0.1)"), Device.CPU),
    Strategy.flat(parse_compressor("randomk(0.1)")),
    Strategy.flat(parse_compressor("powersgd(1)"), Device.CPU),
    Strategy.flat(parse_compressor("int8(stochastic=true)")),
]
AGREED_BETWEEN_HOSTS = [
    Strategy.hierarchical(parse_compressor("shared_int8")),
    Strategy.hierarchical(parse_compressor("randomk(0.1)"), Device.CPU),
    Strategy.hierarchical(parse_compressor("sidco(0.1)")),
]
ON_THE_POOL = [
    Strategy.two_shots(INT8, BF16, Device.CPU),
    Strategy.flat(INT8),
    Strategy.flat(TOPK, Device.CPU),
    Strategy.parse("compress(int8)@gpu > all_gather@world > decompress@cpu"),
    Strategy.parse("compress(int8)@cpu > all_gather@world > decompress@gpu"),
]

FOUR = Cluster(4, 1, intra=Link(5.0, 5.0), inter=Link(50.0, 0.02))
RACKED = Cluster.parse("2x2x2", intra=Link(5.0, 5.0), inter=Link(50.0, 0.02))
UNEVEN = Cluster.parse("2+1", intra=Link(5.0, 5.0), inter=Link(50.0, 0.02))
INT4 = parse_compressor("int4(block=16)")
TWO_SHOTS = [
    Strategy.two_shots(INT4, INT8),
    Strategy.two_shots(TOPK, INT4, Device.CPU),
    Strategy.two_shots(parse_compressor("int8(stochastic=true)"), None),
    Strategy.two_shots(None, INT4),
    Strategy.parse("compress(int4)@gpu > all_to_all@world > all_gather@world > decompress@cpu"),
    Strategy.parse(
        "compress(int4)@cpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world"
        " > decompress@cpu"
    ),
]
TWO_SHOTS_BY_LEVEL = [
    Strategy.two_shots(INT4, INT8, by=HOSTS),
    Strategy.two_shots(INT4, INT4, Device.CPU, by=HOSTS),
    Strategy.parse(
        "compress(int8(block=16))@gpu > all_to_all@intra > all_to_all@inter > all_gather@inter > all_gather@intra"
        " > decompress@gpu"
    ),
    Strategy.parse(
        "compress(int8(block=16))@cpu > all_to_all@intra > all_to_all@inter > decompress@cpu > compress(bf16)@gpu"
        " > all_gather@inter > all_gather@intra > decompress@gpu"
    ),
]
ROOTED = [
    Strategy.hierarchical(INT4, by=replace(HOSTS, rooted=True)),
    Strategy.hierarchical(None, by=replace(HOSTS, rooted=True)),
    Strategy.parse(
        "compress(int4)@gpu > gather@world > decompress@gpu > compress(int8)@gpu > broadcast@world > decompress@gpu"
    ),
    Strategy.parse("compress(topk(0.01))@cpu > gather@world > broadcast@world > decompress@cpu"),
]
BY_RACK = [Strategy.hierarchical(INT4, by=RACKS), Strategy.two_shots(INT4, INT8, by=RACKS), Strategy.hierarchical(None)]

PLANS: dict[str, tuple[Cluster, list[Strategy], int]] = {
    "dense, one bucket": (SLOW, [Strategy.flat(None)], 99),
    "dense, many buckets": (SLOW, [Strategy.flat(None)], 2),
    "int8": (SLOW, [Strategy.flat(INT8)], 3),
    "mixed": (SLOW, MIXED, 2),
    "mixed, fast network": (FAST, MIXED, 2),
    "on the pool": (SLOW, ON_THE_POOL, 1),
    "on the pool, fast network": (FAST, ON_THE_POOL, 2),
    "hierarchical": (SHARED, LEVELS, 2),
    "hierarchical, one bucket": (SHARED, LEVELS, 99),
    "agreements and states": (SLOW, AGREED, 1),
    "agreements and states, two tensors": (FAST, AGREED, 2),
    "agreements and states between hosts": (SHARED, AGREED_BETWEEN_HOSTS, 2),
    "two shots": (FOUR, TWO_SHOTS, 2),
    "two shots, one bucket": (FOUR, TWO_SHOTS, 99),
    "two shots by level": (SHARED, TWO_SHOTS_BY_LEVEL, 2),
    "rooted": (FOUR, ROOTED[2:], 2),
    "rooted, hosts that differ": (UNEVEN, ROOTED, 2),
    "racks": (RACKED, BY_RACK, 2),
}


@pytest.fixture(scope="module", params=["mlp", "conv", "transformer", "conv, clipped"])
def step(request: pytest.FixtureRequest) -> tuple[str, Captured]:
    job, _, clipped = request.param.partition(", ")
    return job, captured_step(job, 1.0 if clipped else None)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("skip", [False, True], ids=["", "skip_nonfinite"])
@pytest.mark.parametrize("name", PLANS)
def test_search_and_graph_agree_on_the_time_of_a_step(step: tuple[str, Captured], name: str, skip: bool):
    job, captured = step
    cluster, strategies, per_bucket = PLANS[name]
    plan = in_ready_order(plan_in_turns(JOBS[job].build(), strategies, per_bucket), captured)
    assert_agree(Compiler(cluster, 0, skip_nonfinite=skip), captured, plan)


def assert_agree(
    compiler: Compiler, captured: Captured, plan: Plan, costs: CostTable = COSTS
) -> tuple[Workload, Timeline, Timeline]:
    """Compare the predicted steps; return the workload, the search's timeline and the graph's."""
    workload = compiler.analyze(captured.graph, costs, plan.moved)
    searched = simulate(plan_tasks(workload, plan, costs, compiler.cluster), costs.processors)
    emitted = finished(compiler.emit(captured, plan, costs)).timeline
    assert emitted.step_time_us == pytest.approx(searched.step_time_us, rel=0.01)
    return workload, searched, emitted


class InBf16(nn.Module):
    """Its gradients are cast before compressors, and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = JOBS["mlp"].build().bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16()).float()


@pytest.fixture(scope="module")
def in_bf16() -> tuple[nn.Module, Captured]:
    model = InBf16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, capture(Training.of(model, cross_entropy, optimizer), JOBS["mlp"].batch(0))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PLANS)
def test_search_and_graph_agree_on_casts(in_bf16: tuple[nn.Module, Captured], name: str):
    model, captured = in_bf16
    cluster, strategies, per_bucket = PLANS[name]
    plan = in_ready_order(plan_in_turns(model, strategies, per_bucket), captured)
    workload, *_ = assert_agree(Compiler(cluster), captured, plan)
    assert {gradient.element_type for gradient in workload.gradients} == {ElementType.BF16}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PLANS)
def test_search_and_graph_agree_on_what_a_live_scale_saves(name: str):
    model = JOBS["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training.of(model, cross_entropy, optimizer, scaler=torch.amp.GradScaler("cpu"))
    captured = capture(training, JOBS["mlp"].batch(0))
    cluster, strategies, per_bucket = PLANS[name]
    plan = in_ready_order(plan_in_turns(model, strategies, per_bucket), captured)
    workload, *_ = assert_agree(Compiler(cluster, skip_nonfinite=True), captured, plan)
    assert workload.saves_residuals


def test_a_program_of_bf16_gradients_follows_other_parameters(in_bf16: tuple[nn.Module, Captured]):
    model, captured = in_bf16
    text = "reduce_scatter@intra > compress(topk({})) > all_gather@inter > decompress > all_gather@intra"
    before, after = (plan_in_turns(model, [Strategy.parse(text.format(k))], 2) for k in (0.3, 0.1))
    compiler = Compiler(SHARED)
    retuned = finished(compiler.retune(finished(compiler.emit(captured, before, COSTS)), after, COSTS))
    assert dump(retuned.graph) == dump(finished(compiler.emit(captured, after, COSTS)).graph)


@pytest.mark.parametrize("name", ["mixed", "hierarchical", "agreements and states"])
@pytest.mark.one_in(3)
def test_search_and_graph_agree_where_gradients_are_cut(step: tuple[str, Captured], name: str):
    job, captured = step
    cluster, strategies, _ = PLANS[name]
    whole = in_ready_order(plan_in_turns(JOBS[job].build(), strategies, 1), captured)
    parts = [
        Bucket(bucket.names, (stop - start,), strategies[(k + place) % len(strategies)], (start,))
        for k, bucket in enumerate(whole.buckets)
        for place, (start, stop) in enumerate(pairwise((0, bucket.elements // 3, bucket.elements)))
    ]
    assert_agree(Compiler(cluster), captured, Plan(tuple(parts)))


ADAMS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"micro_batches": 3}], ids=str)
@pytest.mark.parametrize("name", ADAMS)
def test_search_and_graph_agree_where_momenta_are_exchanged(name: str, options: dict[str, Any]):
    model = JOBS["transformer"].build()
    batch = JOBS["transformer"].batch(0)
    captured = capture(Training.of(model, cross_entropy, ADAMS[name](model.parameters())), batch)
    cluster, strategies, per_bucket = PLANS["two shots"]
    plan = in_ready_order(plan_in_turns(model, [strategies[0], Strategy.flat(None)], per_bucket), captured)
    gradients, momenta = (
        assert_agree(Compiler(cluster, **options), captured, each) for each in (plan, plan.at_momenta())
    )
    workload = momenta[0]
    moved = [each for each in workload.gradients if each.name in plan.at_momenta().moved]
    assert all(each.own_us > 0 for each in moved)
    assert 0 < len(moved) < len(workload.gradients)
    work_us = sum(each.own_us + each.moved_us - each.update_us for each in moved)
    more_us = momenta[1].step_time_us - gradients[1].step_time_us
    assert 0 < more_us <= work_us * 1.01


ON_ONE_PROCESSOR = replace(
    COSTS,
    copy_gb_per_s=None,
    processors=Processors(1.0, 1.0),
    transport={CollectiveKind.ALL_REDUCE: TransportCost(us=20.0, us_per_mb=900.0)},
    overlap_speed=0.6,
)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", PLANS)
def test_search_and_graph_agree_where_processors_are_shared(step: tuple[str, Captured], name: str):
    job, captured = step
    cluster, strategies, per_bucket = PLANS[name]
    plan = in_ready_order(plan_in_turns(JOBS[job].build(), strategies, per_bucket), captured)
    _, searched, emitted = assert_agree(Compiler(cluster, 0), captured, plan, ON_ONE_PROCESSOR)
    slowed_us = searched.slowed_us(Stream.COMPUTE)
    assert emitted.slowed_us(Stream.COMPUTE) == pytest.approx(slowed_us, rel=0.15, abs=5.0)
    if len(plan.buckets) > 1:
        assert slowed_us > 0, "nothing here competes for the processor"


def in_ready_order(plan: Plan, captured: Captured) -> Plan:
    """Buckets in the order in which their last gradients are ready, as the search makes them."""
    ready = [g.name for g in Compiler(SLOW).analyze(captured.graph, COSTS).gradients]
    last = {bucket: max(ready.index(name) for name in bucket.names) for bucket in plan.buckets}
    return Plan(tuple(sorted(plan.buckets, key=last.__getitem__)))
