"""Planted mistakes are found and named; good graphs pass."""

import operator
from functools import partial

import pytest
import torch
from helpers.graphs import TWO, linear_step, node_named, one_bucket
from helpers.stages import priced
from torch.fx import GraphModule

from fxcomp.graph.edit import call, clone
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, info, update_info
from fxcomp.graph.ops import ALL_REDUCE, WAIT
from fxcomp.graph.run_passes import check, run
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.lower_strategies import lower_strategies
from fxcomp.passes.thread_state import thread_state
from fxcomp.plan.kinds import Stream
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

aten = torch.ops.aten


def compressed() -> GraphModule:
    plan = one_bucket("compress(int4)@gpu > all_gather@world > decompress@gpu")
    gm = bucket_gradients(canonicalize_sync(linear_step(), 2), plan)
    return thread_state(lower_strategies(gm, plan, TWO, 0))


def test_good_graphs_pass():
    assert check(linear_step()) == []
    assert check(canonicalize_sync(linear_step(), 2)) == []
    assert check(compressed()) == []


def test_a_collective_that_is_not_awaited_is_found():
    gm = canonicalize_sync(linear_step(), 2)
    wait = next(n for n in gm.graph.nodes if n.target is WAIT)
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    assert check(gm) == [
        "%all_reduce_default: awaited 0 times",
        "%sub__1: uses %all_reduce_default before it is awaited",
    ]


def test_a_collective_that_is_awaited_twice_is_found():
    gm = canonicalize_sync(linear_step(), 2)
    reduction = next(n for n in gm.graph.nodes if n.target is ALL_REDUCE)
    with gm.graph.inserting_before(gm.graph.output_node()):
        call(gm.graph, WAIT, (reduction,), NodeInfo(Role.WAIT))
    assert check(gm) == ["%all_reduce_default: awaited 2 times"]


def test_a_gradient_that_is_reduced_twice_is_found():
    gm = canonicalize_sync(linear_step(), 2)
    with gm.graph.inserting_after(node_named(gm, "mm")):
        again = call(gm.graph, ALL_REDUCE, (node_named(gm, "mm"), "avg", "world"), NodeInfo(Role.COLLECTIVE))
    with gm.graph.inserting_after(again):
        call(gm.graph, WAIT, (again,), NodeInfo(Role.WAIT))
    assert check(gm) == ["%mm: the gradient of fc.weight is reduced 2 times"]


def test_a_gradient_that_an_update_takes_unreduced_is_found():
    gm = canonicalize_sync(linear_step(), 2)
    node_named(gm, "sub_").update_arg(1, node_named(gm, "mm"))
    assert check(gm) == ["%mm: the gradient of fc.weight is also used without being reduced"]


def test_a_residual_that_does_not_go_out_is_found():
    gm = compressed()
    output = gm.graph.output_node()
    output.args = ((*output.args[0][:2], ()),)
    assert check(gm) == ["%output: 1 residuals and states come in, 0 go out"]


def test_an_update_before_the_backward_pass_ends_is_found():
    gm = linear_step()
    node_named(gm, "mm").append(node_named(gm, "sub_"))
    with gm.graph.inserting_after(node_named(gm, "sub_")):
        call(gm.graph, aten.relu.default, (node_named(gm, "fc_weight"),), NodeInfo(Role.COMPUTE), name="late")
    assert check(gm) == ["%late: computes with parameters that have been updated already"]


def test_results_that_are_taken_apart_in_another_region_are_found():
    gm = priced(one_bucket("all_reduce@world"), TWO)
    assert check(gm) == []
    pack, bias = node_named(gm, "pack_0"), node_named(gm, "sum_1")
    with gm.graph.inserting_before(pack):
        halves = call(gm.graph, aten.split.Tensor, (bias, 2), NodeInfo(Role.COMPUTE, stream=Stream.COMPUTE))
    with gm.graph.inserting_after(pack):
        call(gm.graph, operator.getitem, (halves, 0), NodeInfo(Role.COMPUTE, stream=Stream.COMPUTE))
    assert check(gm) == [f"%{halves.name}: its results are taken apart outside of region_0, which makes them"]


def test_a_graph_without_labels_says_nothing():
    gm = linear_step()
    del node_named(gm, "mm").meta["fxcomp"]
    assert check(gm) == []


def test_a_broken_pass_is_named_by_the_runner():
    def drop_waits(gm: GraphModule) -> GraphModule:
        for node in [n for n in gm.graph.nodes if n.target is WAIT]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        return gm

    gm = canonicalize_sync(linear_step(), 2)
    with pytest.raises(AssertionError, match="drop_waits broke the graph: %all_reduce_default: awaited 0 times"):
        run(gm, ((partial(drop_waits),),), {})
    assert check(gm) == [], "the runner gives a pass a copy"


def test_a_clone_shares_nothing_that_a_pass_changes():
    gm = linear_step()
    copy = clone(gm)
    node_named(copy, "mm").meta["fxcomp"] = NodeInfo(Role.COMPUTE)
    copy.graph.output_node().args = ((None, ()),)
    assert node_named(gm, "mm").meta["fxcomp"].role is Role.GRADIENT
    assert gm.graph.output_node().args[0][0] is node_named(gm, "mean")
    assert [n.name for n in copy.graph.nodes] == [n.name for n in gm.graph.nodes]


def test_a_source_prints_what_it_stands_for():
    sources = [Source(InputKind.STATE, "fc.weight", "exp_avg"), Source(InputKind.HYPER, key="lr", index=1)]
    assert [str(s) for s in sources] == ["state fc.weight.exp_avg", "hyper 1.lr"]


def test_parts_of_a_gradient_are_reduced_once_each():
    def buckets(second_start: int) -> GraphModule:
        plan = Plan((Bucket(("fc.bias", "fc.weight"), (4, 4), DENSE), Bucket(("fc.weight",), (4,), DENSE, (4,))))
        gm = bucket_gradients(canonicalize_sync(linear_step(), 2), plan)
        second = next(n for n in gm.graph.nodes if info(n).role is Role.PART and info(n).start)
        update_info(second, start=second_start)
        return gm

    assert check(buckets(4)) == []
    assert check(buckets(2)) == ["%mm: the gradient of fc.weight is reduced 2 times"]
