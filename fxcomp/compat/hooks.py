"""Hooks of modules and optimizers."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch


def global_module_hooks() -> dict[str, dict[int, Any]]:
    """Give the live tables of the hooks that every module runs, by kind."""
    from torch.nn.modules import module

    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return {f"the global {kind} hooks": getattr(module, f"_global_{kind}_hooks") for kind in kinds}


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """Name the kinds of hooks that an optimizer's step would run."""
    import torch.optim.optimizer as module

    own_step = vars(optimizer).get("step")
    tables: dict[str, Any] = {
        # Schedulers put a step of their own in its place, to count.
        "step method of its own": own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"),
        "step pre-hook": optimizer._optimizer_step_pre_hooks,
        "step post-hook": optimizer._optimizer_step_post_hooks,
        "global step pre-hook": module._global_optimizer_pre_hooks,
        "global step post-hook": module._global_optimizer_post_hooks,
    }
    return [kind for kind, table in tables.items() if table]


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that this optimizer's step was taken: else they warn of a wrong order."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # what schedulers' own wrapper sets
