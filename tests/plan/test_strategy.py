"""Strategies and plans: text and JSON there and back, the schedule, and the errors."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
from helpers.strategy_space import Phase, Space, strategies_in

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.link import Link
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.errors import BadOption, BadPlan, BadStrategy
from fxcomp.plan.interpret import without_gpu
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import DENSE, FLAT, HOSTS, RACKS, Device, Strategy

UNEVEN = replace(HOSTS, rooted=True)
NAMES = (None, "bf16", "int8", "sign", "topk(0.01)")
COMPRESSORS = [parse_compressor(name) if name else None for name in NAMES]
ALL = [
    *(Strategy.flat(c, d) for c in COMPRESSORS for d in Device),
    *(Strategy.hierarchical(c, d, by=by) for c in COMPRESSORS for d in Device for by in (HOSTS, UNEVEN, RACKS)),
    *(
        Strategy.two_shots(c, e, d, by=by)
        for c in COMPRESSORS
        for e in COMPRESSORS
        for d in Device
        for by in (FLAT, HOSTS)
    ),
]
LEVELS = Strategy.hierarchical(parse_compressor("int8"))


def plan_of(*strategies: Strategy) -> Plan:
    return Plan(tuple(Bucket((f"w{k}",), (10 + k,), strategy) for k, strategy in enumerate(strategies)))


def test_stages_are_cut_behind_each_collective():
    texts = [" > ".join(map(str, stage)) for stage in LEVELS.stages]
    assert texts[0] == "reduce_scatter@intra"
    assert texts[1].endswith("all_gather@inter")
    assert texts[2] == "decompress@gpu > all_gather@intra"
    assert texts[3] == ""
    assert len(DENSE.stages) == 2


def test_two_shots_give_each_rank_the_mean_of_one_shard_and_share_it():
    int4, int8 = parse_compressor("int4"), parse_compressor("int8")
    flat = Strategy.two_shots(int4, int8)
    assert str(flat) == (
        "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world"
        " > decompress@gpu"
    )
    assert (flat.compressor, flat.compressors) == (int4, (int4, int8))
    by_level = Strategy.two_shots(int4, None, Device.CPU, by=HOSTS)
    assert str(by_level) == (
        "reduce_scatter@intra > compress(int4)@cpu > all_to_all@inter > decompress@cpu > all_gather@inter"
        " > all_gather@intra"
    )


def test_a_strategy_over_one_level_alone_is_refused_unless_it_sums_over_all():
    for level in Level:
        if level is Level.WORLD:
            assert Strategy.flat(None, level=level) == DENSE
            continue
        with pytest.raises(BadStrategy, match="ranks would not end with the mean of all gradients"):
            Strategy.flat(None, level=level)


def test_a_strategy_knows_where_it_runs():
    mixed = Strategy.parse("compress(int8)@gpu > all_gather@world > decompress@cpu")
    assert mixed.devices == {Device.GPU, Device.CPU}
    assert DENSE.devices == frozenset()
    assert Strategy.flat(parse_compressor("int8"), Device.CPU).devices == {Device.CPU}


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_uncompressed_goes_over_the_same_levels(strategy: Strategy):
    dense = strategy.uncompressed
    assert dense.is_dense
    if strategy.is_dense and len(strategy.compressors) == 0 and strategy.leading_splits == 0:
        assert dense == strategy
    assert dense.collectives[: strategy.leading_splits] == strategy.collectives[: strategy.leading_splits]


THREE_LEVELS = (Level.INTRA, Level.RACK, Level.RACKS)
ORDERS = [*itertools.permutations(THREE_LEVELS), *itertools.permutations((Level.INTRA, Level.INTER)), (Level.WORLD,)]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: " ".join(level.value for level in order))
def test_every_strategy_over_three_levels_has_a_dense_one_that_begins_alike(order: tuple[Level, ...]):
    """Whatever the order of levels: one collective may not reach over what is left."""
    space = Space(ways=(tuple(map(Phase, order)),), compressors=(parse_compressor("int8"),), most_compressions=1)
    for strategy in strategies_in(space):
        dense, begun = strategy.uncompressed, strategy.leading_splits
        assert dense.is_dense, strategy
        assert dense.steps[:begun] == strategy.steps[:begun], strategy
        assert dense.leading_splits == begun, strategy


def test_where_no_level_spans_what_is_left_each_axis_is_summed_by_itself():
    odd = "reduce_scatter@rack > compress(int8) > all_gather@intra > decompress > all_reduce@racks > all_gather@rack"
    assert str(Strategy.parse(odd).uncompressed) == (
        "reduce_scatter@rack > all_reduce@intra > all_reduce@racks > all_gather@rack"
    )


@pytest.mark.parametrize(
    "text",
    ["", "all_reduce", "all_reduce@everywhere", "squeeze(int8)@gpu", "compress()@gpu", "compress(int8)@tpu", "a b"],
)
def test_a_text_that_is_no_step_is_refused_by_name(text: str):
    with pytest.raises(BadStrategy, match=r"cannot read '"):
        Strategy.parse(text)


def test_an_unknown_compressor_is_named():
    with pytest.raises(BadStrategy, match="there is no compressor 'int9'"):
        Strategy.parse("compress(int9)@gpu > all_gather@world > decompress@gpu")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_schedule_runs_every_stage_once_in_an_order_that_can_be(count: int):
    for chosen in itertools.product((DENSE, LEVELS, Strategy.flat(parse_compressor("sign"))), repeat=count):
        plan = plan_of(*chosen)
        launches = [(launch.bucket, launch.stage) for launch in plan.schedule()]
        depth = [len(bucket.strategy.collectives) for bucket in plan.buckets]
        assert sorted(launches) == [(b, s) for b in range(count) for s in range(depth[b])]
        regions = [launch.region for launch in plan.schedule()]
        assert regions == sorted(regions)
        for launch in plan.schedule():
            assert launch.region >= launch.bucket  # its gradients are there
            if launch.stage:
                assert launches.index((launch.bucket, launch.stage - 1)) < launches.index((launch.bucket, launch.stage))


def test_a_later_stage_waits_one_region():
    launches = [(launch.region, launch.bucket, launch.stage) for launch in plan_of(LEVELS, DENSE).schedule()]
    assert launches == [(0, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 2)]


def test_an_empty_plan_has_no_schedule():
    assert Plan(()).schedule() == ()
    assert Plan(()).is_dense


def test_a_plan_survives_json_and_a_file(tmp_path: Path):
    plan = plan_of(*ALL)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json").digest == plan.digest


def test_a_digest_tells_plans_apart():
    assert len({plan_of(strategy).digest for strategy in ALL}) == len(set(map(str, ALL)))


def test_a_plan_knows_its_buckets():
    plan = plan_of(DENSE, LEVELS)
    assert plan.names == ("w0", "w1")
    assert plan.bucket_of("w1") == 1
    assert plan.buckets[1].dense_bytes == 44
    assert not plan.is_dense
    assert plan.with_strategies([DENSE, DENSE]).is_dense
    assert str(plan).startswith("bucket 0: 1 tensors, 10 elements: all_reduce@world\n")


def test_a_gradient_in_two_buckets_is_refused():
    bucket = Bucket(("w",), (1,), DENSE)
    with pytest.raises(BadPlan, match="the plan names w more than once"):
        Plan((bucket, bucket))


def test_a_bucket_needs_as_many_sizes_as_names():
    for names, sizes in (((), ()), (("a",), (1, 2)), (("a",), (-1,))):
        with pytest.raises(BadPlan, match="a bucket needs names and as many sizes"):
            Bucket(names, sizes, DENSE)


def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "plan.json"
    with pytest.raises(BadPlan, match=r"cannot read the plan .*plan\.json: No such file"):
        Plan.load(path)
    for text, message in (
        ("{", "Expecting"),
        ('{"version": 2}', "this plan has version 2; this fxcomp reads version 1"),
        ('{"version": 1}', "this is not a plan: KeyError: 'buckets'"),
    ):
        path.write_text(text)
        with pytest.raises(BadPlan, match=f"cannot read the plan .*: {message}"):
            Plan.load(path)


def test_what_needs_whole_parameters_is_refused_where_each_rank_has_a_shard():
    powersgd = parse_compressor("powersgd(2)")
    with pytest.raises(BadStrategy) as error:
        Strategy.hierarchical(powersgd)
    assert (
        "step 2, propose(powersgd(2))@gpu, does not fit: powersgd(2) compresses whole parameters, but each rank has a"
        " shard of the bucket.\n"
        "  Held before it: dense values, shards of reduce_scatter@intra, summed over the ranks of a host.\n"
    ) in str(error.value)
    assert Strategy.flat(powersgd).compressor == powersgd


def test_a_compressor_is_bound_to_shapes_or_to_parts_of_them():
    where = Cluster(3, 2, intra=Link(1, 10), inter=Link(10, 1))

    def bound(strategy: Strategy, *shapes: tuple[int, ...]) -> list[Compressor]:
        return [slot.compressor for slot in route_of(strategy, shapes, where).slots]

    shared = parse_compressor("shared_int8")
    assert bound(Strategy.flat(shared), (4, 5)) == [shared.bound_to([(4, 5)], 6)]
    assert bound(Strategy.hierarchical(shared), (4, 5)) == [shared.bound_to([(10,)], 3)]
    assert bound(DENSE, (4, 5)) == []
    (low_rank,) = bound(Strategy.flat(parse_compressor("powersgd(1)")), (40, 5), (7,))
    assert low_rank.payload_bytes((200, 7)) == 4 * (5 + 7)


def test_where_hosts_differ_only_their_first_ranks_meet():
    uneven = Cluster.parse("2+1", intra=Link(1, 10), inter=Link(10, 1))

    def plan(text: str) -> Plan:
        return plan_of(Strategy.parse(text))

    plan("reduce@intra > all_reduce@inter > broadcast@intra").check_fits(uneven)
    with pytest.raises(BadPlan, match="goes by all_reduce@inter"):
        plan("all_reduce@inter > reduce@intra > broadcast@intra").check_fits(uneven)


def test_a_plan_by_level_needs_as_many_ranks_on_every_host():
    uneven = Cluster.parse("3+2", intra=Link(1, 10), inter=Link(10, 1))
    flat = Plan((Bucket(("a",), (4,), DENSE),))
    flat.check_fits(uneven)
    plan = flat.with_strategies([Strategy.hierarchical(None)])
    plan.check_fits(Cluster(2, 2, intra=Link(1, 10), inter=Link(10, 1)))
    with pytest.raises(BadPlan, match=r"(?s)bucket 0 of the plan .* needs as many ranks on every host .* have 3\+2\."):
        plan.check_fits(uneven)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"version": 1, "buckets": [{"names": ["a"], "sizes": [Infinity]}]}'],
    ids=["binary", "nested", "digits", "infinite"],
)
def test_a_file_that_is_no_plan_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(BadPlan, match=r"cannot read the plan .*plan\.json"):
        Plan.load(path)


def test_both_words_for_a_device_are_read_and_saved_as_one():
    offloaded = Strategy.flat(parse_compressor("int8"), Device.CPU)
    words = "compress(int8)@pool > all_gather@world > decompress@pool"
    assert without_gpu(str(offloaded)) == words
    assert Strategy.parse(words) == Strategy.parse(str(offloaded)) == offloaded
    saved = json.dumps(plan_of(offloaded, LEVELS).to_json())
    other = Plan.from_json(json.loads(without_gpu(saved)))
    assert "@pool" in without_gpu(saved)
    assert other == plan_of(offloaded, LEVELS)
    assert other.digest == plan_of(offloaded, LEVELS).digest
    assert json.dumps(other.to_json()) == saved


# Ending as shards


@pytest.mark.parametrize("compressor", [None, parse_compressor("int8"), parse_compressor("topk(0.1)")])
def test_a_strategy_that_ends_as_shards_says_so_and_parses_back(compressor: Compressor | None):
    scattered = Strategy.scattered(compressor)
    assert str(scattered).endswith(" > shards")
    assert Strategy.parse(str(scattered)) == scattered
    assert scattered.held[-1].is_shards
    assert scattered.uncompressed == Strategy.scattered(None)
    assert not scattered.differs_in_parameters_only(Strategy.two_shots(compressor, None))
    plan = Plan((Bucket(("a",), (4,), scattered),))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("all_reduce@world > shards", "whole buckets"),
        ("reduce@world > shards", "shards of reduce@world"),
        ("reduce_scatter@intra > shards", "summed over"),
        ("compress(int8) > all_to_all@world > shards", "int8 payloads"),
    ],
)
def test_what_leaves_no_rank_a_dense_shard_of_the_whole_sum_does_not_end_as_shards(text: str, held: str):
    with pytest.raises(BadStrategy, match=r"would not end with shards of the mean") as refused:
        Strategy.parse(text)
    assert held in str(refused.value)


def test_where_whole_gradients_are_needed_shards_are_refused_with_who_takes_them():
    Strategy.flat(COMPRESSORS[2]).check_is_whole()
    with pytest.raises(BadStrategy, match=r"only fxcomp.compress_reduce_scatter takes shards"):
        Strategy.scattered(COMPRESSORS[2]).check_is_whole()
    with pytest.raises(BadOption, match="takes shards"):
        Pins.read({"a": str(Strategy.scattered(COMPRESSORS[2]))}).check_fits(
            Cluster.parse("2x1, inter 1gbit, intra 10gbit")
        )
