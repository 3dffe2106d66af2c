"""Explanations of hand-built workloads, for what writes and draws them."""

import math
from dataclasses import replace

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Span, Task, Timeline, simulate
from fxcomp.plan.compress import Compress
from fxcomp.plan.kinds import Stream
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Device, Strategy
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import Alternative, Choice, choose, flip_gbit
from fxcomp.search.decision import Raced
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.question import Terms
from fxcomp.search.runners import Runner
from fxcomp.search.workload import Gradient, Workload

COSTS = CostTable(
    compressors={
        f"{parse_compressor(name)}@{device}": CompressorCost.of(
            CompressorPoint(4096, 4.0, 3.0), CompressorPoint(1 << 20, 400.0, 300.0)
        )
        for name in ("bf16", "int8")
        for device in ("gpu", "cpu")
    }
)


def cluster(inter: str, hosts: int = 2, ranks_per_host: int = 1) -> Cluster:
    return Cluster(hosts, ranks_per_host, intra=Link(5.0, 12.0), inter=Link.parse(inter))


def workload() -> Workload:
    gradients = [
        Gradient("head.weight", (1000, 400), 6_000.0, 100.0),
        Gradient("body[1].weight", (1000, 1200), 9_000.0, 300.0),
        Gradient("body[1].bias", (1000,), 9_000.0, 2.0),
        Gradient("embedding.weight", (1000, 800), 12_000.0, 200.0),
    ]
    return Workload(tuple(gradients), backward_us=12_500.0)


def explanation(where: Cluster, **changes: object) -> Explanation:
    choice = choose(workload(), COSTS, where, Mode.BALANCED)
    explained = Explanation(
        plan=choice.plan,
        timeline=simulate(plan_tasks(workload(), choice.plan, COSTS, where)),
        workload=workload(),
        costs=COSTS,
        cluster=where,
        choice=choice,
        mode="balanced",
        flip_gbit=flip_gbit(workload(), COSTS, where, Mode.BALANCED),
        notes=("A note, with [brackets].",),
    )
    return replace(explained, **changes)


def by_hand(**changes: object) -> Explanation:
    """A report whose numbers no other code makes, so that its golden text changes with the report alone."""
    int8 = Strategy.flat(parse_compressor("int8"))
    by_level = Strategy.hierarchical(parse_compressor("int8"), Device.CPU)
    plan = Plan(
        (
            Bucket(("body[1].weight", "head.weight"), (1_200_000, 400_000), int8),
            Bucket(("body[1].bias",), (1_000,), DENSE),
            Bucket(("embedding.weight",), (800_000,), by_level),
        )
    )
    tasks = [
        Task("region 0", Stream.COMPUTE, 9_000.0),
        Task("pack 0", Stream.COMPUTE, 400.0, ("region 0",)),
        Task("compress 0", Stream.COMPUTE, 600.0, ("pack 0",)),
        Task("all_gather 0", Stream.INTER, 5_000.0, ("compress 0",)),
        Task("region 1", Stream.COMPUTE, 10.0),
        Task("all_reduce 1", Stream.INTER, 60.0, ("region 1",)),
        Task("region 2", Stream.COMPUTE, 2_990.0),
        Task("reduce_scatter 2", Stream.INTRA, 700.0, ("region 2",)),
        Task("compress 2", Stream.CPU, 500.0, ("reduce_scatter 2",)),
        Task("all_gather 2", Stream.INTER, 4_000.0, ("compress 2",)),
        Task("all_gather@intra 2", Stream.INTRA, 700.0, ("all_gather 2",)),
        Task("backward", Stream.COMPUTE, 500.0),
        Task("decompress 0", Stream.COMPUTE, 500.0, ("all_gather 0",)),
        Task("update 0", Stream.COMPUTE, 400.0, ("decompress 0",)),
        Task("update 1", Stream.COMPUTE, 2.0, ("all_reduce 1",)),
        Task("update 2", Stream.COMPUTE, 200.0, ("all_gather@intra 2",)),
    ]
    dense = plan.with_strategies([DENSE] * 3)
    timeline = simulate(tasks)
    choice = Choice(
        plan=plan,
        step_us=timeline.step_time_us,
        dense=dense,
        dense_us=40_000.0,
        fastest=plan,
        fastest_us=timeline.step_time_us,
        bf16_us=25_000.0,
        free_us=12_602.0,
        error=0.1,
        alternatives=(
            (Alternative(DENSE, 30_000.0), Alternative(by_level, 20_500.0)),
            (Alternative(int8, math.inf),),
            (Alternative(DENSE, 31_000.0), Alternative(int8, math.inf)),
        ),
        runners=(
            Runner("predicted best", plan, timeline.step_time_us, 0.95, 1e-4),
            Runner("dense", dense, 40_000.0, 0.0, 0.0),
        ),
    )
    where = cluster("1gbit", 4, 2)
    explained = Explanation(
        plan,
        timeline,
        workload(),
        COSTS,
        where,
        choice,
        "lossy",
        9.5,
        notes=("With [brackets].",),
    )
    return replace(explained, **changes)


def raced(explained: Explanation) -> Explanation:
    assert explained.choice is not None
    fastest, dense = explained.choice.runners
    runners = (replace(fastest, measured_ms=21.5, steps=12), replace(dense, measured_ms=40.5, steps=1))
    return replace(explained, raced=Raced(runners, 0, 2, 17, 43.0), measured_ms=21.4, exposed_ms=6.25)


def profiled(explained: Explanation, slower: float = 1.25) -> Explanation:
    spans = tuple(Span(span.task, slower * span.start_us, slower * span.end_us) for span in explained.timeline.spans)
    return replace(explained, measured={7: Timeline(spans)})


BUDGET = Terms.of(Compress.parse("like(topk(0.01))")).budget
CASES = {
    "by hand": by_hand,
    "raced and profiled": lambda: profiled(raced(by_hand())),
    "chosen": lambda: explanation(cluster("1gbit")),
    "by level": lambda: explanation(cluster("1gbit", 4, 2)),
    "under a budget": lambda: explanation(cluster("100mbit"), budget=BUDGET),
    "one host": lambda: explanation(cluster("1gbit", 1, 4)),
    "one rank": lambda: explanation(cluster("1gbit", 1, 1)),
    "given": lambda: replace(by_hand(), choice=None, flip_gbit=None),
}
