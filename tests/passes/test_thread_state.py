"""Residuals enter and leave the step, for compressors that leave something out."""

from before_after import before_after
from graphs import TWO, one_bucket, two_buckets
from stages import compressed

from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.ops import KEEP
from fxcomp.passes.thread_state import thread_state

INT4 = "compress(int4)@gpu > all_gather@world > decompress@gpu"
BF16 = "compress(bf16)@gpu > all_reduce@world > decompress@gpu"

RANDOMK = "compress(randomk(0.3))@gpu > all_reduce@world > decompress@gpu"
POWERSGD = "propose(powersgd(1))@gpu > all_reduce@world > compress(powersgd(1))@gpu > all_reduce@world > decompress@gpu"


def residuals(gm):
    sources = [info(n).source for n in gm.graph.nodes if n.op == "placeholder"]
    return [s.index for s in sources if s is not None and s.kind is InputKind.RESIDUAL]


def test_a_residual_comes_in_and_goes_out(golden):
    plan = one_bucket(INT4)
    text, _ = before_after(thread_state, compressed(plan, TWO))
    golden("thread_state/int4.txt", text)


def test_only_lossy_buckets_have_one():
    plan = two_buckets(BF16, INT4)
    needs = [b.strategy.compressor.needs_error_feedback for b in plan.buckets]
    _, after = before_after(thread_state, compressed(plan, TWO))
    assert residuals(after) == [k for k, needed in enumerate(needs) if needed]


def test_a_dense_plan_has_none():
    plan = one_bucket("all_reduce@world")
    _, after = before_after(thread_state, compressed(plan, TWO))
    assert residuals(after) == []


def test_a_state_comes_in_and_goes_out_by_way_of_the_decoder_that_needs_it(golden):
    text, after = before_after(thread_state, compressed(one_bucket(RANDOMK), TWO))
    golden("thread_state/randomk.txt", text)
    (decompress,) = [n for n in after.graph.nodes if info(n).role is Role.DECOMPRESS]
    assert decompress.kwargs["state"].name == "next_state_0"


def test_a_proposal_sees_the_residual_and_a_summed_payload_is_kept(golden):
    text, after = before_after(thread_state, compressed(one_bucket(POWERSGD), TWO))
    golden("thread_state/powersgd.txt", text)
    (propose,) = [n for n in after.graph.nodes if info(n).role is Role.PROPOSE]
    assert (propose.args[1].name, propose.kwargs["state"].name) == ("residual_0", "state_0")
    assert [n.target for n in after.graph.nodes if n.name == "next_state_0"] == [KEEP]


def test_a_state_without_a_residual_is_carried_alone():
    plan = one_bucket("compress(int8(stochastic=true))@gpu > all_gather@world > decompress@gpu")
    _, after = before_after(thread_state, compressed(plan, TWO))
    kinds = [s.kind for n in after.graph.nodes if n.op == "placeholder" and (s := info(n).source) is not None]
    assert InputKind.COMPRESSOR_STATE in kinds
    assert InputKind.RESIDUAL not in kinds
