"""The operators of collectives over parts of any size: their shapes, their lines, and that they stay."""

from __future__ import annotations

import pytest
import torch
from helpers.graphs import Step
from torch.fx import Node

from fxcomp.errors import BadTensor
from fxcomp.graph.edit import collective_kind, level_of, wait_of
from fxcomp.graph.info import Role
from fxcomp.graph.lines import line_of
from fxcomp.graph.ops import OF_PARTS, WAIT
from fxcomp.passes.remove_dead_nodes import remove_dead_nodes
from fxcomp.plan.kinds import CollectiveKind

CUT, ROOTED = [5, 3, 0], [8, 0, 0]

SHAPES = [
    (CollectiveKind.ALL_TO_ALL, CUT, 0, 8, 15),
    (CollectiveKind.ALL_TO_ALL, CUT, 2, 8, 0),
    (CollectiveKind.ALL_GATHER, CUT, 1, 3, 8),
    (CollectiveKind.REDUCE_SCATTER, CUT, 1, 8, 3),
    (CollectiveKind.GATHER, ROOTED, 0, 8, 24),
    (CollectiveKind.GATHER, ROOTED, 1, 8, 0),
    (CollectiveKind.REDUCE, ROOTED, 0, 8, 8),
    (CollectiveKind.REDUCE, ROOTED, 2, 8, 0),
    (CollectiveKind.BROADCAST, ROOTED, 0, 8, 8),
    (CollectiveKind.BROADCAST, ROOTED, 1, 0, 8),
]


def moved(step: Step, kind: CollectiveKind, cut: list[int], place: int, brings: int) -> tuple[Node, Node]:
    """Add a collective and its wait."""
    value = step.buffer("value", brings)
    node = step.do(OF_PARTS[kind], value, cut, place, "world", role=Role.COLLECTIVE)
    return node, step.do(WAIT, node, role=Role.WAIT)


@pytest.mark.parametrize(("kind", "cut", "place", "brings", "gets"), SHAPES)
def test_a_rank_gets_what_its_place_says(kind: CollectiveKind, cut: list[int], place: int, brings: int, gets: int):
    node, wait = moved(Step(), kind, cut, place, brings)
    assert node.meta["val"].shape == wait.meta["val"].shape == (gets,)
    assert wait_of(node) is wait


@pytest.mark.parametrize("kind", OF_PARTS)
def test_a_line_holds_the_cut_and_the_level(kind: CollectiveKind):
    cut = ROOTED if kind.is_rooted else CUT
    node, _ = moved(Step(), kind, cut, 0, 5 if kind is CollectiveKind.ALL_GATHER else 8)
    line = line_of(node)
    assert line is not None
    name, value, line_cut, level = line.arguments(node)
    assert name == collective_kind(node).value == str(node.target).split(".")[1] == kind.value
    assert value is node.args[0]
    assert (line_cut, level, level_of(node).value) == (tuple(cut), "world", "world")


def test_a_collective_stays_where_this_rank_does_not_need_its_result():
    step = Step()
    node, wait = moved(step, CollectiveKind.GATHER, ROOTED, 1, 8)
    gm = remove_dead_nodes(step.returning(step.do(torch.ops.aten.relu.default, step.batch(4))))
    assert {node.name, wait.name} <= {each.name for each in gm.graph.nodes}


def test_what_does_not_fit_its_cut_is_refused_and_nothing_runs_without_a_network():
    with pytest.raises(BadTensor, match=r"all_gather cut into \(5, 3, 0\) takes 3 elements at place 1, not 5"):
        moved(Step(), CollectiveKind.ALL_GATHER, CUT, 1, 5)
    with pytest.raises(NotImplementedError, match="fxcomp::all_to_all runs only as a line of an emitted step"):
        torch.ops.fxcomp.all_to_all(torch.ones(8), CUT, 0, "world")
