"""Check the model, loss function and optimizers of a step; define its loss scale and weighted loss.

    loss * scale ─backward─► gradients * scale ─pack, times 1 / scale─► gradients

Packed gradients and residuals are unscaled, so changes of the GradScaler's scale do not affect them.
"""

# private tables of nn.Module
# pyright: reportPrivateUsage=false

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fxcomp import compat, errors
from fxcomp.capture.batch_type import check_model
from fxcomp.capture.optimizer import GivenOptimizers, Owned, all_optimizers, check_optimizer, class_name, groups_of
from fxcomp.capture.optimizer_state import materialize_state
from fxcomp.capture.probe import Habits, probe
from fxcomp.capture.watch import Watch
from fxcomp.errors import BadCall, Unsupported
from fxcomp.plan.kinds import check_is_trainable
from fxcomp.runtime.arrivals import has_foreign_hooks


@dataclass(frozen=True, slots=True)
class LossScale:
    """A GradScaler and the optimizers of this step that use it."""

    scaler: Any
    optimizers: tuple[torch.optim.Optimizer, ...]
    device: torch.device

    @classmethod
    def of(cls, scaler: Any, optimizers: Sequence[torch.optim.Optimizer], owned: Sequence[Owned]) -> LossScale | None:
        """Return the scale, if any. Raises Unsupported for fp16 parameters, as `scaler.unscale_` does."""
        if scaler is None:
            return None
        for each in owned:
            if each.parameter.dtype is torch.float16:
                raise Unsupported(
                    f"the parameter {each.name!r} is torch.float16, and so is its gradient: its small values become"
                    " zero when it is unscaled, as if the loss had not been scaled.\n"
                    "  Keep parameters in float32 and compute in float16 under torch.autocast, or leave scaler= out."
                )
        return cls(scaler, tuple(optimizers), owned[0].parameter.device)

    @property
    def scale(self) -> Tensor:
        """Factor on the loss: an fp32 scalar on the device."""
        return compat.scale_of(self.scaler, self.device)

    @property
    def inverse(self) -> Tensor:
        """Factor on gradients, rounded as in `scaler.unscale_`."""
        return self.scale.double().reciprocal().float()

    def check_updated(self) -> None:
        """Raise BadCall unless `scaler.update` was called after the last step."""
        if any(compat.awaits_update(self.scaler, optimizer) for optimizer in self.optimizers):
            raise BadCall(
                "scaler.update() was not called since the last step, or scaler.unscale_ or scaler.step was.\n"
                "  Call scaler.update() once after each step that updates parameters. The step itself unscales, clips"
                " and steps: leave scaler.scale, scaler.unscale_ and scaler.step out."
            )

    def changes(self) -> int:
        """Return the number of writes to the scale, without a device read."""
        return self.scale._version

    def tell(self, *, skipped: bool) -> None:
        """Report to the GradScaler, before its `update`, if the ranks skipped the step."""
        found_inf = torch.full((), float(skipped), device=self.device)
        for optimizer in self.optimizers:
            compat.mark_stepped(self.scaler, optimizer, found_inf)


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A loss whose elements have equal weight across ranks and micro-batches.

    The step differentiates (sum of all ranks' losses) / (sum of all ranks' counts). It returns this rank's mean loss.
    `WeightedLoss(losses.sum(), (labels != -100).sum())` is the mean over all labelled tokens.
    """

    sum: Tensor
    """Sum of the losses of this batch's elements."""
    count: Tensor | float
    """Number of elements, or sum of their nonnegative weights."""

    @property
    def counted(self) -> Tensor:
        """The count as a float64 tensor of shape [1], exact up to 2^53."""
        if isinstance(self.count, Tensor):
            if self.count.numel() != 1:
                raise Unsupported(
                    f"the count of a WeightedLoss has the shape {tuple(self.count.shape)}; it must be one number.\n"
                    "  Sum it up in loss_fn: WeightedLoss(losses.sum(), weights.sum())."
                )
            return self.count.detach().to(self.sum.device, torch.float64).reshape(1)
        if not isinstance(self.count, numbers.Real | torch.SymInt | torch.SymFloat):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Unsupported(
                f"the count of a WeightedLoss is a {type(self.count).__name__}; it must be a tensor of one element or a"
                " number."
            )
        return torch.full((1,), self.count, dtype=torch.float64, device=self.sum.device)

    @property
    def mean(self) -> Tensor:
        """Mean loss of this batch; the sum if the count is zero."""
        count = self.counted[0]
        return torch.where(count > 0, self.sum.detach() / count, self.sum.detach()).to(self.sum.dtype)


def split(result: Any) -> tuple[Any, Any, bool]:
    """Split loss_fn's result into loss, auxiliary result, and True if there is an auxiliary result."""
    parts: Any = result
    has_aux = isinstance(result, tuple) and len(parts) == 2
    loss, aux = parts if has_aux else (parts, ())
    return loss, aux, has_aux


LossFn = Callable[[nn.Module, Any], Any]
"""Function of the model and a batch; returns the scalar loss, or the loss and an auxiliary result."""


@dataclass(frozen=True, slots=True)
class Training:
    """Model, loss function, optimizers and gradient clipping of a step."""

    model: nn.Module
    loss_fn: LossFn
    watch: Watch
    """Python values that a capture depends on."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    owned: tuple[Owned, ...]
    max_grad_norm: float | None
    max_grad_value: float | None
    habits: Mapping[int, Habits]
    """Rules by which the optimizers initialize and update state, by group number."""
    finds_unused: bool = False
    """True if parameters unused by the loss get zero gradients."""
    loss_scale: LossScale | None = None

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
        """Match parameters with the optimizers' groups, and create missing optimizer state."""
        model, loss_fn = compat.uncompiled(model), compat.uncompiled(loss_fn)
        optimizers = all_optimizers(optimizer)
        owned = owned_parameters(model, optimizers)
        habits: dict[int, Habits] = {}
        for each in optimizers:
            habits |= probe(each, [owner for owner in owned if owner.optimizer is each])
        materialize_state(owned, habits)
        scale = LossScale.of(scaler, optimizers, owned)
        clipped = max_grad_norm, max_grad_value
        # Inductor, used on accelerators, does not support float symbols.
        watch = Watch(model, loss_fn, makes_live=owned[0].parameter.device.type == "cpu")
        return cls(model, loss_fn, watch, optimizers, owned, *clipped, habits, finds_unused, scale)

    @property
    def owners(self) -> dict[str, Owned]:
        return {owner.name: owner for owner in self.owned}

    @property
    def groups(self) -> list[dict[str, Any]]:
        return groups_of(self.optimizers)

    @property
    def device(self) -> torch.device:
        return self.owned[0].parameter.device


def owned_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Owned, ...]:
    """List the trainable parameters that the optimizers update. Raises Unsupported if a compiled step cannot train."""
    for optimizer in optimizers:
        check_optimizer(optimizer)
    _check_is_bare(model)
    _check_weights(model)
    check_model(model)
    _check_devices(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[int, tuple[torch.optim.Optimizer, int, int]] = {}
    places = [(optimizer, place) for optimizer in optimizers for place in range(len(optimizer.param_groups))]
    for index, (optimizer, group) in enumerate(places):
        for place, parameter in enumerate(optimizer.param_groups[group]["params"]):
            if id(parameter) in group_of and group_of[id(parameter)][0] is not optimizer:
                raise errors.Unsupported(
                    f"two optimizers update {names[id(parameter)]!r}: {class_name(group_of[id(parameter)][0])} and"
                    f" {class_name(optimizer)}.\n  Give each parameter to one of them."
                )
            if id(parameter) not in names:
                raise errors.Unsupported(
                    f"the optimizer updates a parameter that the model does not own: number {place} of parameter "
                    f"group {index}, shape {tuple(parameter.shape)}.\n"
                    "  Build the optimizer from this model's parameters, after the model has been moved or wrapped. If"
                    " it belongs to a criterion or an adapter outside of it, give compile_step one module of both,"
                    " nn.ModuleList([model, criterion]): loss_fn is called with that."
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
        raise errors.Unsupported("the optimizer updates no trainable parameter of the model")
    return tuple(owned)


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
"""torch wrappers that communicate in forward or backward."""


_PARAMETRIZED: Mapping[type, str] = {
    WeightNorm: "parametrizations.weight_norm",
    SpectralNorm: "parametrizations.spectral_norm",
    BasePruningMethod: "parametrize.register_parametrization, with a module that multiplies by the mask,",
}
"""torch hooks that compute a weight at each forward pass, with replacements."""


def _check_is_bare(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.Unsupported(f"the model is a {type(model).__name__}, which is no torch.nn.Module")
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        where = f"the module {name!r}" if name else "the model"
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise errors.Unsupported(
                    f"{where} is wrapped by {kind.__module__}.{kind.__name__}, which communicates by itself.\n"
                    "  Give compile_step the plain model (of a DistributedDataParallel, its .module): it averages"
                    " gradients itself. To keep the wrapper, see fxcomp.ddp_hook and, for fully_shard,"
                    " fxcomp.average_replicas."
                )
        if isinstance(module, torch.jit.ScriptModule):
            raise errors.Unsupported(
                f"{where} is a {type(module).__name__} of torch.jit: its parameters and code are in C++, where capture"
                " cannot replace them.\n"
                "  Give compile_step the model without torch.jit.script and torch.jit.trace, and script it after"
                " training. To train it as it is, wrap it in DistributedDataParallel and use fxcomp.ddp_hook."
            )


def _check_weights(model: nn.Module) -> None:
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        hooks = cast("Mapping[int, object]", module._forward_pre_hooks)  # pyright: ignore[reportUnknownMemberType]
        for kind, hook in product(_PARAMETRIZED, hooks.values()):
            if isinstance(hook, kind):
                raise errors.Unsupported(
                    f"the module {name!r} has a {type(hook).__name__} hook, which computes a weight and stores it at"
                    " each forward pass.\n"
                    f"  Use torch.nn.utils.{_PARAMETRIZED[kind]} instead, after removing the hook."
                )


def _check_devices(model: nn.Module) -> None:
    devices: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        devices.setdefault(str(tensor.device), name)
    if len(devices) > 1 and not compat.imagined_device():
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise errors.Unsupported(
            f"the model lies on {len(devices)} devices: {where}.\n  Move it to one with model.to(device)."
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    check_is_trainable(name, parameter.dtype)
    if has_foreign_hooks(parameter):
        raise errors.Unsupported(
            f"the parameter {name!r} has a gradient hook, which a captured step would not call.\n"
            "  Remove it, or do its work in the loss function."
        )
