"""The final graph is the only truth: edit one node of it, and what runs is what was edited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.edits import rerun_with, scale_gradient
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from torch import nn
from torch.fx import GraphModule, Node

import fxcomp
from fxcomp.compressors import Int8, Sign, parse_compressor
from fxcomp.graph.edit import refresh_value
from fxcomp.graph.ops import PACK
from fxcomp.passes.remove_dead_nodes import remove_dead_nodes
from fxcomp.plan.strategy import Strategy

Edit = Callable[[GraphModule], None]


def compress_node(gm: GraphModule) -> Node:
    return next(n for n in gm.graph.nodes if n.name == "compress_0")


def change_block(gm: GraphModule) -> None:
    """Scales for 64 values instead of 1024, on both sides of the wire."""
    for node in gm.graph.nodes:
        if node.target in (Int8.compress_op, Int8.decompress_op):
            node.update_arg(3, 64)
    _refresh(gm)


def forget_residual(gm: GraphModule) -> None:
    """Compress without error feedback; the residual input stays, unread."""
    compress_node(gm).update_arg(1, None)


def sign_instead(gm: GraphModule) -> None:
    """Another compressor for this one bucket."""
    block = Sign().parameters
    for node in gm.graph.nodes:
        if node.target in (Int8.compress_op, Int8.decompress_op):
            node.target = Sign.compress_op if node.target is Int8.compress_op else Sign.decompress_op
            node.args = (*node.args[:3], *block)
    _refresh(gm)


def double_pack(gm: GraphModule) -> None:
    """Send twice the gradients."""
    pack = next(n for n in gm.graph.nodes if n.target is PACK)
    pack.update_arg(1, 2.0)


def nothing(gm: GraphModule) -> None:
    remove_dead_nodes(gm)


def _refresh(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(node.name.startswith(p) for p in ("compress", "payload", "all_gather")):
            refresh_value(node)


EDITS: dict[str, Edit] = {
    edit.__name__: edit for edit in (nothing, change_block, forget_residual, sign_instead, double_pack)
}


def effect(name: str) -> dict[str, Any]:
    """Two steps of an int8 plan; the second one runs the edited graph."""
    job, rank = JOBS["mlp"], dist.get_rank()
    model = job.build()
    plan = plan_in_turns(model, [Strategy.flat(parse_compressor("int8(block=1024)"))], per_bucket=4)
    optimizer = OPTIMIZERS["plain"](model.parameters())
    step = fxcomp.compile_step(
        model, cross_entropy, optimizer, job.batch(0, rank), compress=plan, checks=fxcomp.Checks(verify=1)
    )
    step(job.batch(0, rank))
    before, residual = step.source, step.in_force.state.residuals.of(0).clone()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    rerun_with(step, EDITS[name])
    step(job.batch(1, rank))
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - start
    return {
        "same source": step.source == before,
        "residual": float((step.in_force.state.residuals.of(0) - residual).abs().max()),
        "payload": step.payload_bytes["all_gather", "world"],
        "moved": moved.numpy(),
    }


def effects() -> dict[str, dict[str, Any]]:
    return {name: effect(name) for name in EDITS}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    ranks = run_ranks(2, effects)
    for name in EDITS:
        assert (ranks[0][name]["moved"] == ranks[1][name]["moved"]).all()
    return ranks[0]


def test_a_graph_that_is_not_changed_runs_the_same_source(found: Any):
    assert found["nothing"]["same source"]


@pytest.mark.parametrize("name", [name for name in EDITS if name != "nothing"])
def test_an_edited_node_changes_source_and_behaviour(found: Any, name: str):
    assert not found[name]["same source"]
    assert (found[name]["moved"] != found["nothing"]["moved"]).any()


def test_a_smaller_block_sends_more_scales(found: Any):
    sizes = [20 * 300, 300, 300 * 10, 10]
    for name, block in (("nothing", 1024), ("change_block", 64)):
        assert found[name]["payload"] == Int8(block).payload_bytes(sizes)


def test_a_compress_node_without_residual_leaves_it_alone(found: Any):
    assert found["forget_residual"]["residual"] == 0
    assert found["nothing"]["residual"] > 0


def test_another_compressor_sends_its_own_payload(found: Any):
    assert found["sign_instead"]["payload"] == Sign().payload_bytes([20 * 300, 300, 300 * 10, 10])


def test_twice_the_gradients_move_parameters_about_twice_as_far(found: Any):
    once, twice = (torch.from_numpy(found[name]["moved"]) for name in ("nothing", "double_pack"))
    assert float((twice - 2 * once).norm() / once.norm()) < 0.05


def test_alone_a_scaled_gradient_moves_its_parameter_further():
    job = JOBS["mlp"]
    moved: list[torch.Tensor] = []
    for factor in (1.0, 3.0):
        model = job.build()
        step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0))
        rerun_with(step, lambda gm, factor=factor: scale_gradient(gm, "2.bias", factor))
        before = model[2].bias.detach().clone()
        step(job.batch(0))
        moved.append(model[2].bias.detach() - before)
    torch.testing.assert_close(moved[1], 3 * moved[0])
