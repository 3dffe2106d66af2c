"""A strategy's steps become nodes: shards and payloads travel, from the device that the strategy names."""

from dataclasses import replace

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
from helpers.before_after import before_after
from helpers.graphs import TWO, TWO_BY_TWO, linear_step, one_bucket, two_buckets
from helpers.stages import bucketed
from torch.fx import GraphModule

from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadPlan
from fxcomp.graph.edit import is_collective
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, CAST, D2H, H2D, OF_PARTS, PACK, TURN
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.lower_strategies import lower_strategies
from fxcomp.plan.kinds import CollectiveKind, ElementType
from fxcomp.plan.plan import Plan

DENSE = "all_reduce@world"
BY_LEVEL = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
AROUND_INT8 = "reduce_scatter@intra > compress(int8)@gpu > all_gather@inter > decompress@gpu > all_gather@intra"
TWO_SHOTS = (
    "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world > decompress@gpu"
)
PASSED_ON = (
    "compress(int8(block=2))@gpu > all_to_all@intra > all_to_all@inter > all_gather@inter > all_gather@intra"
    " > decompress@gpu"
)
ROOTED = (
    "reduce@intra > compress(int8)@gpu > gather@inter > decompress@gpu > compress(int8)@gpu > broadcast@inter"
    " > decompress@gpu > broadcast@intra"
)
FIVE = Cluster.parse("3+2", intra=TWO.intra, inter=TWO.inter)
RACKS = Cluster.parse("2x2x2", intra=TWO.intra, inter=TWO.inter)


def flat(compressor: str, device: str = "gpu") -> str:
    return f"compress({compressor})@{device} > all_gather@world > decompress@{device}"


def lowered(strategy: str, cluster: Cluster = TWO, rank: int = 0) -> tuple[str, GraphModule]:
    plan = one_bucket(strategy)
    return before_after(lower_strategies, bucketed(plan, cluster), plan, cluster, rank)


def collectives(gm: GraphModule) -> dict[str, int]:
    """The collectives by name, with their stages."""
    return {n.name: info(n).stage for n in gm.graph.nodes if is_collective(n)}


def count(gm: GraphModule, target: object) -> int:
    return [n.target for n in gm.graph.nodes].count(target)


def test_a_dense_bucket_is_scaled_while_packed(golden):
    text, after = lowered(DENSE)
    golden("lower_strategies/dense.txt", text)
    assert [n.args[1] for n in after.graph.nodes if n.target is PACK] == [0.5]


def lowered_bf16(strategy: str, cluster: Cluster) -> tuple[str, GraphModule]:
    (bucket,) = one_bucket(strategy).buckets
    plan = Plan((replace(bucket, element_type=ElementType.BF16),))
    step = canonicalize_sync(linear_step(dtype=torch.bfloat16), cluster.world_size)
    return before_after(lower_strategies, bucket_gradients(step, plan), plan, cluster, 0)


def test_gradients_in_bf16_are_packed_as_fp32_for_a_compressor(golden):
    text, after = lowered_bf16(flat("int8"), TWO)
    golden("lower_strategies/bf16.txt", text)
    assert count(after, CAST) == 1


def test_dense_hops_of_bf16_gradients_are_in_bf16(golden):
    text, after = lowered_bf16(AROUND_INT8, TWO_BY_TWO)
    golden("lower_strategies/bf16_by_level.txt", text)
    types = [n.meta["val"].dtype for n in after.graph.nodes if is_collective(n)]
    assert types == [torch.bfloat16, torch.uint8, torch.bfloat16]


def test_dense_gradients_in_bf16_are_not_cast():
    for strategy, cluster in ((DENSE, TWO), (BY_LEVEL, TWO_BY_TWO)):
        _, after = lowered_bf16(strategy, cluster)
        assert count(after, CAST) == 0
        assert {n.meta["val"].dtype for n in after.graph.nodes if is_collective(n)} == {torch.bfloat16}


def test_a_bucket_by_level_is_scattered_reduced_and_gathered(golden):
    text, after = lowered(BY_LEVEL, TWO_BY_TWO)
    golden("lower_strategies/by_level.txt", text)
    (scatter,) = [n for n in after.graph.nodes if n.target is OF_PARTS[CollectiveKind.REDUCE_SCATTER]]
    assert (scatter.args[1], tuple(scatter.meta["val"].shape)) == ([6, 6], (6,))


def test_payloads_are_gathered_and_decoded_to_a_mean(golden):
    text, _ = lowered(flat("int8"))
    golden("lower_strategies/int8.txt", text)


def test_a_linear_compressor_is_summed_on_the_wire():
    _, after = lowered("compress(bf16)@gpu > all_reduce@world > decompress@gpu")
    assert (count(after, ALL_REDUCE), count(after, ALL_GATHER)) == (1, 0)


def test_two_shots_have_a_compression_each(golden):
    text, after = lowered(TWO_SHOTS)
    golden("lower_strategies/two_shots.txt", text)
    assert collectives(after) == {"all_to_all_0_int4": 0, "all_gather_0_int8": 1}
    slots = [info(n).slot for n in after.graph.nodes if info(n).role in (Role.COMPRESS, Role.DECOMPRESS)]
    assert slots == [0, 0, 0, 1, 1, 1]


def test_payloads_that_cross_two_levels_are_put_in_order_before_the_second(golden):
    text, after = lowered(PASSED_ON, TWO_BY_TWO, rank=3)
    golden("lower_strategies/passed_on.txt", text)
    assert count(after, TURN) == 1
    (decoded,) = [n for n in after.graph.nodes if info(n).role is Role.DECOMPRESS]
    assert decoded.args[1] == 4, "nothing is decoded on the way"


def test_only_the_first_rank_of_a_host_compresses_where_hosts_differ(golden):
    text, root = lowered(ROOTED, FIVE)
    golden("lower_strategies/rooted.txt", text)
    _, other = lowered(ROOTED, FIVE, rank=1)
    assert collectives(other) == collectives(root)
    compressed = [[n.args[2] for n in gm.graph.nodes if n.name.startswith("compress_0")] for gm in (root, other)]
    assert compressed == [[[4, 8], [4, 8]], [[], []]]


def test_offloaded_compression_stands_between_copies(golden):
    text, after = lowered(flat("topk(0.01)", "cpu"))
    golden("lower_strategies/cpu.txt", text)
    assert count(after, D2H) == count(after, H2D) == 1


def test_a_bucket_is_copied_only_where_the_device_changes():
    second = "compress(int8)@{0} > all_gather@world > decompress@gpu"
    for device, copies in (("cpu", 1), ("gpu", 1)):
        text = "compress(int4)@cpu > all_to_all@world > decompress@cpu > " + second.format(device)
        _, after = lowered(text)
        assert (count(after, D2H), count(after, H2D)) == (copies, copies), text


def test_only_the_buckets_that_the_plan_compresses_are():
    plan = two_buckets(DENSE, flat("sign"))
    _, after = before_after(lower_strategies, bucketed(plan, TWO), plan, TWO, 0)
    assert [n.target for n in after.graph.nodes if n.target in (ALL_GATHER, ALL_REDUCE)] == [ALL_REDUCE, ALL_GATHER]


def test_between_hosts_each_rank_compresses_its_own_shard():
    text = "reduce_scatter@intra > compress(int8(block=2))@gpu > all_gather@inter > decompress@gpu > all_gather@intra"
    segments = [[4, 2], [6], [4, 2], [6]]
    for rank, expected in enumerate(segments):
        _, after = lowered(text, TWO_BY_TWO, rank)
        compress = next(n for n in after.graph.nodes if n.name == "compress_0")
        assert compress.args[2] == expected


def test_ranks_agree_a_stage_before_they_compress(golden):
    agreed = "propose({0})@gpu > all_reduce@world > compress({0})@gpu > all_reduce@world > decompress@gpu"
    text, after = lowered(agreed.format("shared_int8(stochastic=false)"))
    golden("lower_strategies/shared_int8.txt", text)
    how = {n.name: (n.args[1], info(n).stage) for n in after.graph.nodes if n.target is ALL_REDUCE}
    assert how == {"all_reduce_0_proposal": ("max", 0), "all_reduce_0_shared_int8": ("sum", 1)}
    bound = [n for n in after.graph.nodes if info(n).role in (Role.PROPOSE, Role.COMPRESS) and len(n.args) > 4]
    assert [n.args[-1] for n in bound] == [63, 63]  # levels of one of two ranks


def test_between_hosts_an_agreement_delays_what_follows():
    _, after = lowered(
        "reduce_scatter@intra > propose(shared_int8)@cpu > all_reduce@inter > compress(shared_int8)@cpu"
        " > all_reduce@inter > decompress@cpu > all_gather@intra",
        TWO_BY_TWO,
        rank=1,
    )
    assert collectives(after) == {
        "reduce_scatter_0_intra": 0,
        "all_reduce_0_proposal": 1,
        "all_reduce_0_shared_int8": 2,
        "all_gather_0_intra": 3,
    }
    assert count(after, D2H) == 1


def test_a_level_of_one_rank_has_no_collective():
    _, after = lowered(BY_LEVEL, TWO)
    assert list(collectives(after)) == ["all_reduce_0_inter"]


@pytest.mark.parametrize("strategy", [BY_LEVEL, TWO_SHOTS, PASSED_ON, ROOTED])
@pytest.mark.parametrize("cluster", [TWO_BY_TWO, RACKS], ids=lambda c: c.shape)
def test_all_ranks_have_the_same_collectives(strategy: str, cluster: Cluster):
    found = {tuple(collectives(lowered(strategy, cluster, rank)[1]).items()) for rank in range(cluster.world_size)}
    assert len(found) == 1


@pytest.mark.parametrize("strategy", [BY_LEVEL, PASSED_ON])
def test_shares_between_hosts_that_differ_are_refused(strategy: str):
    plan = one_bucket(strategy)
    with pytest.raises(BadPlan, match="needs as many ranks on every host"):
        lower_strategies(bucketed(plan, FIVE), plan, FIVE, 0)


def test_where_hosts_differ_a_rank_that_meets_nobody_skips_what_others_do_between_hosts():
    """The third rank of a host of three is alone at its place; its later stages have the numbers of the others'."""
    first, *others = [collectives(lowered(ROOTED, FIVE, rank)[1]) for rank in range(5)]
    assert first == {"reduce_0_intra": 0, "gather_0_int8": 1, "broadcast_0_int8": 2, "broadcast_0_intra": 3}
    alone = {"reduce_0_intra": 0, "broadcast_0_intra": 3}
    assert others == [first, alone, first, first]
