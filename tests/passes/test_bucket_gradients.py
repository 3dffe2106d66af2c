"""Gradients of a bucket travel as one, in plan order, and a plan for another model is refused."""

from itertools import pairwise

import pytest
from helpers.before_after import before_after
from helpers.graphs import linear_step, node_named, one_bucket, two_buckets

from fxcomp.errors import BadPlan, CaptureFailed
from fxcomp.graph.dump import dump
from fxcomp.graph.edit import clone
from fxcomp.graph.ops import ALL_REDUCE, PACK
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

FLAT = "all_reduce@world"


def test_two_gradients_become_one_bucket(golden):
    gm = canonicalize_sync(linear_step(), 2)
    text, _ = before_after(bucket_gradients, gm, one_bucket(FLAT))
    golden("bucket_gradients/one_bucket.txt", text)


def test_each_bucket_has_its_own_collective():
    _, after = before_after(bucket_gradients, canonicalize_sync(linear_step(), 2), two_buckets(FLAT, FLAT))
    targets = [n.target for n in after.graph.nodes]
    assert targets.count(PACK) == targets.count(ALL_REDUCE) == 2


def test_clipping_scales_the_bucket_where_it_lies(golden):
    gm = canonicalize_sync(linear_step(clip=True), 2)
    text, _ = before_after(bucket_gradients, gm, one_bucket(FLAT))
    golden("bucket_gradients/clip.txt", text)


def test_gradients_of_one_rank_alone_stay_as_they_are():
    before = linear_step()
    text = dump(before)
    assert dump(bucket_gradients(before, one_bucket(FLAT))) == text


def test_a_gradient_that_reaches_no_collective_is_named():
    gm = canonicalize_sync(linear_step(), 2)
    reduction = next(n for n in gm.graph.nodes if n.target is ALL_REDUCE and n.args[0].name == "mm")
    wait = next(iter(reduction.users))
    wait.replace_all_uses_with(node_named(gm, "mm"))
    gm.graph.erase_node(wait)
    gm.graph.erase_node(reduction)
    with pytest.raises(CaptureFailed, match=r"'fc.weight' never reaches a collective: replicas would drift"):
        bucket_gradients(gm, one_bucket(FLAT))


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (Plan((Bucket(("fc.bias",), (4,), DENSE),)), r"does not plan 'fc.weight' \(1 such\)"),
        (
            Plan((Bucket(("fc.bias", "fc.weight", "head"), (4, 8, 9), DENSE),)),
            r"plans 'head', which has no gradient here",
        ),
        (Plan((Bucket(("fc.bias", "fc.weight"), (4, 9), DENSE),)), r"plans 9 elements for 'fc.weight', which has 8"),
    ],
)
def test_a_plan_for_another_model_is_refused(plan: Plan, what: str):
    with pytest.raises(BadPlan, match=what) as error:
        bucket_gradients(clone(canonicalize_sync(linear_step(), 2)), plan)
    assert "Name a mode to let fxcomp choose" in str(error.value)


def in_parts(*cuts: int) -> Plan:
    """The bias with the last part of the weight, the other parts before it."""
    extents = list(pairwise((0, *cuts, 8)))
    *first, (start, stop) = extents
    return Plan(
        (
            *(Bucket(("fc.weight",), (b - a,), DENSE, (a,)) for a, b in first),
            Bucket(("fc.bias", "fc.weight"), (4, stop - start), DENSE, (0, start)),
        )
    )


def test_a_gradient_goes_in_parts_into_several_buckets(golden):
    text, after = before_after(bucket_gradients, canonicalize_sync(linear_step(), 2), in_parts(4))
    golden("bucket_gradients/parts.txt", text)
    packs = sorted((n.name, n.meta["val"].numel()) for n in after.graph.nodes if n.target is PACK)
    assert packs == [("pack_0", 4), ("pack_1", 8)]


def test_parts_that_are_no_rows_are_cut_from_the_flat_gradient(golden):
    text, _ = before_after(bucket_gradients, canonicalize_sync(linear_step(clip=True), 2), in_parts(2, 5))
    golden("bucket_gradients/odd_parts.txt", text)
