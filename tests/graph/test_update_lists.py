"""Which operators of updates run over lists, and what they are estimated to take."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.graphs import COSTS, TWO, Step, linear_step, node_named
from torch.fx import GraphModule

from fxcomp.cost.roofline import Measured, Roofline
from fxcomp.graph.info import Role, info
from fxcomp.graph.update_kinds import shared_starts, update_lists
from fxcomp.graph.work import work_key
from fxcomp.passes.annotate_costs import annotate_costs

aten = torch.ops.aten


def rows(gm: GraphModule, most_elements: float = math.inf) -> list[list[str]]:
    return [[node.name for node in row] for row in update_lists(gm, most_elements)]


def updated_by(first: torch._ops.OpOverload, second: torch._ops.OpOverload) -> GraphModule:
    """Two parameters, each updated by an operator of its own."""
    step = Step()
    for name, operator in (("a", first), ("b", second)):
        parameter = step.parameter(name, 4)
        step.update(name, operator, parameter, step.gradient(name, aten.neg.default, parameter))
    return step.returning(step.batch(1))


def test_parameters_of_one_rule_are_one_list():
    assert rows(linear_step()) == [["sub_", "sub__1"]]
    assert rows(updated_by(aten.sub_.Tensor, aten.sub_.Tensor)) == [["sub_", "sub__1"]]


def test_other_rules_operators_without_a_list_form_and_large_tensors_run_alone():
    assert rows(updated_by(aten.sub_.Tensor, aten.mul_.Tensor)) == []
    assert rows(updated_by(aten.hypot_.default, aten.hypot_.default)) == []
    assert rows(linear_step(), most_elements=4) == []


def test_a_list_takes_the_sum_and_at_least_one_start():
    a, b, c = list(updated_by(aten.sub_.Tensor, aten.sub_.Tensor).graph.nodes)[:3]
    assert shared_starts([[a, b]], {a: 0.25, b: 0.75, c: 9.0}, 3.0) == {a: 1.25, b: 1.75}
    assert shared_starts([[a, b]], {a: 2.0, b: 4.0}, 3.0) == {a: 2.0, b: 4.0}


def update_us(costs: object) -> list[float | None]:
    gm = annotate_costs(linear_step(), costs, TWO)  # pyright: ignore[reportArgumentType]
    return [info(node).cost_us for node in gm.graph.nodes if info(node).role is Role.UPDATE]


def test_updates_of_one_rule_cost_one_start():
    assert sum(us or 0.0 for us in update_us(COSTS)) == pytest.approx(COSTS.roofline.launch_us)
    slow = replace(COSTS, roofline=Roofline(gflops=10.0, gb_per_s=1e-3, launch_us=2.0))
    assert update_us(slow) == [96.0, 48.0], "12 bytes an element"


def test_what_was_measured_in_lists_is_not_shared_again():
    measured = {work_key(node_named(linear_step(), "sub_")): Measured(7.0)}
    assert update_us(replace(COSTS, compute=measured)) == [7.0, COSTS.roofline.launch_us]
