"""Differences between the optimizers of torch's versions."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor


def begin_in_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer whose constructor did not run make its state in its first step.

    All do, but for Adagrad until torch 2.12.
    """
    if not isinstance(optimizer, torch.optim.Adagrad) or not _adagrad_begins_when_made():
        return
    made: Any = optimizer
    usual = made._init_group

    def init_group(group: Mapping[str, Any], *lists: Any) -> Any:
        for parameter in group["params"]:
            if parameter.grad is not None and not made.state[parameter]:
                made.state[parameter].update(_beginning(parameter, group, made.defaults))
        return usual(group, *lists)

    made._init_group = init_group


@cache
def _adagrad_begins_when_made() -> bool:
    return bool(torch.optim.Adagrad([torch.zeros(1)]).state)


def _beginning(parameter: Tensor, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    start = defaults["initial_accumulator_value"]
    one = torch.optim.Adagrad([parameter], initial_accumulator_value=start, fused=group.get("fused"))
    return dict(one.state[parameter])
