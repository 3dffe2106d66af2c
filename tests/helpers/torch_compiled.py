"""Models that `torch.compile(backend="fxcomp")` compiles, dense unless a test asks otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxcomp
from helpers.gathered import gathered

QUICK = {"aot_inductor.debug_compile": True, "cpp.simdlen": 1, "compile_threads": 1}
"""Inductor's C++ without optimizations takes a third of the time to compile, and computes the same."""


def compiled(model: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
    """Compile with the watch where the model is given, else with the backend alone."""
    given = gathered(**{"plan": "dense", **options})
    if "model" in given:
        return fxcomp.compile_model(given.pop("model"), **given)
    return torch.compile(model, backend="fxcomp", options=given)


def own_options(model: nn.Module) -> Callable[..., Any]:
    """Options of its own, so that the models of one process are told apart."""
    return compiled(model, model=model)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def step(call: Callable[..., Any]) -> None:
    call(torch.randn(3, 4)).sum().backward()
