"""A step keeps as little from forward to backward as torch.compile does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.graphs import TWO
from helpers.jobs import cross_entropy, tokens
from helpers.region_jobs import Gated
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.commands.demo.gpt import GPT, GPTConfig
from fxcomp.graph.run_passes import run
from fxcomp.passes.recompute_in_backward import recompute_in_backward
from fxcomp.pipeline import Compiler

Batch = tuple[Tensor, Tensor]

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt": (
        lambda: GPT(GPTConfig(layers=2, heads=2, width=32, context=16, vocabulary=20)),
        lambda: tokens(torch.Generator(), 16),
    ),
    "gated": (
        lambda: nn.Sequential(nn.Linear(6, 6), Gated(0.0)),
        lambda: (torch.randn(64, 6), torch.randint(0, 5, (64,))),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_kept_for_backward_than_by_torchs_compiler(name: str):
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model, batch = make(), draw()
    training = Training.of(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    gm = run(capture(training, batch).graph, Compiler(TWO).labelling())
    as_traced = kept_by_step(gm)
    known = kept_by_compiler(model, batch)
    assert kept_by_step(recompute_in_backward(gm, ("cpu",))) <= 1.02 * known
    assert as_traced > 1.3 * known or name != "gated"


def kept_by_step(gm: GraphModule) -> int:
    """The bytes that forward makes, up to the loss, and that something after it reads."""
    nodes: list[Any] = list(gm.graph.nodes)
    loss = nodes.index(nodes[-1].args[0][0])
    later = set(nodes[loss + 1 : -1])
    return bytes_of(node for node in nodes[: loss + 1] if later.intersection(node.users))


def kept_by_compiler(model: nn.Module, batch: Batch) -> int:
    """The bytes that the forward pass of `torch.compile` returns beside the loss."""
    found: list[int] = []

    def forward(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        returned: Any = gm.graph.output_node().args[0]
        found.append(bytes_of(node for node in returned[1:] if isinstance(node, Node)))
        return make_boxed_func(gm.forward)

    def backward(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()  # sizes of another model are no symbols here
    torch.compile(lambda: cross_entropy(model, batch), backend=backend, dynamic=False)()
    (kept,) = found
    return kept


def bytes_of(nodes: Iterable[Node]) -> int:
    """Count the memory that values lie in, once each; inputs are there anyway."""
    made = {root for node in nodes if (root := root_of(node)).op == "call_function"}
    return sum(value.nbytes for node in made if isinstance(value := node.meta["val"], Tensor))


def root_of(node: Node) -> Node:
    """Find the value that a view is a view of."""
    while True:
        source = node.args[0] if node.target is operator.getitem else node
        is_view = isinstance(source, Node) and compat.is_operator(source.target) and _shares(source.target)
        if not is_view:
            return node
        node = source.all_input_nodes[0]


def _shares(target: Any) -> bool:
    return compat.is_view(target) or target is torch.ops.aten._unsafe_view.default
