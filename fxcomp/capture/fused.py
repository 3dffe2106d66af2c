"""Choose torch's fused operator for a parameter's update, if there is one.

The captured graph keeps the traced update. `passes/fuse_updates.py` replaces it if the fused operator is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxcomp.capture.optimizer import Owned, live_numbers
from fxcomp.graph.info import FusedUpdate

_aten = torch.ops.aten


def fused_update_of(owner: Owned) -> FusedUpdate | None:
    """Return the operator for torch's Adam, AdamW and SGD; None for other classes and amsgrad."""
    kind, options = type(owner.optimizer), owner.options
    if options.get("amsgrad"):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        operator = _aten._fused_adamw_ if options.get("decoupled_weight_decay") else _aten._fused_adam_
        numbers = {"lr": "lr", "beta1": "betas_0", "beta2": "betas_1", "weight_decay": "weight_decay"}
        fixed = {"eps": options["eps"], "amsgrad": False, "maximize": options["maximize"]}
        return _update(owner, operator.default, ("exp_avg", "exp_avg_sq", ""), "step", numbers, fixed)
    if kind is torch.optim.SGD:
        states = ("momentum_buffer",) if options["momentum"] else ("",)
        numbers = {name: name for name in ("weight_decay", "momentum", "lr", "dampening")}
        fixed = {"nesterov": options["nesterov"], "maximize": options["maximize"], "is_first_step": False}
        return _update(owner, _aten._fused_sgd_.default, states, "", numbers, fixed)
    return None


def _update(
    owner: Owned,
    operator: Any,
    states: tuple[str, ...],
    counter: str,
    numbers: Mapping[str, str],
    fixed: Mapping[str, float],
) -> FusedUpdate:
    live = live_numbers(owner.options)
    given = {name: key if key in live else 0.0 for name, key in numbers.items()}
    return FusedUpdate(operator, states, counter, (*given.items(), *fixed.items()), owner.group)
