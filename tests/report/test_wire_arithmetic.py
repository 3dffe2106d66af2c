"""Formulas of bytes on the wire give what the timeline runs, and break-evens agree with a scan."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.table import CostTable
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import Decode, Encode
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import DENSE, Device, Strategy
from fxcomp.report.wire_arithmetic import break_even_lines, formula_lines, sent_by
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.workload import Gradient, Workload

INT8 = parse_compressor("int8")
# 4096 elements in 4 + 3 us a rank, 2²⁰ in 400 + 300
COSTS = CostTable(
    compressors={
        f"{parse_compressor(name)}@{device.value}": CompressorCost.of(
            CompressorPoint(4096, 4.0, 3.0), CompressorPoint(1 << 20, 400.0, 300.0)
        )
        for name in ("bf16", "int8", "powersgd(2)")
        for device in Device
    }
)
SHAPES: Mapping[str, tuple[int, ...]] = {"a": (1000, 1000), "b": (1000, 3), "c": (7,)}


def plan(*strategies: Strategy) -> Plan:
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    return Plan(tuple(Bucket((n,), (sizes[n],), s) for n, s in zip(sizes, strategies, strict=False)))


def workload(made: Plan) -> Workload:
    gradients = [Gradient(name, SHAPES[name], 100.0 * (k + 1), 1.0) for k, name in enumerate(SHAPES)]
    return Workload(tuple(gradients[: len(made.buckets)]), 1000.0)


@pytest.mark.parametrize("text", ["2x1", "2x4", "1x4", "3+2", "2x2x4"])
@pytest.mark.parametrize(
    "strategy", [DENSE, Strategy.flat(INT8), Strategy.hierarchical(None), Strategy.hierarchical(INT8)]
)
def test_the_formulas_that_are_printed_are_those_of_the_timeline(text: str, strategy: Strategy):
    where = Cluster.parse(text, intra=Link(2.0, 10.0, message_us=0.5), inter=Link(20.0, 1.0))
    if strategy.is_hierarchical and not where.has_levels:
        return
    made = plan(strategy)
    lines = formula_lines(made, COSTS, where, SHAPES)
    tasks = [task for task in plan_tasks(workload(made), made, COSTS, where) if re.match(r"all_|reduce_", task.name)]
    assert len(lines) == len(tasks) == len(strategy.collectives)
    for (name, line), task in zip(lines, tasks, strict=True):
        assert task.name.startswith(name.partition("@")[0])
        assert line.endswith(f" = {task.duration_us / 1e3:.4g} ms")
        assert str(where.topology_at(Level(name.partition("@")[2]))) in line


def test_the_largest_of_each_collective_is_shown():
    made = plan(Strategy.flat(INT8), DENSE, DENSE)
    lines = dict(formula_lines(made, COSTS, Cluster(4, 1, intra=Link(2, 10), inter=Link(20, 1)), SHAPES))
    assert list(lines) == ["all_gather@world", "all_reduce@world"]
    assert lines["all_reduce@world"] == (
        "ring on 4x1, bucket 1: 2(p-1)α + 2(p-1)/p·n/B = 6·20 us + 1.5·0.012 MB/8gbit = 0.138 ms"
    )


def test_an_agreement_is_a_collective_of_its_own():
    low_rank = Strategy.flat(parse_compressor("powersgd(2)"))
    sent = sent_by(plan(low_rank).buckets[0], Cluster(2, 1, intra=Link(2, 10), inter=Link(20, 1)), SHAPES)
    assert [line.send.kind for line in sent] == [CollectiveKind.ALL_REDUCE] * 2
    assert [line.size for line in sent] == [4 * 2 * 1000, 4 * 2 * 1000]


def stands_alone_us(strategy: Strategy, where: Cluster) -> float:
    """One bucket whose wire nothing hides, from the costs themselves."""
    (bucket,) = plan(strategy).buckets
    us = sum(COSTS.collective(s.send.kind, s.send.level, s.size, where).us for s in sent_by(bucket, where, SHAPES))
    for leg in route_of(strategy, [SHAPES["a"]], where).legs:
        if isinstance(leg, Encode):
            us += COSTS.encode_us(leg.compressor, leg.elements)
        elif isinstance(leg, Decode):
            us += COSTS.decode_us(leg.compressor, leg.elements, leg.payloads)
    return us


@pytest.mark.parametrize("make", [Strategy.flat, Strategy.hierarchical])
@pytest.mark.parametrize("name", ["int8", "bf16"])
@pytest.mark.parametrize("text", ["2x1", "3x2", "2x3x1", "1x2", "3+2"])
def test_a_bandwidth_is_named_at_which_compressed_and_dense_cost_the_same(text: str, name: str, make: Any):
    compressed, dense = make(parse_compressor(name)), make(None)
    where = Cluster.parse(text, intra=Link(2.0, 1e6), inter=Link(20.0, 1.0))
    if compressed.is_hierarchical and not where.has_levels:
        return
    (line,) = break_even_lines(plan(compressed), COSTS, where, SHAPES)
    match = re.fullmatch(rf"{name}.* on an exposed bucket of 4 MB pays below (.*) (between|inside).*\.", line)
    assert match, line

    def gain(factor: float) -> float:
        gb_per_s = Link.parse(match[1]).gb_per_s * factor
        there = where.with_inter(gb_per_s) if where.hosts > 1 else replace(where, intra=Link(2.0, gb_per_s))
        return stands_alone_us(dense, there) - stands_alone_us(compressed, there)

    assert gain(0.99) > 0 > gain(1.01)


def test_a_dense_plan_is_told_where_int8_would_pay():
    two, eight = (Cluster(n, 1, intra=Link(2, 10), inter=Link(0.0, 1.0)) for n in (2, 12))
    assert break_even_lines(plan(DENSE), COSTS, two, SHAPES)[0].startswith("int8 on an exposed bucket of 4 MB pays")
    assert break_even_lines(plan(DENSE), COSTS, eight, SHAPES) == [
        "int8 on an exposed bucket of 4 MB pays at no bandwidth between hosts."
    ]
    nothing = CompressorCost.of(CompressorPoint(4096, 0.0, 0.0), CompressorPoint(1 << 20, 0.0, 0.0))
    free = replace(COSTS, compressors={"int8@gpu": nothing})
    assert break_even_lines(plan(DENSE), free, two, SHAPES) == [
        "int8 on an exposed bucket of 4 MB pays at every bandwidth between hosts."
    ]


def test_nothing_is_told_where_nothing_is_sent_or_links_were_measured():
    alone = Cluster(1, 1, intra=Link(2, 10), inter=Link(20, 1))
    assert break_even_lines(plan(DENSE), COSTS, alone, SHAPES) == []
    two = Cluster(2, 1, intra=Link(2, 10), inter=Link(20, 1))
    assert break_even_lines(Plan(()), COSTS, two, SHAPES) == []
    kind = CollectiveKind.ALL_REDUCE
    live = replace(COSTS, collectives={(kind, "2x1"): MeasuredCollective.line(kind, 2, 30.0, 0.5)})
    assert break_even_lines(plan(DENSE), live, two, SHAPES) == []
    ((name, line),) = formula_lines(plan(DENSE), live, two, SHAPES)
    assert name == "all_reduce@world"
    assert line == "as measured among 2 ranks on 2x1, bucket 0: 4 MB take 8.06 ms (measured)"


def test_collectives_of_a_bucket_come_in_order_with_their_sizes():
    where = Cluster(2, 4, intra=Link(2, 10), inter=Link(20, 1))
    sent = sent_by(plan(DENSE, Strategy.hierarchical(None)).buckets[1], where, SHAPES)
    assert [(line.send.kind, line.send.level, line.size) for line in sent] == [
        (CollectiveKind.REDUCE_SCATTER, Level.INTRA, 12_000),
        (CollectiveKind.ALL_REDUCE, Level.INTER, 3_000),
        (CollectiveKind.ALL_GATHER, Level.INTRA, 3_000),
    ]
