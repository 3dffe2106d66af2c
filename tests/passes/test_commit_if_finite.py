"""Updates come after a test of all that arrived, and what compression changed can be taken back."""

from helpers.before_after import before_after
from helpers.graphs import TWO, TWO_BY_TWO, one_bucket, two_buckets
from helpers.stages import lowered, priced

from fxcomp.graph.dump import dump
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import ALL_FINITE, ROLL_BACK, SAVE
from fxcomp.passes.commit_if_finite import commit_if_finite
from fxcomp.passes.order_for_overlap import order_for_overlap
from fxcomp.passes.thread_state import thread_state

DENSE = "all_reduce@world"
INT4 = "compress(int4)@gpu > all_gather@world > decompress@gpu"
BF16 = "compress(bf16)@gpu > all_reduce@world > decompress@gpu"
BY_LEVEL = "reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra"
TWO_SHOTS = (
    "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int4)@gpu > all_gather@world > decompress@gpu"
)


def looked_at(gm) -> list[str]:
    (node,) = [n for n in gm.graph.nodes if n.target is ALL_FINITE]
    return [value.name for value in node.args[0]]


def test_residuals_are_taken_back_and_means_looked_at(golden):
    plan = one_bucket(INT4)
    text, _ = before_after(commit_if_finite, thread_state(lowered(plan, TWO)), True)
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
    gm = thread_state(lowered(plan, TWO), lambda _: True)
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


def test_both_shots_are_taken_back_and_the_mean_is_looked_at_once(golden):
    gm = thread_state(lowered(one_bucket(TWO_SHOTS), TWO))
    text, after = before_after(commit_if_finite, gm, True)
    golden("commit_if_finite/two_shots.txt", text)
    assert looked_at(after) == ["mean_0_1"]
    taken_back = {n.name: n.args[0].name for n in after.graph.nodes if n.target is ROLL_BACK}
    assert taken_back == {"before_0": "left_out_0", "before_0_1": "left_out_0_1"}
    own = {n.name: n for n in after.graph.nodes if n.name in ("own_0", "own_0_1")}
    assert own["own_0"].args[:2] == (next(n for n in after.graph.nodes if n.name == "payload_0"), 1)
    assert own["own_0"].kwargs["pieces"] == [1, 1], "its own payloads, one for each owner"
    assert "pieces" not in own["own_0_1"].kwargs
