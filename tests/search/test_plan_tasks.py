"""A plan as tasks: names, order and times of the emitted step."""

import itertools
import random
from dataclasses import replace

import pytest
from helpers.workloads import COSTS, cluster, layers, matrices

from fxcomp.cluster.cluster import Cluster, Level, Processors
from fxcomp.compressors import parse_compressor
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate, step_time_us
from fxcomp.plan.kinds import CollectiveKind, Stream
from fxcomp.plan.modes import Mode, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Device, Strategy
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.workload import Gradient, Workload

INT8 = parse_compressor("int8")
FLAT = Strategy.flat(INT8)
TWO = matrices(1000, 3000)
PAIR = cluster(2, 1, "1gbit")


def plan_of(*strategies: Strategy) -> Plan:
    return Plan(tuple(Bucket((f"w{k}",), (1000 * (1 + 2 * k),), strategy) for k, strategy in enumerate(strategies)))


def names(*strategies: Strategy, where: Cluster = PAIR, workload: Workload = TWO) -> list[str]:
    return [task.name for task in plan_tasks(workload, plan_of(*strategies), COSTS, where)]


def random_plan(workload: Workload, where: Cluster, chance: random.Random) -> Plan:
    """Any buckets of neighbours, any strategies."""
    buckets: list[Bucket] = []
    gradients = list(workload.gradients)
    while gradients:
        taken = [gradients.pop(0) for _ in range(min(len(gradients), chance.randint(1, 4)))]
        options = strategies(Mode.LOSSY, where)
        sizes = tuple(gradient.elements for gradient in taken)
        buckets.append(Bucket(tuple(g.name for g in taken), sizes, chance.choice(options)))
    return Plan(tuple(buckets))


def test_dense_buckets_are_packed_and_reduced_behind_their_regions():
    expected = (
        "region 0, pack 0, start all_reduce 0, all_reduce 0, region 1, pack 1, start all_reduce 1, all_reduce 1, "
        "backward, update 0, update 1"
    )
    assert ", ".join(names(DENSE, DENSE)) == expected


def test_a_compressed_bucket_is_decompressed_before_its_update():
    expected = (
        "region 0, pack 0, compress 0, start all_gather 0, all_gather 0, region 1, pack 1, start all_reduce 1, "
        "all_reduce 1, backward, decompress 0, update 0, update 1"
    )
    assert ", ".join(names(FLAT, DENSE)) == expected


def test_later_stages_wait_one_region_and_block_the_main_thread():
    tasks = plan_tasks(TWO, plan_of(Strategy.hierarchical(INT8), DENSE), COSTS, cluster(2, 2, "1gbit"))
    expected = (
        "region 0, pack 0, start reduce_scatter 0, reduce_scatter 0, region 1, pack 1, start all_reduce 1, "
        "all_reduce 1, "
        "wait for reduce_scatter 0, compress 0, start all_gather 0, all_gather 0, wait for all_gather 0, decompress 0, "
        "start all_gather (2) 0, all_gather (2) 0, backward, update 0, update 1"
    )
    assert ", ".join(task.name for task in tasks) == expected
    by_name = {task.name: task for task in tasks}
    assert by_name["wait for reduce_scatter 0"].after == ("reduce_scatter 0",)
    assert by_name["wait for reduce_scatter 0"].stream is Stream.COMPUTE
    assert by_name["reduce_scatter 0"].stream is by_name["all_gather (2) 0"].stream is Stream.INTRA
    assert by_name["all_gather 0"].stream is by_name["all_reduce 1"].stream is Stream.INTER


def test_the_pool_compresses_beside_compute_with_copies_if_it_is_elsewhere():
    offload = Strategy.flat(INT8, Device.CPU)
    assert names(offload, DENSE)[:5] == ["region 0", "pack 0", "compress 0", "start all_gather 0", "all_gather 0"]
    with_gpu = replace(COSTS, copy_gb_per_s=10.0)
    tasks = plan_tasks(TWO, plan_of(offload, DENSE), with_gpu, PAIR)
    streams = [task.stream for task in tasks if task.name.endswith(" 0")]
    assert streams == [
        *(Stream.COMPUTE, Stream.COMPUTE, Stream.D2H, Stream.CPU, Stream.CPU, Stream.INTER),
        *(Stream.CPU_ARRIVING, Stream.H2D, Stream.COMPUTE),
    ]


OFFLOAD = Strategy.flat(INT8, Device.CPU)


def offloaded_step_us(buckets: int, region_us: float, encode_us: float, wire_us: float, decode_us: float) -> float:
    """The step of equal buckets that the pool compresses, with a processor to spare for each of its threads."""
    elements = 1000
    payload = INT8.payload_bytes((elements,))
    costs = CostTable(
        compressors={f"{INT8}@cpu": CompressorCost.of(CompressorPoint(elements, encode_us, decode_us / 2))},
        pack_gb_per_s=1e6,
        launch_us=0.0,
        processors=Processors(4.0, 1.0),
        collectives={
            (CollectiveKind.ALL_GATHER, "2x1"): MeasuredCollective.line(
                CollectiveKind.ALL_GATHER, 2, 0.0, 1e-3 * payload / wire_us
            )
        },
    )
    names = [f"w{k}" for k in range(buckets)]
    gradients = tuple(Gradient(name, (elements,), region_us * (k + 1), 0.0) for k, name in enumerate(names))
    plan = Plan(tuple(Bucket((name,), (elements,), OFFLOAD) for name in names))
    tasks = plan_tasks(Workload(gradients, region_us * buckets), plan, costs, PAIR)
    return simulate(tasks, costs.processors).step_time_us


def test_the_pool_decompresses_while_backward_runs():
    """Only the last bucket's way is left when backward ends: 10 ms to compress, 5 on the wire, 10 to decompress."""
    assert offloaded_step_us(5, 20e3, 10e3, 5e3, 10e3) == pytest.approx(125e3, rel=1e-3)


def test_buckets_that_are_sent_never_wait_for_what_arrives():
    """On a slow wire the pool waits, and goes on compressing: a bucket takes 40 ms on the wire, and no more."""
    assert offloaded_step_us(5, 20e3, 5e3, 40e3, 5e3) == pytest.approx(230e3, rel=1e-3)


def test_the_pool_is_asked_for_a_bucket_one_region_later():
    tasks = {task.name: task for task in plan_tasks(TWO, plan_of(OFFLOAD, OFFLOAD), COSTS, PAIR)}
    assert tasks["decompress 0"].after == ("all_gather 0", "pack 1")
    assert tasks["decompress 1"].after == ("all_gather 1", "pack 1")
    assert list(tasks).index("decompress 1") < list(tasks).index("backward")


def test_clipping_waits_for_every_gradient_before_any_update():
    workload = matrices(1000, 3000, clips=True, finish_us=7.0)
    assert names(FLAT, DENSE, workload=workload)[-5:] == ["backward", "decompress 0", "finish", "update 0", "update 1"]
    finish = plan_tasks(workload, plan_of(FLAT, DENSE), COSTS, PAIR)[-3]
    assert finish.after == ("decompress 0", "all_reduce 1")
    assert finish.duration_us == 7.0


def test_a_commit_waits_for_every_gradient_and_saves_what_it_may_have_to_put_back():
    workload = matrices(1000, 3000, commits=True, finish_us=7.0)
    last = ["backward", "decompress 0", "finish", "update 0", "update 1"]
    assert names(FLAT, DENSE, workload=workload)[-5:] == last
    kept = names(Strategy.flat(parse_compressor("sidco(0.1)")), DENSE, workload=workload)
    assert kept[1:5] == ["pack 0", "save state 0", "compress 0", "start all_gather 0"]
    summed = names(Strategy.flat(parse_compressor("powersgd(1)")), DENSE, workload=workload)
    assert summed[summed.index("compress 0") :][:3] == ["compress 0", "save 0", "start all_reduce 0"]
    buffers = replace(workload, broadcast_bytes=800, broadcast_ready_us=2000.0, buffers_us=3.0)
    assert names(FLAT, DENSE, workload=buffers)[-5:] == ["decompress 0", "update buffers", *last[2:]]


def test_a_compressor_that_knows_shapes_is_priced_by_them():
    square, tall = (Workload((Gradient("w", shape, 10_000.0, 1.0),), 10_000.0) for shape in ((100, 100), (1000, 10)))
    plan = Plan((Bucket(("w",), (10_000,), Strategy.flat(parse_compressor("powersgd(1)"))),))
    sent = [{t.name: t.duration_us for t in plan_tasks(w, plan, COSTS, PAIR)} for w in (square, tall)]
    us = [[tasks["agree 0"], tasks["all_reduce 0"]] for tasks in sent]
    by_bytes = [
        [COSTS.collective(CollectiveKind.ALL_REDUCE, Level.WORLD, 4 * side, PAIR).us for side in sides]
        for sides in ((100, 100), (1000, 10))
    ]
    assert us == by_bytes


def test_buffers_are_broadcast_as_soon_as_they_are_ready_and_copied_back_last():
    early = matrices(1000, 3000, broadcast_bytes=800, broadcast_ready_us=2000.0, buffers_us=3.0)
    tasks = plan_tasks(early, plan_of(DENSE, DENSE), COSTS, PAIR)
    head = "region 0, down to the buffers"
    assert [task.name for task in tasks[:4]] == [head, "broadcast buffers", "region 0", "pack 0"]
    assert tasks[0].duration_us == 2000.0
    assert tasks[0].duration_us + tasks[2].duration_us == early.gradients[0].ready_us
    assert tasks[1].after == (head,)
    assert (tasks[-1].name, tasks[-1].duration_us) == ("update buffers", 3.0)
    late = matrices(1000, 3000, broadcast_bytes=800, broadcast_ready_us=10_000.0)
    assert names(DENSE, DENSE, workload=late)[4:7] == ["region 1, down to the buffers", "broadcast buffers", "region 1"]


def test_one_rank_does_not_communicate():
    workload = matrices(1000, 3000, broadcast_bytes=800)
    where = cluster(1, 1, "1gbit")
    expected = ["region 0", "region 1", "backward", "update 0", "update 1"]
    assert names(FLAT, DENSE, where=where, workload=workload) == expected
    timeline = simulate(plan_tasks(workload, plan_of(FLAT, DENSE), COSTS, where))
    assert timeline.step_time_us == pytest.approx(workload.free_us)


def test_a_dense_step_takes_what_is_worked_out_by_hand():
    where = cluster(4, 1, "8gbit@10us")
    timeline = simulate(plan_tasks(matrices(1000), Plan((Bucket(("w0",), (1000,), DENSE),)), COSTS, where))
    pack = 20.0 + 4000 / 5000
    all_reduce = 6 * 10.0 + 1.5 * 4000 / 1000
    assert timeline.step_time_us == pytest.approx(10_000 + pack + all_reduce + 1.0)


def test_a_gathered_payload_is_decoded_once_a_rank_and_a_shard_is_as_long_as_it_is():
    where, int8 = cluster(3, 4, "8gbit@10us"), parse_compressor("int8(block=2)")
    tasks = plan_tasks(matrices(1002), Plan((Bucket(("w0",), (1002,), Strategy.hierarchical(int8)),)), COSTS, where)
    us = {task.name: task.duration_us for task in tasks}
    shards = (250, 251, 250, 251)
    assert us["compress 0"] == COSTS.encode_us(int8, shards[0])
    assert us["decompress 0"] == COSTS.decode_us(int8, shards[0], ranks=3)
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    assert us["reduce_scatter 0"] == COSTS.collective(scatter, Level.INTRA, 4 * 1002, where).us
    assert us["all_gather 0"] == COSTS.collective(gather, Level.INTER, int8.payload_bytes(shards[:1]), where).us
    assert us["all_gather (2) 0"] == COSTS.collective(gather, Level.INTRA, 4 * max(shards), where).us


def test_two_shots_compress_a_bucket_and_then_a_share_of_it():
    where = cluster(4, 1, "8gbit@10us")
    tasks = plan_tasks(matrices(4096), Plan((Bucket(("w0",), (4096,), Strategy.two_shots(INT8, INT8)),)), COSTS, where)
    us = {task.name: task.duration_us for task in tasks}
    assert us["compress 0"] == COSTS.encode_us(INT8, 4096)
    assert us["decompress 0"] == COSTS.decode_us(INT8, 1024, ranks=4)
    assert us["compress (2) 0"] == COSTS.encode_us(INT8, 1024)
    assert us["decompress (2) 0"] == COSTS.decode_us(INT8, 4096, ranks=1)
    deal, gather = CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER
    assert us["all_to_all 0"] == COSTS.collective(deal, Level.WORLD, 4 * INT8.payload_bytes((1024,)), where).us
    assert us["all_gather 0"] == COSTS.collective(gather, Level.WORLD, INT8.payload_bytes((1024,)), where).us


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_at_least_its_compute_and_at_most_all_its_work(seed: int):
    chance = random.Random(seed)
    where = cluster(chance.choice((1, 2, 4)), chance.choice((2, 3)), "1gbit")
    workload = replace(layers(12, seed), clips=bool(seed % 2), finish_us=50.0 * (seed % 2))
    tasks = plan_tasks(workload, random_plan(workload, where, chance), COSTS, where)
    timeline = simulate(tasks)
    assert len({task.name for task in tasks}) == len(tasks)
    assert timeline.step_time_us >= workload.free_us * (1 - 1e-9)
    assert timeline.busy_us(Stream.COMPUTE) <= timeline.step_time_us * (1 + 1e-9)
    assert timeline.step_time_us <= sum(task.duration_us for task in tasks) * (1 + 1e-9)


SHARED = replace(
    COSTS,
    processors=Processors(1.0, 1.0),
    transport={CollectiveKind.ALL_REDUCE: TransportCost(us=5.0, us_per_mb=700.0)},
    overlap_speed=0.6,
)


@pytest.mark.parametrize("costs", [COSTS, SHARED], ids=["spare processors", "shared processors"])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(5)
def test_more_bandwidth_never_makes_a_plan_slower(seed: int, costs: CostTable):
    chance = random.Random(seed)
    workload = layers(12, seed)
    plan = random_plan(workload, cluster(2, 2, "1gbit"), chance)
    rates = ("100mbit", "300mbit", "1gbit", "3gbit", "10gbit", "400gbit")
    clusters = [cluster(2, 2, rate) for rate in rates]
    times = [step_time_us(plan_tasks(workload, plan, costs, where), costs.processors) for where in clusters]
    for slower, faster in itertools.pairwise(times):
        assert faster <= slower * (1 + 1e-9)
