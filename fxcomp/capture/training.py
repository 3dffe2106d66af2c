"""The user's own objects that a step trains: model, loss function and optimizer. Some are refused."""

# Tables of a module's tensors are private, and have no public way in.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fxcomp import compat, errors
from fxcomp.capture.loss_scale import LossScale
from fxcomp.capture.optimizer import GivenOptimizers, Owned, all_optimizers, check_optimizer, class_name, groups_of
from fxcomp.capture.optimizer_state import materialize_state
from fxcomp.capture.probe import Habits, probe
from fxcomp.capture.tensor_kind import check_model
from fxcomp.plan.element_type import check_is_trainable

LossFn = Callable[[nn.Module, Any], Any]
"""Takes the model and a batch; returns the scalar loss, or the loss and an auxiliary result."""


@dataclass(frozen=True, slots=True)
class Training:
    """The model, loss function and optimizers of a step, and how its gradients are clipped."""

    model: nn.Module
    loss_fn: LossFn
    optimizers: tuple[torch.optim.Optimizer, ...]
    owned: tuple[Owned, ...]
    max_grad_norm: float | None
    max_grad_value: float | None
    habits: Mapping[int, Habits]
    """The use that updates make of a parameter's state, by the number of its group."""
    fresh_state: Mapping[str, object] = field(default_factory=dict[str, object])
    """Optimizer state that was created for the capture, by parameter: these have not been stepped yet."""
    finds_unused: bool = False
    """The loss may leave out parameters for some batches: they get zeros for a gradient."""
    loss_scale: LossScale | None = None
    """The factor on the loss before the backward pass; gradients are divided by it."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: GivenOptimizers,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        *,
        finds_unused: bool = False,
        scaler: Any = None,
    ) -> Training:
        """Match parameters with the optimizers' groups and create the optimizers' state where they have none."""
        optimizers = all_optimizers(optimizer)
        owned = owned_parameters(model, optimizers)
        habits: dict[int, Habits] = {}
        for each in optimizers:
            habits |= probe(each, [owner for owner in owned if owner.optimizer is each])
        fresh = materialize_state(owned, habits)
        scale = LossScale.of(scaler, optimizers, owned)
        clipped = max_grad_norm, max_grad_value
        return cls(model, loss_fn, optimizers, owned, *clipped, habits, fresh, finds_unused, scale)

    @property
    def owners(self) -> dict[str, Owned]:
        """The trained parameters by name."""
        return {owner.name: owner for owner in self.owned}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return groups_of(self.optimizers)

    @property
    def device(self) -> torch.device:
        """The one device of the model."""
        return self.owned[0].parameter.device


def owned_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Owned, ...]:
    """Match the optimizers' parameters with the model's. Raises for those that cannot be captured rightly."""
    for optimizer in optimizers:
        check_optimizer(optimizer)
    _check_is_bare(model)
    check_model(model)
    _check_devices(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[int, tuple[torch.optim.Optimizer, int, int]] = {}
    places = [(optimizer, place) for optimizer in optimizers for place in range(len(optimizer.param_groups))]
    for index, (optimizer, group) in enumerate(places):
        for place, parameter in enumerate(optimizer.param_groups[group]["params"]):
            if id(parameter) in group_of and group_of[id(parameter)][0] is not optimizer:
                raise errors.UnsupportedOptimizer(
                    f"two optimizers update {names[id(parameter)]!r}: {class_name(group_of[id(parameter)][0])} and"
                    f" {class_name(optimizer)}.\n  Give each parameter to one of them."
                )
            if id(parameter) not in names:
                raise errors.ForeignParameter(
                    f"the optimizer updates a parameter that the model does not own: number {place} of parameter "
                    f"group {index}, shape {tuple(parameter.shape)}.\n"
                    "  Build the optimizer from this model's parameters, after the model has been moved or wrapped."
                )
            group_of[id(parameter)] = optimizer, group, index
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
        owned.append(Owned(name, parameter, *group_of[id(parameter)]))
    if not owned:
        raise errors.UnsupportedParameter("the optimizer updates no trainable parameter of the model")
    return tuple(owned)


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of torch that communicate in their forward or backward pass."""


def _check_is_bare(model: nn.Module) -> None:
    """Refuse a model that reduces or shards by itself: gradients would be reduced twice, or be parts."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UnsupportedModel(f"the model is a {type(model).__name__}, which is no torch.nn.Module")
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                where = f"the module {name!r}" if name else "the model"
                raise errors.UnsupportedModel(
                    f"{where} is wrapped by {kind.__module__}.{kind.__name__}, which communicates by itself.\n"
                    "  Give compile_step the plain model (of a DistributedDataParallel, its .module): it averages"
                    " gradients itself. To keep the wrapper, see fxcomp.ddp_hook and, for fully_shard,"
                    " fxcomp.average_replicas."
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
    check_is_trainable(name, parameter.dtype)
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise errors.UnsupportedParameter(
            f"the parameter {name!r} has a gradient hook, which a captured step would not call.\n"
            "  Remove it, or do its work in the loss function."
        )
