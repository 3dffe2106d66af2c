"""One operator does an update where torch has one for the class, the device is an accelerator, and memory fits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from helpers.before_after import before_after
from helpers.graphs import TWO
from helpers.pretended import as_accelerator, mean_square
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.codegen.emit import emit
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.run_passes import run
from fxcomp.passes.fuse_updates import fuse_updates
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE

OPTIM = torch.optim


@pytest.fixture(autouse=True)
def _accelerator() -> Generator[None]:
    with as_accelerator():
        yield


def labelled(make: Any, model: nn.Module | None = None, limit: float | None = None, **options: Any) -> GraphModule:
    model = model or nn.Linear(3, 2)
    training = Training.of(model, mean_square, make(model.parameters(), **options), None, limit)
    return run(capture(training, (torch.ones(4, 3),)).graph, Compiler(TWO).labelling())


def updates(gm: GraphModule) -> list[str]:
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and info(node).role is Role.UPDATE]
    return [str(node.target) for node in nodes]


def test_adamw_becomes_one_operator(golden):
    text, gm = before_after(fuse_updates, labelled(OPTIM.AdamW))
    golden("fuse_updates/adamw.txt", text)
    assert updates(gm) == ["aten.add_.Tensor", "aten._fused_adamw_.default"] * 2


def test_parameters_of_a_region_share_its_call():
    source = emit(fuse_updates(labelled(OPTIM.AdamW)))
    assert source.count("aten._fused_adamw_.default(parameters, gradients, exp_avgs, exp_avg_sqs, [], ") == 1
    assert source.count("optimizer_step_0(") == 2, "it is written once and called once"


@pytest.mark.parametrize(
    ("make", "options", "operator", "states"),
    [
        (OPTIM.Adam, {}, "aten._fused_adam_.default", 2),
        (OPTIM.Adam, {"decoupled_weight_decay": True}, "aten._fused_adamw_.default", 2),
        (OPTIM.SGD, {"momentum": 0.9}, "aten._fused_sgd_.default", 1),
        (OPTIM.SGD, {}, "aten._fused_sgd_.default", 0),
    ],
)
def test_the_operator_is_that_of_the_class(make: Any, options: dict[str, Any], operator: str, states: int):
    gm = fuse_updates(labelled(make, **options))
    fused = [node for node in gm.graph.nodes if str(node.target) == operator]
    assert len(fused) == 2
    assert [len(each) for each in fused[0].args[2 : 2 + states]] == [1] * states


class Mine(OPTIM.SGD):
    """May do anything."""


@pytest.mark.parametrize("case", [(OPTIM.AdamW, {"amsgrad": True}), (OPTIM.RMSprop, {}), (Mine, {"momentum": 0.9})])
def test_what_torch_has_no_operator_for_stays(case: tuple[Any, dict[str, Any]]):
    gm = labelled(case[0], **case[1])
    assert not any("_fused_" in name for name in updates(gm))
    assert updates(fuse_updates(gm)) == updates(gm)


def test_numbers_stay_live():
    gm = fuse_updates(labelled(OPTIM.AdamW, weight_decay=0.0, betas=(0.8, 0.9)))
    fused = next(node for node in gm.graph.nodes if "_fused_adamw_" in str(node.target))
    live = {name: info(value).source.key for name, value in fused.kwargs.items() if hasattr(value, "op")}
    assert live == {"lr": "lr", "beta1": "betas_0", "beta2": "betas_1"}
    assert fused.kwargs["weight_decay"] == 0.0
    assert fused.kwargs["eps"] == 1e-8


def test_clipping_by_value_stays_before_it():
    gm = fuse_updates(labelled(OPTIM.SGD, limit=0.5))
    assert updates(gm) == ["aten.clamp.default", "aten._fused_sgd_.default"] * 2
    clamped, fused = [node for node in gm.graph.nodes if info(node).role is Role.UPDATE][:2]
    assert fused.args[1] == [clamped]


def test_a_gradient_that_lies_otherwise_keeps_its_operators():
    gm = labelled(OPTIM.SGD, nn.Linear(3, 2, bias=False))
    parameter = next(
        node for node in gm.graph.nodes if (s := info(node).source) is not None and s.kind is InputKind.PARAMETER
    )
    before = updates(gm)
    parameter.meta["val"] = parameter.meta["val"].t().contiguous().t()
    assert updates(fuse_updates(gm)) == before


@pytest.mark.parametrize(("dtype", "is_fused"), [(torch.bfloat16, True), (torch.float16, False)])
def test_an_update_in_fp16_keeps_the_small_squares_that_the_optimizer_loses(dtype: torch.dtype, is_fused: bool):
    gm = labelled(OPTIM.AdamW, nn.Linear(3, 2, bias=False))
    parameter = next(
        node for node in gm.graph.nodes if (s := info(node).source) is not None and s.kind is InputKind.PARAMETER
    )
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.shape == parameter.meta["val"].shape:
            node.meta["val"] = value.to(dtype)
    assert ("_fused_adamw_" in str(fuse_updates(gm).graph)) is is_fused


def test_an_update_whose_exchange_has_moved_stays():
    plan = Plan((Bucket(("weight",), (6,), DENSE, at=ExchangePoint.MOMENTUM),))
    gm = run(
        labelled(OPTIM.AdamW, nn.Linear(3, 2, bias=False)),
        (Compiler(TWO)._bucketing(plan)[0],),  # pyright: ignore[reportPrivateUsage]
    )
    assert plan.moves_exchange
    assert "_fused_adamw_" not in str(fuse_updates(gm).graph)


def test_it_changes_nothing_the_second_time():
    gm = fuse_updates(labelled(OPTIM.AdamW))
    before = str(gm.graph)
    assert str(fuse_updates(gm).graph) == before


def test_a_counter_of_the_host_is_counted_there_and_filled_in_on_the_device():
    gm = labelled(OPTIM.AdamW)
    for node in gm.graph.nodes:
        source = info(node).source
        if source is not None and source.key == "step":
            node.meta["val"] = torch.zeros(())
        elif isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = torch.empty_like(node.meta["val"], device="meta")
    fused = fuse_updates(gm)
    assert updates(fused)[:3] == ["aten.add_.Tensor", "fxcomp.counters_on.default", "aten._fused_adamw_.default"]
    assert "torch.ops.fxcomp.counters_on.default(step_s, parameters)" in emit(fused)


def test_equal_counters_are_one_scalar_on_the_device():
    counters = [torch.tensor(3.0), torch.tensor(4.0), torch.tensor(3.0)]
    made = torch.ops.fxcomp.counters_on(counters, [torch.ones(2)])
    assert [each.item() for each in made] == [3.0, 4.0, 3.0]
    assert made[0].data_ptr() == made[2].data_ptr() != made[1].data_ptr()
    counters[0].add_(1)
    assert made[0].item() == 3.0
