"""Options of the backend: each that cannot be is named."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fxcomp.frontends.backend_options import KNOWN, OF_WHOLE_STEPS
from fxcomp.frontends.compile_step import compile_step


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plann": "dense"}, "there is no option 'plann'; did you mean 'plan'?"),
        ({"race": "auto"}, "options['race'] can only be 'off' here; it is 'auto'. The backend sees backward passes"),
        ({"race": "of"}, "options['race'] can only be 'off' here; it is 'of'."),
        ({"replan": "auto"}, "there is no option 'replan' here: it is about whole steps"),
        ({"per_parameter": {"wieght": "int8"}}, "matches no parameter; did you mean 'weight'?"),
        ({"per_parameter": {"*": "int9"}}, "per_parameter['*']='int9' names no strategy"),
        ({"per_parameter": {"*": "int8"}, "plan": "dense"}, "and per_parameter= what some do: keep one"),
        ({"mode": "lossles"}, "there is no mode 'lossles'; did you mean 'lossless'?"),
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


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_mode_is_an_option_too():
    model = torch.compile(nn.Linear(2, 2), backend="fxcomp", mode="agressive")
    with pytest.raises(BackendCompilerFailed, match="did you mean 'aggressive'"):
        model(torch.ones(1, 2))


def test_every_option_of_a_compiled_step_is_known_or_said_to_be_missing():
    options = [p.name for p in inspect.signature(compile_step).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert sorted(options) == sorted({*KNOWN, *OF_WHOLE_STEPS} - {"model", "ignore"})


@pytest.mark.usefixtures("fresh_dynamo")
def test_no_race_may_be_asked_for():
    model = torch.compile(nn.Linear(2, 2), backend="fxcomp", options={"race": "off"})
    assert model(torch.ones(1, 2)).shape == (1, 2)
