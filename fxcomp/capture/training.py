"""The user's own objects that a step trains: model, loss function and optimizer. Some are refused."""

# Tables of a module's tensors are private, and have no public way in.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fxcomp import compat, errors
from fxcomp.capture.optimizer import Owned, check_optimizer, materialize_state

LossFn = Callable[[nn.Module, Any], Any]
"""Takes the model and a batch; returns the scalar loss, or the loss and an auxiliary result."""


@dataclass(frozen=True, slots=True)
class Training:
    """The model, loss function and optimizer of a step, and how its gradients are clipped."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    owned: tuple[Owned, ...]
    max_grad_norm: float | None
    fresh_state: Mapping[str, object] = field(default_factory=dict[str, object])
    """Optimizer state that was created for the capture, by parameter: these have not been stepped yet."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None = None,
    ) -> Training:
        """Match parameters with the optimizer's groups and create the optimizer's state where it has none."""
        owned = owned_parameters(model, optimizer)
        return cls(model, loss_fn, optimizer, owned, max_grad_norm, materialize_state(optimizer, owned))

    @property
    def device(self) -> torch.device:
        """The one device of the model."""
        return self.owned[0].parameter.device


def owned_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Owned, ...]:
    """Match the optimizer's parameters with the model's. Raises for those that cannot be captured rightly."""
    check_optimizer(optimizer)
    _check_is_bare(model)
    _check_devices(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise errors.ForeignParameter(
                    f"the optimizer updates a parameter that the model does not own: number {place} of parameter "
                    f"group {index}, shape {tuple(parameter.shape)}.\n"
                    "  Build the optimizer from this model's parameters, after the model has been moved or wrapped."
                )
            group_of[id(parameter)] = index
    owned: list[Owned] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in group_of:
            warnings.warn(
                f"fxcomp: no parameter group updates {name!r}: it stays as it is and its gradient is not reduced. "
                "Give it to the optimizer, or set requires_grad=False.",
                stacklevel=compat.users_level(),
            )
            continue
        _check_parameter(name, parameter)
        owned.append(Owned(name, parameter, group_of[id(parameter)]))
    if not owned:
        raise errors.UnsupportedParameter("the optimizer updates no trainable parameter of the model")
    return tuple(owned)


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of torch that communicate in their forward or backward pass."""


def _check_is_bare(model: nn.Module) -> None:
    """Refuse a model that reduces or shards by itself: gradients would be reduced twice, or be parts."""
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                where = f"the module {name!r}" if name else "the model"
                raise errors.UnsupportedModel(
                    f"{where} is wrapped by {kind.__module__}.{kind.__name__}, which communicates by itself.\n"
                    "  Give compile_step the plain model (of a DistributedDataParallel, its .module): it averages"
                    " gradients itself. Sharded parameters are not handled."
                )


def _check_devices(model: nn.Module) -> None:
    devices: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        devices.setdefault(str(tensor.device), name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise errors.MixedDevices(
            f"the model lies on {len(devices)} devices: {where}.\n  Move it to one with model.to(device)."
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if compat.is_subclass(parameter):
        raise errors.UnsupportedParameter(
            f"the parameter {name!r} is a {type(parameter.data).__name__}, which wraps other tensors; sharded and"
            " otherwise wrapped parameters are not handled.\n  Build the model from plain parameters."
        )
    if parameter.dtype is not torch.float32:
        raise errors.UnsupportedParameter(
            f"the parameter {name!r} is {parameter.dtype}; only float32 parameters can be trained.\n"
            "  Keep the parameters in float32 and use torch.autocast inside the loss function."
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise errors.UnsupportedParameter(
            f"the parameter {name!r} has a gradient hook, which a captured step would not call.\n"
            "  Remove it, or do its work in the loss function."
        )
