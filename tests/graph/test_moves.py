"""The operators of collectives over parts of any size: their shapes, their lines, and that they stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.graphs import Step
from torch.fx import Node

from fxcomp.errors import BadTensor
from fxcomp.graph.edit import collective_kind, level_of, wait_of
from fxcomp.graph.info import Role
from fxcomp.graph.lines import line_of
from fxcomp.graph.ops import (
    ALL_GATHER_PARTS,
    ALL_TO_ALL,
    BROADCAST_FROM_ROOT,
    GATHER,
    MOVES,
    REDUCE,
    REDUCE_SCATTER_PARTS,
    WAIT,
)
from fxcomp.passes.remove_dead_nodes import remove_dead_nodes

CUT, ROOTED = [5, 3, 0], [8, 0, 0]

SHAPES = [
    (ALL_TO_ALL, CUT, 0, 8, 15),
    (ALL_TO_ALL, CUT, 2, 8, 0),
    (ALL_GATHER_PARTS, CUT, 1, 3, 8),
    (REDUCE_SCATTER_PARTS, CUT, 1, 8, 3),
    (GATHER, ROOTED, 0, 8, 24),
    (GATHER, ROOTED, 1, 8, 0),
    (REDUCE, ROOTED, 0, 8, 8),
    (REDUCE, ROOTED, 2, 8, 0),
    (BROADCAST_FROM_ROOT, ROOTED, 0, 8, 8),
    (BROADCAST_FROM_ROOT, ROOTED, 1, 0, 8),
]


def moved(step: Step, target: Any, cut: list[int], place: int, brings: int) -> tuple[Node, Node]:
    """Add a collective and its wait."""
    value = step.buffer("value", brings)
    node = step.do(target, value, cut, place, "world", role=Role.COLLECTIVE)
    return node, step.do(WAIT, node, role=Role.WAIT)


@pytest.mark.parametrize(("target", "cut", "place", "brings", "gets"), SHAPES)
def test_a_rank_gets_what_its_place_says(target: Any, cut: list[int], place: int, brings: int, gets: int):
    node, wait = moved(Step(), target, cut, place, brings)
    assert node.meta["val"].shape == wait.meta["val"].shape == (gets,)
    assert wait_of(node) is wait


@pytest.mark.parametrize("target", MOVES)
def test_a_line_holds_the_cut_and_the_level(target: Any):
    rooted = target in (GATHER, REDUCE, BROADCAST_FROM_ROOT)
    node, _ = moved(Step(), target, ROOTED if rooted else CUT, 0, 5 if target is ALL_GATHER_PARTS else 8)
    line = line_of(node)
    assert line is not None
    kind, value, cut, level = line.arguments(node)
    assert kind == collective_kind(node).value == str(target).split(".")[1]
    assert value is node.args[0]
    assert (cut, level, level_of(node).value) == (tuple(ROOTED if rooted else CUT), "world", "world")


def test_a_collective_stays_where_this_rank_does_not_need_its_result():
    step = Step()
    node, wait = moved(step, GATHER, ROOTED, 1, 8)
    gm = remove_dead_nodes(step.returning(step.do(torch.ops.aten.relu.default, step.batch(4))))
    assert {node.name, wait.name} <= {each.name for each in gm.graph.nodes}


def test_what_does_not_fit_its_cut_is_refused_and_nothing_runs_without_a_network():
    with pytest.raises(BadTensor, match=r"all_gather cut into \(5, 3, 0\) takes 3 elements at place 1, not 5"):
        moved(Step(), ALL_GATHER_PARTS, CUT, 1, 5)
    with pytest.raises(NotImplementedError, match="fxcomp::all_to_all runs only as a line of an emitted step"):
        torch.ops.fxcomp.all_to_all(torch.ones(8), CUT, 0, "world")
