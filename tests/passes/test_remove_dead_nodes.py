"""Nodes that nobody needs go; those that write or draw stay."""

import torch
from helpers.before_after import before_after
from helpers.graphs import Step

from fxcomp.passes.remove_dead_nodes import remove_dead_nodes

aten = torch.ops.aten


def test_an_unused_node_goes_and_its_source_with_it(golden):
    step = Step()
    x = step.batch(4)
    kept = step.do(aten.relu.default, x)
    step.do(aten.exp.default, step.do(aten.neg.default, x))
    text, _ = before_after(remove_dead_nodes, step.returning(kept))
    golden("remove_dead_nodes/unused.txt", text)


def test_writes_and_draws_stay(golden):
    step = Step()
    x, mean = step.batch(4), step.buffer("mean", 4)
    step.do(aten.copy_.default, mean, x)
    step.do(aten.bernoulli.p, x, 0.5)
    text, _ = before_after(remove_dead_nodes, step.returning(step.do(aten.relu.default, x)))
    golden("remove_dead_nodes/effects.txt", text)
