"""Residuals enter and leave the step, for compressors that leave something out."""

import fxcomp_more  # noqa: F401  registers its compressors
from helpers.before_after import before_after
from helpers.graphs import TWO, one_bucket, two_buckets
from helpers.stages import lowered

from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.ops import KEEP
from fxcomp.passes.thread_state import thread_state

INT4 = "compress(int4)@gpu > all_gather@world > decompress@gpu"
BF16 = "compress(bf16)@gpu > all_reduce@world > decompress@gpu"

RANDOMK = "compress(randomk(0.3))@gpu > all_reduce@world > decompress@gpu"
TWO_SHOTS = (
    "compress({0})@gpu > all_to_all@world > decompress@gpu > compress({1})@gpu > all_gather@world > decompress@gpu"
)
POWERSGD = "propose(powersgd(1))@gpu > all_reduce@world > compress(powersgd(1))@gpu > all_reduce@world > decompress@gpu"


def residuals(gm):
    sources = [info(n).source for n in gm.graph.nodes if n.op == "placeholder"]
    return [s.index for s in sources if s is not None and s.kind is InputKind.RESIDUAL]


def test_a_residual_comes_in_and_goes_out(golden):
    plan = one_bucket(INT4)
    text, _ = before_after(thread_state, lowered(plan, TWO))
    golden("thread_state/int4.txt", text)


def test_only_lossy_buckets_have_one():
    plan = two_buckets(BF16, INT4)
    needs = [b.strategy.compressor.needs_error_feedback for b in plan.buckets]
    _, after = before_after(thread_state, lowered(plan, TWO))
    assert residuals(after) == [k for k, needed in enumerate(needs) if needed]


def test_a_dense_plan_has_none():
    plan = one_bucket("all_reduce@world")
    _, after = before_after(thread_state, lowered(plan, TWO))
    assert residuals(after) == []


def test_a_state_comes_in_and_goes_out_by_way_of_the_decoder_that_needs_it(golden):
    text, after = before_after(thread_state, lowered(one_bucket(RANDOMK), TWO))
    golden("thread_state/randomk.txt", text)
    (decompress,) = [n for n in after.graph.nodes if info(n).role is Role.DECOMPRESS]
    assert decompress.kwargs["state"].name == "next_state_0"


def test_a_proposal_sees_the_residual_and_a_summed_payload_is_kept(golden):
    text, after = before_after(thread_state, lowered(one_bucket(POWERSGD), TWO))
    golden("thread_state/powersgd.txt", text)
    (propose,) = [n for n in after.graph.nodes if info(n).role is Role.PROPOSE]
    assert (propose.args[1].name, propose.kwargs["state"].name) == ("residual_0", "state_0")
    assert [n.target for n in after.graph.nodes if n.name == "next_state_0"] == [KEEP]


def test_a_state_without_a_residual_is_carried_alone():
    plan = one_bucket("compress(int8(stochastic=true))@gpu > all_gather@world > decompress@gpu")
    _, after = before_after(thread_state, lowered(plan, TWO))
    kinds = [s.kind for n in after.graph.nodes if n.op == "placeholder" and (s := info(n).source) is not None]
    assert InputKind.COMPRESSOR_STATE in kinds
    assert InputKind.RESIDUAL not in kinds


def test_each_shot_has_a_residual_of_its_own(golden):
    plan = one_bucket(TWO_SHOTS.format("int4(block=2)", "int4(block=2)"))
    text, after = before_after(thread_state, lowered(plan, TWO))
    golden("thread_state/two_shots.txt", text)
    sources = [info(n).source for n in after.graph.nodes if n.op == "placeholder"]
    slots = [(s.index, s.slot) for s in sources if s is not None and s.kind is InputKind.RESIDUAL]
    assert slots == [(0, 0), (0, 1)]
    shapes = {n.name: tuple(n.meta["val"].shape) for n in after.graph.nodes if n.name.startswith("residual")}
    assert shapes == {"residual_0": (12,), "residual_0_1": (6,)}, "the bucket, and this rank's shard of the mean"


def test_a_shot_that_loses_nothing_to_speak_of_has_no_residual():
    _, after = before_after(thread_state, lowered(one_bucket(TWO_SHOTS.format("int4", "int8")), TWO))
    sources = [info(n).source for n in after.graph.nodes if n.op == "placeholder"]
    assert [s.slot for s in sources if s is not None and s.kind is InputKind.RESIDUAL] == [0]


def test_the_states_of_two_shots_are_told_apart():
    stochastic = "int8(stochastic=true)"
    _, after = before_after(thread_state, lowered(one_bucket(TWO_SHOTS.format(stochastic, stochastic)), TWO))
    taken = {n.name: n.kwargs["state"].name for n in after.graph.nodes if n.name in ("compress_0", "compress_0_1")}
    assert taken == {"compress_0": "state_0", "compress_0_1": "state_0_1"}
