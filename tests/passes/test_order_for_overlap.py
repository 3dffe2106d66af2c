"""Collectives start as early as the plan's schedule says, and waits come last."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers.before_after import before_after
from helpers.captures import captured
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, linear_step, one_bucket, part, two_buckets
from helpers.jobs import JOBS
from helpers.plans import plan_in_turns
from helpers.stages import priced
from torch.fx import Node

from fxcomp.graph.edit import is_collective, last_result
from fxcomp.graph.info import Role
from fxcomp.graph.ops import BROADCAST, H2D
from fxcomp.passes.broadcast_buffers import broadcast_buffers
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.order_for_overlap import order_for_overlap
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy

DENSE = "all_reduce@world"
INT4 = "compress(int4)@gpu > all_gather@world > decompress@gpu"
HIERARCHICAL = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"


def test_each_bucket_leaves_behind_its_last_gradient(golden):
    plan = two_buckets(DENSE, INT4)
    text, _ = before_after(order_for_overlap, priced(plan, TWO), plan)
    golden("order_for_overlap/two_buckets.txt", text)


def test_updates_follow_the_wait_of_their_bucket():
    plan = two_buckets(DENSE, DENSE)
    _, after = before_after(order_for_overlap, priced(plan, TWO), plan)
    assert part(after, Role.WAIT, Role.UPDATE) == "wait_0 sub__1 wait_1 sub_"


def test_with_clipping_all_waits_come_before_all_updates():
    plan = two_buckets(DENSE, DENSE)
    _, after = before_after(order_for_overlap, priced(plan, TWO, clip=True), plan)
    assert part(after, Role.WAIT, Role.UPDATE).startswith("wait_0 wait_1 sub_")


def test_stages_of_two_buckets_interleave():
    plan = two_buckets(HIERARCHICAL, HIERARCHICAL)
    _, after = before_after(order_for_overlap, priced(plan, TWO_BY_TWO), plan)
    started = [n.name for n in after.graph.nodes if is_collective(n)]
    stages = [(launch.bucket, launch.stage) for launch in plan.schedule()]
    names = ["reduce_scatter_{}_intra", "all_reduce_{}_inter", "all_gather_{}_intra"]
    assert started == [names[stage].format(bucket) for bucket, stage in stages]


def test_what_the_pool_decompresses_is_asked_of_it_during_backward():
    offload = "compress(int4)@cpu > all_gather@world > decompress@cpu"
    plan = two_buckets(offload, INT4)
    _, after = before_after(order_for_overlap, priced(plan, TWO), plan)
    order = [node.name for node in after.graph.nodes]
    asked, taken = order.index("mean_0"), order.index(next(n.name for n in after.graph.nodes if n.target is H2D))
    assert order.index("all_gather_0_int4") < order.index("pack_1") < asked
    assert order.index("payloads_0") < asked < order.index("payloads_1") < order.index("mean_1")
    assert max(order.index(n.name) for n in after.graph.nodes if is_collective(n)) < taken


def test_what_the_main_thread_must_wait_for_comes_last_although_the_pool_decompresses_it():
    plan = two_buckets("compress(int4)@gpu > all_gather@world > decompress@cpu", DENSE)
    _, after = before_after(order_for_overlap, priced(plan, TWO), plan)
    order = [node.name for node in after.graph.nodes]
    assert order.index("all_reduce_1") < order.index("payloads_0") < order.index("mean_0")


def test_buffers_start_on_their_way_during_backward():
    plan = one_bucket(DENSE)
    gm = broadcast_buffers(canonicalize_sync(linear_step(buffer=True), 2), 2)
    gm = order_for_overlap(bucket_gradients(gm, plan), plan)
    order = list(gm.graph.nodes)
    broadcast = next(n for n in order if n.target is BROADCAST)
    gradient = next(n for n in order if n.name == "mm")
    assert order.index(broadcast) < order.index(gradient)


@pytest.mark.parametrize("per_bucket", [1, 2, 3])
def test_the_results_of_one_operator_stay_together(per_bucket: int):
    """A convolution's two gradients go into two buckets, and one of them in parts."""
    job = JOBS["conv"]
    model, step = job.build(), captured(job.build(), job.batch(0))
    dense = [Strategy.parse(DENSE)]
    plans = [plan_in_turns(model, dense, per_bucket), cut_in_halves(plan_in_turns(model, dense, 1), "0.weight")]
    for plan in plans:
        gm = Compiler(TWO).graphs_after_each_pass(step.graph, plan, COSTS)["order_for_overlap"]
        (backward,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.convolution_backward.default)
        assert last_result(backward) in backward.users
        assert set(backward.users) == set(itertools.islice(following(backward), len(backward.users)))


def following(node: Node) -> Iterator[Node]:
    while node.op != "output":
        node = node.next
        yield node


def cut_in_halves(plan: Plan, name: str) -> Plan:
    (whole,) = (bucket for bucket in plan.buckets if bucket.names == (name,))
    half = whole.sizes[0] // 2
    halves = [replace(whole, sizes=(half,)), replace(whole, sizes=(whole.sizes[0] - half,), starts=(half,))]
    return Plan(tuple(each for b in plan.buckets for each in (halves if b is whole else [b])))
