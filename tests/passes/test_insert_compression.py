"""Payloads travel instead of gradients, from the device that the strategy names."""

from before_after import before_after
from graphs import TWO, TWO_BY_TWO, one_bucket, two_buckets
from stages import bucketed

from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, D2H, H2D, PACK
from fxcomp.passes.insert_compression import insert_compression
from fxcomp.passes.split_by_level import split_by_level

DENSE = "all_reduce@world"


def flat(compressor: str, device: str = "gpu") -> str:
    return f"compress({compressor})@{device} > all_gather@world > decompress@{device}"


def test_payloads_are_gathered_and_decoded_to_a_mean(golden):
    plan = one_bucket(flat("int8"))
    text, _ = before_after(insert_compression, bucketed(plan, TWO), plan, TWO, 0)
    golden("insert_compression/int8.txt", text)


def test_a_dense_bucket_is_scaled_while_packed(golden):
    plan = one_bucket(DENSE)
    text, after = before_after(insert_compression, bucketed(plan, TWO), plan, TWO, 0)
    golden("insert_compression/dense.txt", text)
    assert [n.args[1] for n in after.graph.nodes if n.target is PACK] == [0.5]


def test_a_linear_compressor_is_summed_on_the_wire():
    plan = one_bucket("compress(bf16)@gpu > all_reduce@world > decompress@gpu")
    _, after = before_after(insert_compression, bucketed(plan, TWO), plan, TWO, 0)
    targets = [n.target for n in after.graph.nodes]
    assert ALL_REDUCE in targets
    assert ALL_GATHER not in targets


def test_offloaded_compression_stands_between_copies(golden):
    plan = one_bucket(flat("topk(0.01)", "cpu"))
    text, after = before_after(insert_compression, bucketed(plan, TWO), plan, TWO, 0)
    golden("insert_compression/cpu.txt", text)
    assert [n.target for n in after.graph.nodes].count(D2H) == [n.target for n in after.graph.nodes].count(H2D) == 1


def test_only_the_buckets_that_the_plan_compresses_are():
    plan = two_buckets(DENSE, flat("sign"))
    _, after = before_after(insert_compression, bucketed(plan, TWO), plan, TWO, 0)
    assert [n.target for n in after.graph.nodes if n.target in (ALL_GATHER, ALL_REDUCE)] == [ALL_REDUCE, ALL_GATHER]


def test_between_hosts_a_shard_is_compressed():
    plan = one_bucket(
        "reduce_scatter@intra > compress(int8)@gpu > all_gather@inter > decompress@gpu > all_gather@intra"
    )
    gm = split_by_level(bucketed(plan, TWO_BY_TWO), plan, TWO_BY_TWO)
    segments = [[4, 2], [6]]
    for local_rank in (0, 1):
        _, after = before_after(insert_compression, gm, plan, TWO_BY_TWO, local_rank)
        compress = next(n for n in after.graph.nodes if n.name == "compress_0")
        assert compress.args[2] == segments[local_rank]


def test_ranks_agree_a_stage_before_they_compress(golden):
    agreed = "propose({0})@gpu > all_reduce@world > compress({0})@gpu > all_reduce@world > decompress@gpu"
    plan = one_bucket(agreed.format("shared_int8(stochastic=false)"))
    text, after = before_after(insert_compression, bucketed(plan, TWO), plan, TWO, 0)
    golden("insert_compression/shared_int8.txt", text)
    how = {n.name: (n.args[1], info(n).stage) for n in after.graph.nodes if n.target is ALL_REDUCE}
    assert how == {"all_reduce_0_proposal": ("max", 0), "all_reduce_0_shared_int8": ("sum", 1)}
    bound = [n for n in after.graph.nodes if info(n).role in (Role.PROPOSE, Role.COMPRESS) and len(n.args) > 4]
    assert [n.args[-1] for n in bound] == [63, 63]  # levels of one of two ranks


def test_between_hosts_an_agreement_delays_what_follows():
    plan = one_bucket(
        "reduce_scatter@intra > propose(shared_int8)@cpu > all_reduce@inter > compress(shared_int8)@cpu"
        " > all_reduce@inter > decompress@cpu > all_gather@intra"
    )
    gm = split_by_level(bucketed(plan, TWO_BY_TWO), plan, TWO_BY_TWO)
    _, after = before_after(insert_compression, gm, plan, TWO_BY_TWO, 1)
    stages = {n.name: info(n).stage for n in after.graph.nodes if info(n).role is Role.COLLECTIVE}
    assert stages == {
        "reduce_scatter_0": 0,
        "all_reduce_0_proposal": 1,
        "all_reduce_0_shared_int8": 2,
        "all_gather_0_intra": 3,
    }
    assert [n.target for n in after.graph.nodes].count(D2H) == 1
