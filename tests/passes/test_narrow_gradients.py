"""Gradients that are casts of 16-bit values are sent as these values, and others are named."""

from __future__ import annotations

import torch
from helpers.before_after import before_after
from helpers.captures import captured
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp.graph.dump import dump
from fxcomp.graph.edit import gradients, mean_of
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.label_gradients import label_gradients
from fxcomp.passes.narrow_gradients import narrow_gradients
from fxcomp.plan.kinds import ElementType

EXACT = {"weight": ElementType.F32_OF_BF16, "bias": ElementType.F32_OF_BF16}


def labelled(ranks: int = 2, *, casts: bool = True) -> GraphModule:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            return model(batch).float().square().sum()

    graph = captured(nn.Linear(2, 4), torch.randn(8, 2), "sgd", loss_fn).graph
    return label_gradients(canonicalize_sync(graph, ranks))


def test_the_16_bit_value_is_sent_and_the_mean_stays_fp32(golden):
    text, after = before_after(narrow_gradients, labelled(), EXACT)
    golden("narrow_gradients/linear.txt", text)
    for gradient in gradients(after).values():
        assert gradient.meta["val"].dtype is torch.bfloat16
        assert mean_of(gradient).dtype is torch.float32


def test_only_named_gradients_change():
    _, after = before_after(narrow_gradients, labelled(), {"bias": ElementType.F32_OF_BF16})
    types = {name: node.meta["val"].dtype for name, node in gradients(after).items()}
    assert types == {"weight": torch.float32, "bias": torch.bfloat16}


def test_a_single_rank_sends_nothing():
    before = labelled(1)
    text = dump(before)
    assert dump(narrow_gradients(before, EXACT)) == text


def test_a_gradient_that_is_no_cast_stays_as_it_is():
    before = labelled(casts=False)
    text = dump(before)
    assert dump(narrow_gradients(before, EXACT)) == text
