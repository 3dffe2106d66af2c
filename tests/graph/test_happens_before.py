"""Steps read values after they are written, before they are overwritten; planted races are named by both lines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.captures import captured
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, node_named
from helpers.jobs import JOBS
from helpers.plans import plan_in_turns
from torch.fx import GraphModule, Node

from fxcomp.graph.edit import call, clone
from fxcomp.graph.effects import HOST, TRANSFERS, TRANSFERS_BACK, Event, traces
from fxcomp.graph.happens_before import races, races_of
from fxcomp.graph.info import NodeInfo, Role, info, update_info
from fxcomp.graph.ops import ALL_GATHER, D2H, H2D, PACK, WAIT
from fxcomp.graph.run_passes import check
from fxcomp.pipeline import Compiler
from fxcomp.plan.kinds import Stream
from fxcomp.plan.strategy import Strategy

aten = torch.ops.aten

STRATEGIES = {
    "dense": "all_reduce@world",
    "int8": "compress(int8)@gpu > all_gather@world > decompress@gpu",
    "two shots": "compress(int4)@gpu > all_to_all@world > decompress@gpu"
    " > compress(int4)@gpu > all_gather@world > decompress@gpu",
    "pool": "compress(int8)@cpu > all_gather@world > decompress@cpu",
    "half pool": "compress(int4)@gpu > all_gather@world > decompress@cpu",
    "top-k in the pool": "compress(topk(0.1))@cpu > all_gather@world > decompress@cpu",
    "levels": "reduce_scatter@intra > all_reduce@inter > all_gather@intra",
    "levels in the pool": "reduce_scatter@intra > compress(int8)@cpu > all_gather@inter > decompress@cpu"
    " > all_gather@intra",
    "powersgd": "propose(powersgd(2))@gpu > all_reduce@world > compress(powersgd(2))@gpu > all_reduce@world"
    " > decompress@gpu",
    "powersgd in the pool": "propose(powersgd(2))@cpu > all_reduce@world > compress(powersgd(2))@cpu"
    " > all_reduce@world > decompress@cpu",
}


@functools.cache
def final(strategy: str, job: str = "mlp", commits: bool = False) -> GraphModule:
    """The graph of a step whose buckets all have this strategy."""
    model, text = JOBS[job].build(), STRATEGIES[strategy]
    plan = plan_in_turns(model, [Strategy.parse(text)], 2)
    step = captured(model, JOBS[job].batch(0))
    compiler = Compiler(TWO_BY_TWO if "levels" in strategy else TWO, skip_nonfinite=commits)
    return compiler.rewrite(step.graph, plan, COSTS)


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(5)
def test_emitted_steps_have_no_races(strategy: str, commits: bool):
    for job in ("mlp", "conv"):
        gm = final(strategy, job, commits)
        assert races(gm, is_asynchronous=False) == []
        assert races(gm, is_asynchronous=True) == []


Plant = Callable[[GraphModule], None]


def first(gm: GraphModule, target: object) -> Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def leave_out(node: Node, instead: Node) -> None:
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def read_a_sum_without_a_wait(gm: GraphModule) -> None:
    leave_out(node_named(gm, "wait_0"), node_named(gm, "pack_0"))


def decompress_without_a_wait(gm: GraphModule) -> None:
    wait = first(gm, WAIT)
    leave_out(wait, wait.all_input_nodes[0])


def skip_a_wait_between_levels(gm: GraphModule) -> None:
    scatter = next(node for node in gm.graph.nodes if node.name.startswith("reduce_scatter_0"))
    (wait,) = scatter.users
    leave_out(wait, scatter)


def move_a_wait_behind_its_read(gm: GraphModule) -> None:
    gm.graph.output_node().prepend(node_named(gm, "wait_0"))


def change_a_bucket_in_flight(gm: GraphModule) -> None:
    label = replace(info(node_named(gm, "pack_0")), role=Role.UPDATE, bucket=None)
    with gm.graph.inserting_after(node_named(gm, "all_reduce_0")):
        call(gm.graph, aten.mul_.Tensor, (node_named(gm, "pack_0"), 2.0), label, name="planted")


def launch_before_the_pack(gm: GraphModule) -> None:
    node_named(gm, "pack_0").prepend(node_named(gm, "all_reduce_0"))


def change_a_residual_while_the_pool_reads_it(gm: GraphModule) -> None:
    residual = node_named(gm, "residual_0")
    label = NodeInfo(Role.UPDATE, stream=Stream.COMPUTE)
    with gm.graph.inserting_after(node_named(gm, "compress_0")):
        call(gm.graph, aten.zero_.default, (residual,), label, name="planted")


def take_no_copy_back(gm: GraphModule) -> None:
    back = first(gm, H2D)
    leave_out(back, back.all_input_nodes[0])


def take_no_copy_to_the_host(gm: GraphModule) -> None:
    """The pool compresses a bucket on the device as it is."""
    there = first(gm, D2H)
    leave_out(there, there.all_input_nodes[0])


def share_a_bucket(gm: GraphModule) -> None:
    """Two packs fill one buffer, while the first one's sum is under way."""
    node_named(gm, "pack_1").name = "pack_0"


def share_what_two_gathers_fill(gm: GraphModule) -> None:
    one, other = [node for node in gm.graph.nodes if node.target is ALL_GATHER][:2]
    other.name = one.name


def share_a_payload(gm: GraphModule) -> None:
    node_named(gm, "payload_1").name = "payload_0"


def send_what_is_freed(gm: GraphModule) -> None:
    """A collective sends a gradient itself, which nobody holds afterwards."""
    launch = node_named(gm, "all_gather_0_int8")
    gradient = next(node for node in gm.graph.nodes if node.target is PACK).args[0][0]
    flat = NodeInfo(Role.COMPUTE, stream=Stream.COMPUTE)
    with gm.graph.inserting_before(node_named(gm, "pack_0")):
        sent = call(gm.graph, aten.relu.default, (gradient,), flat, name="sent")
    launch.update_arg(0, sent)


def decompress_beside_the_pool(gm: GraphModule) -> None:
    """Decompress on the main thread what the pool waits for."""
    update_info(node_named(gm, "mean_0"), stream=Stream.COMPUTE)


PLANTED: list[tuple[Plant, str, bool, str, str]] = [
    (read_a_sum_without_a_wait, "dense", False, "all_reduce_0", "update_0"),
    (decompress_without_a_wait, "int8", False, "all_gather_0_int8", "mean_0"),
    (skip_a_wait_between_levels, "levels", False, "reduce_scatter_0_intra", "all_reduce_0_inter"),
    (move_a_wait_behind_its_read, "dense", False, "all_reduce_0", "update_0"),
    (change_a_bucket_in_flight, "dense", False, "all_reduce_0", "update_0"),
    (launch_before_the_pack, "dense", False, "all_reduce_0", "pack_0"),
    (change_a_residual_while_the_pool_reads_it, "top-k in the pool", False, "compress_0", "update_0"),
    (take_no_copy_back, "pool", False, "mean_0", "update_0"),
    (take_no_copy_to_the_host, "pool", True, "pack_0", "compress_0"),
    (share_a_bucket, "dense", False, "all_reduce_0", "pack_0"),
    (share_what_two_gathers_fill, "int8", False, "all_gather_0_int8", "all_gather_0_int8"),
    (share_a_payload, "int8", False, "all_gather_0_int8", "compress_1"),
    (send_what_is_freed, "int8", True, "all_gather_0_int8", "del sent"),
    (decompress_beside_the_pool, "pool", False, "all_gather_0_int8", "mean_0"),
]


@pytest.mark.parametrize(("plant", "strategy", "is_asynchronous", "first", "second"), PLANTED)
def test_a_planted_race_is_found(plant: Plant, strategy: str, is_asynchronous: bool, first: str, second: str):
    gm = clone(final(strategy))
    plant(gm)
    found = races(gm, is_asynchronous=is_asynchronous)
    assert (first, second) in {(race.first, race.second) for race in found}, found


Drop = Callable[[list[Event]], list[Event]]


def without(events: list[Event], name: str, where: str, others: str) -> list[Event]:
    """Let the event of a line on a stream not wait for those of another stream."""
    return [
        replace(event, after=tuple(place for place in event.after if events[place].where != others))
        if event.name == name and event.where == where
        else event
        for event in events
    ]


DROPPED = [
    ("all_reduce_0", "collective all_reduce_0", HOST, "dense", False),
    ("d2h_0", TRANSFERS, Stream.COMPUTE.value, "pool", True),
    ("d2h_0", Stream.CPU.value, TRANSFERS, "pool", True),
    ("wait_0", HOST, "collective all_reduce_0", "dense", False),
]


@pytest.mark.parametrize(("name", "where", "others", "strategy", "is_asynchronous"), DROPPED)
def test_an_event_that_nobody_waits_for_is_found(
    name: str, where: str, others: str, strategy: str, is_asynchronous: bool
):
    gm = final(strategy)
    lists = list(traces(gm, is_asynchronous))
    changed = [without(events, name, where, others) for events in lists]
    assert changed != lists
    assert [races_of(events) for events in lists] == [[]] * len(lists)
    assert any(races_of(events) for events in changed)


@pytest.mark.parametrize("strategy", ["pool", "half pool"])
def test_what_comes_back_from_the_pool_is_taken_to_wait_for_the_host_alone(strategy: str):
    """Copies overlap compute: an order that holds only after it would not hold."""
    for events in traces(final(strategy), is_asynchronous=True):
        back = [event for event in events if event.where == TRANSFERS_BACK]
        assert back
        assert {events[place].where for event in back for place in event.after} <= {HOST, TRANSFERS_BACK}


def test_a_race_is_a_broken_graph_and_names_both_lines():
    gm = clone(final("dense"))
    change_a_bucket_in_flight(gm)
    assert any(
        each.startswith("%update_0: writes the memory of %pack_0, which %all_reduce_0 writes") for each in check(gm)
    )


def test_what_a_line_overwrites_is_not_read_as_it_was():
    """A residual is read by the proposal; after the compressor it is another one."""
    gm = clone(final("powersgd"))
    encode = node_named(gm, "compress_0")
    propose = next(node for node in gm.graph.nodes if info(node).role is Role.PROPOSE)
    with gm.graph.inserting_after(encode):
        late = gm.graph.node_copy(propose)
    late.name = "late"
    found = [race for race in races(gm) if race.second == "late"]
    assert found
    assert found[0].problem == "reads %residual_0, which %compress_0 has overwritten by then"
