"""A model may call its tensors what it likes: emitted source keeps its own names apart."""

from __future__ import annotations

import keyword

import pytest
import torch
from helpers.jobs import OPTIMIZERS
from helpers.ranks import run_ranks
from torch import Tensor, nn

import fxcomp

OWN = """
    parameters buffers states numbers residuals compressor_states batch rt aten math operator torch step
    region region_0 region_1 update_0 optimizer_step_0 float slice complex int8 Int8 pack_0 payload_0 payloads_0 mean_0
    wait_0 all_reduce_0 residual_0 batch_0 lr momentum gradient parameter getitem mul None lambda class print len
"""
SPACED = [f'part  {k} of "it", \\ and\n more' for k in range(8)]
FREE = [name for name in OWN.split() if not hasattr(nn.Module(), name)] + SPACED


class Named(nn.Module):
    """Parameters or buffers under names that emitted source uses itself."""

    def __init__(self, *, as_buffers: bool) -> None:
        super().__init__()
        self.own_weight = nn.Parameter(torch.full((600,), 0.5))
        self.as_buffers = as_buffers
        for name in FREE:
            if as_buffers:
                self.register_buffer(name, torch.ones(600))
            else:
                self.register_parameter(name, nn.Parameter(torch.full((600,), 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        values = [getattr(self, name) for name in FREE]
        own = self.own_weight * torch.stack(values).mean(0)
        if self.as_buffers:
            for value in values:
                value.mul_(0.9)
        return x * own


def loss(model: nn.Module, batch: tuple[Tensor, float, complex]) -> Tensor:
    x, infinite, number = batch
    return (model(x).clamp(max=infinite)[1:-1] * number).abs().square().mean()


def train() -> None:
    batch = (torch.ones(600), float("inf"), 1j)
    for as_buffers, plan in ((False, "int8"), (True, "dense")):
        model = Named(as_buffers=as_buffers)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = fxcomp.compile_step(
            model, loss, optimizer, batch, max_grad_norm=1.0, compress=plan, checks=fxcomp.Checks(verify=1)
        )
        step(batch)


def test_names_that_the_emitted_step_uses_are_free_for_a_model():
    run_ranks(2, train)


@pytest.mark.parametrize("name", [*keyword.kwlist, "float", "slice"])
def test_no_value_of_an_emitted_step_hides_a_word_of_python(name: str):
    assert torch.fx.Graph().placeholder(name).name != name
