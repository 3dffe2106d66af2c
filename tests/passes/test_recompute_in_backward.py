"""Backward computes elementwise values again where that keeps nothing any longer; every bit stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.before_after import before_after
from helpers.graphs import TWO
from helpers.pretended import mean_square
from helpers.region_jobs import Case, Trained, cases, step_by
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.graph.info import Role, info
from fxcomp.graph.run_passes import run
from fxcomp.passes.recompute_in_backward import recompute_in_backward
from fxcomp.pipeline import Compiler

CPU = ("cpu",)


class Gated(nn.Module):
    """A product of two layers, one of them through an activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = nn.functional.silu) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
        self.activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(rows)) * self.up(rows))


def labelled(model: nn.Module, loss: Any = mean_square, batch: Any = None) -> GraphModule:
    training = Training.of(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = (torch.ones(5, 3),) if batch is None else batch
    return run(capture(training, batch).graph, Compiler(TWO).labelling())


def again(model: nn.Module, loss: Any = mean_square, batch: Any = None) -> list[str]:
    """The operators that backward calls again."""
    gm = recompute_in_backward(labelled(model, loss, batch), CPU)
    return [str(node.target) for node in gm.graph.nodes if "_again" in node.name]


def test_an_activation_that_a_product_reads_is_computed_again(golden):
    text, gm = before_after(recompute_in_backward, labelled(Gated()), CPU)
    golden("recompute_in_backward/gated.txt", text)
    (silu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)[:1]
    assert len(silu.users) == 1


def test_nothing_is_computed_again_on_other_devices():
    gm = labelled(Gated())
    before = [node.name for node in gm.graph.nodes]
    assert [node.name for node in recompute_in_backward(gm, ("cuda",)).graph.nodes] == before


def test_a_chain_is_computed_from_what_is_kept():
    def chain(x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))

    found = again(Gated(chain))
    assert found.count("aten.tanh.default") >= 1
    assert "aten.mm.default" not in found


def long_chain(x: Tensor) -> Tensor:
    for _ in range(20):
        x = torch.sin(x) + 1.0
    return x.exp()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), "a product of matrices reads it"),
        (nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), "it is drawn"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), "a norm is no elementwise operator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_stays(model: nn.Module, why: str):
    assert not again(model), why


def test_a_chain_that_is_too_long_stays():
    found = again(Gated(long_chain))
    assert not any("exp" in each for each in found)


def test_a_value_that_is_returned_stays():
    def with_aux(model: Gated, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        gate = nn.functional.silu(model.gate(batch[0]))
        return model.down(gate * model.up(batch[0])).square().mean(), gate.detach()

    training = Training.of(model := Gated(), with_aux, torch.optim.SGD(model.parameters(), lr=0.1))
    gm = run(capture(training, (torch.ones(5, 3),)).graph, Compiler(TWO).labelling())
    gm = recompute_in_backward(gm, CPU)
    assert not [node for node in gm.graph.nodes if "silu_again" in node.name]


def test_what_a_value_is_made_of_is_kept_no_longer_for_it():
    """At every place of backward no more of forward's values are still to be read than before."""
    for model in (Gated(), Gated(torch.tanh), Gated(lambda x: torch.sigmoid(x) * x), Gated(long_chain)):
        gm = labelled(model)
        before, after = ends(gm), ends(recompute_in_backward(labelled(model), CPU))
        assert set(after) <= set(before)
        assert all(after[name] <= before[name] for name in after)


def ends(gm: GraphModule) -> dict[str, int]:
    """For each value of forward, the number of gradients that are made before it is read for the last time."""
    nodes: list[Any] = list(gm.graph.nodes)
    turn = nodes.index(nodes[-1].args[0][0])
    made, found = 0, dict[str, int]()
    for place, node in enumerate(nodes[:-1]):
        made += info(node).role is Role.GRADIENT
        for source in node.all_input_nodes:
            if place > turn and source.op == "call_function" and nodes.index(source) <= turn:
                found[source.name] = made
    return found


GATED = Case("gated", "int8", 4, 2, "adamw", *[False] * 7)
ALONE = ("varies", "drops", "autocast", "checkpoints", "accumulates", "clips")
CASES = [
    *(replace(GATED, **{name: True}) for name in ALONE),
    replace(GATED, plan="dense", varies=True, drops=True, scales=True),
    *(replace(case, varies=False) for case in cases() if case.plan in ("dense", "int8")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.one_in(6)
def test_steps_that_compute_again_train_to_the_bit_as_those_that_do_not(case: Case):
    names: list[str] = []

    def run_plainly(module: GraphModule, _: Any, *, keeps_order: bool) -> Callable[..., Any]:  # noqa: ARG001
        names.extend(node.name for node in module.graph.nodes)
        return lambda *inputs: module(*inputs)

    with patch.object(compat, "standalone_compile", run_plainly):
        found = step_by(case, "inductor")
    assert_same(found, step_by(case, "eager"))
    assert any("_again" in name for name in names) or case.model != "gated" or case.checkpoints


def assert_same(found: Trained, plain: Trained) -> None:
    assert found.losses == plain.losses
    for one, other in zip(found.parameters, plain.parameters, strict=True):
        assert torch.equal(one, other)
