"""The exchange moves down the optimizer's own operators: what is sent, what arrives, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.before_after import before_after
from helpers.graphs import COSTS, TWO
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.errors import Unsupported
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.run_passes import run
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.move_exchange import move_exchange
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE

WHOLE = Plan((Bucket(("weight",), (6,), DENSE, at=ExchangePoint.MOMENTUM),))
IN_PARTS = Plan(
    (
        Bucket(("weight",), (3,), DENSE, at=ExchangePoint.MOMENTUM),
        Bucket(("weight",), (3,), DENSE, (3,), at=ExchangePoint.MOMENTUM),
    )
)


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(batch[0]).square().mean()


def labelled(make: Any, **options: Any) -> GraphModule:
    """Capture the step of a matrix of 2 x 3, and label it for two ranks."""
    model = nn.Linear(3, 2, bias=False)
    captured = capture(Training.of(model, loss, make(model.parameters(), **options)), (torch.ones(4, 3),))
    return run(captured.graph, Compiler(TWO).labelling())


def bucketed(plan: Plan, make: Any, **options: Any) -> GraphModule:
    return bucket_gradients(labelled(make, **options), plan)


def test_adam_sends_its_mean_in_units_of_a_frozen_second_moment(golden):
    text, _ = before_after(move_exchange, bucketed(WHOLE, torch.optim.AdamW), WHOLE)
    golden("move_exchange/adamw.txt", text)


def test_nesterov_works_out_what_entered_the_momentum(golden):
    gm = bucketed(WHOLE, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    golden("move_exchange/nesterov.txt", before_after(move_exchange, gm, WHOLE)[0])


def test_plans_at_gradients_change_nothing():
    plan = WHOLE.at_gradients()
    gm = bucketed(plan, torch.optim.AdamW)
    before = str(gm.graph)
    assert str(move_exchange(gm, plan).graph) == before


def test_parts_of_a_mean_travel_in_several_buckets():
    _, gm = before_after(move_exchange, bucketed(IN_PARTS, torch.optim.AdamW), IN_PARTS)
    (sent,) = (node for node in gm.graph.nodes if info(node).role is Role.GRADIENT)
    packs = [node for node in gm.graph.nodes if info(node).role is Role.PACK]
    assert len(packs) == 2
    assert all(info(pack.args[0][0]).role is Role.PART for pack in packs)
    assert all(user.op == "call_function" for user in sent.users)


def test_a_live_factor_scales_the_gradient_and_not_the_mean():
    compiler = Compiler(TWO, micro_batches=2)
    model = nn.Linear(3, 2, bias=False)
    graph = capture(Training.of(model, loss, torch.optim.AdamW(model.parameters())), (torch.ones(4, 3),)).graph
    gm = compiler.rewrite(graph, WHOLE, COSTS)
    (factor,) = (n for n in gm.graph.find_nodes(op="placeholder") if info(n).source.kind is InputKind.FACTOR)
    (product,) = factor.users
    assert product.target is torch.ops.aten.mul.Tensor
    (lerp,) = product.users
    assert lerp.target is torch.ops.aten.lerp.Scalar, "the factor is on the gradient before the mean"


def test_nothing_of_the_state_is_written_before_the_exchange():
    gm = Compiler(TWO).rewrite(labelled(torch.optim.AdamW), WHOLE, COSTS)
    nodes = list(gm.graph.nodes)
    arrives = next(place for place, node in enumerate(nodes) if info(node).role is Role.WAIT)
    early = [node.target for node in nodes[:arrives] if compat.is_operator(node.target)]
    assert not any(map(compat.is_in_place, early))


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (torch.optim.SGD, {"lr": 0.1}, "keeps no mean of gradients"),
        (torch.optim.Adam, {"amsgrad": True}, "several magnitudes"),
        (torch.optim.RMSprop, {}, "keeps no mean of gradients"),
    ],
)
def test_an_update_without_a_mean_is_refused_with_the_reason(make, options, why):
    gm = bucketed(WHOLE, make, **options)
    with pytest.raises(Unsupported, match=rf"'weight'.*{why}"):
        move_exchange(gm, replace(WHOLE))
