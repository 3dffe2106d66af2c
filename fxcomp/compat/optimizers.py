"""Differences of optimizers between torch versions, GradScaler state, hooks, and facts about tensors."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.amp.grad_scaler import GradScaler as GradScaler
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import is_lazy

from fxcomp.compat.modes import Fake


def scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    """Return the scale, an fp32 scalar on the device; create it at the first call."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    scale: Any = scaler._scale
    return scale


def some_scaler_scales() -> bool:
    """Return whether a GradScaler of this process has scaled a loss."""
    scalers: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), GradScaler)]
    return any(each.is_enabled() and each._scale is not None for each in scalers)


def held_bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes, including a sparse tensor's indices."""
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    return sum(part.nbytes for part in parts)


def is_alias(one: Tensor, other: Tensor) -> bool:
    return torch._C._is_alias_of(one, other)  # pyright: ignore[reportAttributeAccessIssue]


def mark_stepped(scaler: GradScaler, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Record that an optimizer made or skipped its step, as `scaler.step` does."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.STEPPED
    state["found_inf_per_device"] = {found_inf.device: found_inf}


def awaits_update(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer stepped or its gradients were unscaled since `scaler.update`."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY


def global_module_hooks() -> dict[str, dict[int, Any]]:
    """Return the live tables of global module hooks, by kind."""
    from torch.nn.modules import module

    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return {f"the global {kind} hooks": getattr(module, f"_global_{kind}_hooks") for kind in kinds}


def watch_optimizer(optimizer: torch.optim.Optimizer, called: Any) -> None:
    """Call `called` before and after each eager step with the hook's arguments, and after `load_state_dict`.

    Optimizers that skip `super().__init__()` have no hooks.
    """
    if "_optimizer_step_pre_hooks" in vars(optimizer):
        optimizer.register_step_pre_hook(called)
        optimizer.register_step_post_hook(called)
        optimizer.register_load_state_dict_post_hook(called)


def optimizer_hooks(optimizer: torch.optim.Optimizer, ours: object) -> list[str]:
    """Return the kinds of hooks other than `ours` in an optimizer's step, including an own `step` method."""
    import torch.optim.optimizer as module

    of_step = [vars(optimizer).get(f"_optimizer_step_{kind}_hooks", {}).values() for kind in ("pre", "post")]
    own_step = vars(optimizer).get("step")
    tables: dict[str, Any] = {
        # Schedulers replace step by a counting wrapper.
        "step method of its own": own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"),
        "step pre-hook": [each for each in of_step[0] if each is not ours],
        "step post-hook": [each for each in of_step[1] if each is not ours],
        "global step pre-hook": module._global_optimizer_pre_hooks,
        "global step post-hook": module._global_optimizer_post_hooks,
    }
    return [kind for kind, table in tables.items() if table]


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark a step as taken, so that schedulers do not warn."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # what schedulers' own wrapper sets


def is_subclass(tensor: Tensor) -> bool:
    """Return whether a tensor wraps others, as a DTensor does."""
    return hasattr(tensor, "__tensor_flatten__")


suggested_format = suggest_memory_format
"""Function that returns the memory format of a result from its input, for kernels that do not keep strides."""


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake. Other tensors in a trace are constants."""
    return isinstance(tensor, Fake)


def knows_values(tensor: Tensor) -> bool:
    """Return whether a fake tensor has constant values, as torch.tensor([1, 2]) in a trace does."""
    return getattr(tensor, "constant", None) is not None


def is_uninitialized(tensor: Tensor) -> bool:
    return is_lazy(tensor)


def is_without_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is a zero tensor without memory, as made by autograd."""
    return torch._is_zerotensor(tensor)


def is_sparse_view(tensor: Tensor) -> bool:
    return tensor._is_view() and (tensor.is_sparse or (tensor._base is not None and tensor._base.is_sparse))


def strides(tensor: Tensor) -> Sequence[Any]:
    """Return a tensor's strides; 1 for sparse tensors. Stride 0 means that one value is repeated."""
    return tensor.stride() if tensor.layout is torch.strided else [1] * tensor.dim()


def begin_in_step(optimizer: torch.optim.Optimizer) -> None:
    """Let Adagrad, if its constructor did not run, create its state in the first step.

    Until torch 2.12, only the constructor creates Adagrad's state.
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
