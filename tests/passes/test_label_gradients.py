"""Nodes that capture did not label get their role, and the parameter whose gradient they carry."""

import torch
from helpers.before_after import before_after
from helpers.graphs import Step, linear_step

from fxcomp.graph.edit import clone
from fxcomp.graph.info import KEY, Role, info
from fxcomp.graph.ops import ALL_REDUCE, WAIT
from fxcomp.passes.label_gradients import label_gradients

aten = torch.ops.aten


def test_a_collective_and_its_wait_belong_to_the_gradient(golden):
    step = Step()
    weight, x = step.parameter("fc.weight", 4), step.batch(4)
    loss = step.do(aten.dot.default, weight, x)
    gradient = step.gradient("fc.weight", aten.mul.Tensor, x, 1.0)
    mean = step.do(WAIT, step.do(ALL_REDUCE, gradient, "avg", "world"))
    step.update("fc.weight", aten.sub_.Tensor, weight, mean)
    gm = step.returning(loss)
    for node in gm.graph.nodes:
        if info(node).role not in (Role.GRADIENT, Role.UPDATE, Role.INPUT):
            del node.meta[KEY]
    text, _ = before_after(label_gradients, gm)
    golden("label_gradients/collective.txt", text)


def test_labels_that_are_there_stay():
    gm = linear_step()
    again = label_gradients(clone(gm))
    assert [info(n) for n in again.graph.nodes] == [info(n) for n in gm.graph.nodes]
