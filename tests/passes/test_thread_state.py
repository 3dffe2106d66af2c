"""Residuals enter and leave the step, for compressors that leave something out."""

from before_after import before_after
from graphs import TWO, one_bucket, two_buckets
from stages import compressed

from fxcomp.graph.info import InputKind, info
from fxcomp.passes.thread_state import thread_state

INT8 = "compress(int8)@gpu > all_gather@world > decompress@gpu"
BF16 = "compress(bf16)@gpu > all_reduce@world > decompress@gpu"


def residuals(gm):
    sources = [info(n).source for n in gm.graph.nodes if n.op == "placeholder"]
    return [s.index for s in sources if s is not None and s.kind is InputKind.RESIDUAL]


def test_a_residual_comes_in_and_goes_out(golden):
    plan = one_bucket(INT8)
    text, _ = before_after(thread_state, compressed(plan, TWO))
    golden("thread_state/int8.txt", text)


def test_only_lossy_buckets_have_one():
    plan = two_buckets(BF16, INT8)
    needs = [b.strategy.compressor.needs_error_feedback for b in plan.buckets]
    _, after = before_after(thread_state, compressed(plan, TWO))
    assert residuals(after) == [k for k, needed in enumerate(needs) if needed]


def test_a_dense_plan_has_none():
    plan = one_bucket("all_reduce@world")
    _, after = before_after(thread_state, compressed(plan, TWO))
    assert residuals(after) == []
