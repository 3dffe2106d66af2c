"""Options of the backend: each that cannot be is named."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

from fxcomp.frontends.backend_options import KNOWN, OF_WHOLE_STEPS, read_options
from fxcomp.frontends.compile_step import compile_step
from fxcomp.options import Checks
from fxcomp.plan.compress import Compress


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compres": "int8"}, "there is no option 'compres'; did you mean 'compress'?"),
        ({"race": "auto"}, "there is no option 'race'"),
        ({"checks": Checks()}, "there is no option 'checks' here: it is about whole steps"),
        ({"compress": Compress(pins={"wieght": "int8"})}, "matches no parameter; did you mean 'weight'?"),
        ({"compress": 3}, "is an error budget, which goes into a Compress"),
        ({"inductor": "no"}, "options['inductor'] is 'no'.\n  True lets Inductor compile"),
        ({"model": "mlp"}, "options['model'] must be the module that is compiled; it is a str"),
        ({"ignore": ["bias"]}, "needs options['model']"),
        ({"model": nn.Linear(2, 2), "ignore": ["bais"]}, "did you mean 'bias'?"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], text: str):
    model = torch.compile(nn.Linear(2, 2), backend="fxcomp", options=options)
    with pytest.raises(BackendCompilerFailed) as raised:
        model(torch.ones(1, 2))
    assert "BadOption" in str(raised.value)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "on_gpu", "on_cpu"),
    [({}, True, False), ({"inductor": False}, False, False), ({"inductor": True}, True, True)],
)
def test_inductor_compiles_what_lies_on_a_gpu_unless_told_otherwise(asked: dict[str, bool], on_gpu: bool, on_cpu: bool):
    with FakeTensorMode():
        there = torch.empty(2, device="cuda")
    chosen, here = read_options(asked, {}), torch.empty(2)
    assert chosen.uses_inductor([3, here, there]) is on_gpu
    assert chosen.uses_inductor([3, here]) is on_cpu


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_mode_of_torch_compile_is_for_other_backends():
    model = torch.compile(nn.Linear(2, 2), backend="fxcomp", mode="max-autotune")
    with pytest.raises(BackendCompilerFailed, match=r"mode='max-autotune' is torch.compile's own.*\n.*compress"):
        model(torch.ones(1, 2))


def test_every_option_of_a_compiled_step_is_known_or_said_to_be_missing():
    options = [p.name for p in inspect.signature(compile_step).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert sorted(options) == sorted({*KNOWN, *OF_WHOLE_STEPS} - {"model", "ignore", "inductor"})
