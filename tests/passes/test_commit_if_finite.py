"""Updates come behind a look at all that arrived, and what compression changed can be taken back."""

from before_after import before_after
from graphs import TWO, TWO_BY_TWO, one_bucket, two_buckets
from stages import compressed, priced

from fxcomp.graph.dump import dump
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import ALL_FINITE, SAVE
from fxcomp.passes.commit_if_finite import commit_if_finite
from fxcomp.passes.order_for_overlap import order_for_overlap
from fxcomp.passes.thread_state import thread_state

DENSE = "all_reduce@world"
INT4 = "compress(int4)@gpu > all_gather@world > decompress@gpu"
BF16 = "compress(bf16)@gpu > all_reduce@world > decompress@gpu"
BY_LEVEL = "reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra"


def looked_at(gm) -> list[str]:
    (node,) = [n for n in gm.graph.nodes if n.target is ALL_FINITE]
    return [value.name for value in node.args[0]]


def test_residuals_are_taken_back_and_means_looked_at(golden):
    plan = one_bucket(INT4)
    text, _ = before_after(commit_if_finite, thread_state(compressed(plan, TWO)), True)
    golden("commit_if_finite/int4.txt", text)


def test_where_no_step_is_skipped_the_graph_stays():
    before = priced(one_bucket(INT4), TWO)
    text = dump(before)
    assert dump(commit_if_finite(before, False)) == text


def test_a_dense_bucket_is_looked_at_and_changes_nothing_to_take_back():
    _, after = before_after(commit_if_finite, priced(one_bucket(DENSE), TWO), True)
    assert looked_at(after) == ["wait_0"]
    assert not [n for n in after.graph.nodes if info(n).role is Role.ROLL_BACK]


def test_a_payload_that_is_summed_in_place_is_saved_before_it_leaves():
    plan = one_bucket(BF16)
    gm = thread_state(compressed(plan, TWO), lambda _: True)
    _, after = before_after(commit_if_finite, gm, True)
    (saved,) = [n for n in after.graph.nodes if n.target is SAVE]
    order = list(after.graph.nodes)
    (own,) = saved.users
    assert own.args[1] == 1
    sent = next(n for n in order if info(n).role is Role.COLLECTIVE)
    assert order.index(saved) < order.index(sent)


def test_a_bucket_that_crosses_levels_is_looked_at_where_it_is_whole_again():
    _, after = before_after(commit_if_finite, priced(one_bucket(BY_LEVEL), TWO_BY_TWO), True)
    (whole,) = looked_at(after)
    node = next(n for n in after.graph.nodes if n.name == whole)
    assert info(node).role is Role.WAIT


def test_all_updates_wait_for_the_commit():
    plan = two_buckets(DENSE, INT4)
    gm = commit_if_finite(priced(plan, TWO), True)
    _, after = before_after(order_for_overlap, gm, plan)
    order = list(after.graph.nodes)
    (commit,) = [n for n in order if n.target is ALL_FINITE]
    changing = (Role.UNPACK, Role.CLIP, Role.UPDATE)
    assert all(order.index(n) > order.index(commit) for n in order if info(n).role in changing)
    assert all(order.index(n) < order.index(commit) for n in order if info(n).role in (Role.WAIT, Role.DECOMPRESS))
