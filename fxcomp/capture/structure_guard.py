"""Refuse changes that need another plan: other parameters, another structure, hooks that a step would not call."""

# Tables of a module are private, and have no public way in.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.capture.reach.places import Signature
from fxcomp.errors import StepChanged

_REQUIRES_GRAD = attrgetter("requires_grad")
_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


class StructureGuard:
    """The parameters, modules and groups of a compiled step. Raises StepChanged where they are others."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, finds_unused: bool = False):
        self._model, self._optimizers = model, optimizers
        self._finds_unused = finds_unused
        self._children = _children(model)
        named = _parameters(model)
        self._named = named
        self._parameters = tuple({id(p): p for p in named.values()}.values())
        self._names = {id(p): name for name, p in reversed(named.items())}
        self._trainable = list(map(_REQUIRES_GRAD, self._parameters))
        self._signatures = list(map(Signature.of, self._parameters))
        self._memory = list(map(Tensor.data_ptr, self._parameters))
        self._groups = self._parameters_of_groups()

    def check(self) -> None:
        """Compare what no table of a module shows: flags, hooks and memory of parameters, and the optimizer."""
        if list(map(_REQUIRES_GRAD, self._parameters)) != self._trainable:
            self._check_trainable()
        if any(map(_HOOKS[0], self._parameters)) or any(map(_HOOKS[1], self._parameters)):
            self._refuse_gradient_hook()
        if list(map(Tensor.data_ptr, self._parameters)) != self._memory:
            self._check_memory()
        if self._groups != self._parameters_of_groups():
            raise StepChanged(
                "the optimizer's groups hold other parameters than when the step was compiled.\n"
                "  Call compile_step again after add_param_group, or after moving a parameter."
            )
        for optimizer in self._optimizers:
            if kinds := compat.optimizer_hooks(optimizer):
                raise StepChanged(
                    f"the optimizer has a {kinds[0]} that it had not when the step was compiled, and that a compiled"
                    " step does not call.\n  Remove it, or do its work around step(batch)."
                )

    def _parameters_of_groups(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for each in self._optimizers for group in each.param_groups]

    def frozen(self) -> tuple[int, ...]:
        """List the parameters that are frozen now and were not, which only `find_unused_parameters` allows."""
        if not self._finds_unused:
            return ()
        now = map(_REQUIRES_GRAD, self._parameters)
        return tuple(k for k, (is_, was) in enumerate(zip(now, self._trainable, strict=True)) if was and not is_)

    def check_places(self) -> None:
        """Compare the place of every parameter and module; needed only if some table has changed."""
        _check_same(
            "parameter",
            self._named,
            _parameters(self._model),
            "Change parameters in place (with torch.no_grad(): p.copy_(...)), or call compile_step again.",
        )
        _check_same(
            "module",
            self._children,
            _children(self._model),
            "Call compile_step again after changing the model's structure.",
        )

    def _check_trainable(self) -> None:
        for parameter, was in zip(self._parameters, self._trainable, strict=True):
            if parameter.requires_grad != was and not (was and self._finds_unused):
                raise StepChanged(
                    f"requires_grad of {self._name(parameter)} changed from {was} to {parameter.requires_grad}.\n"
                    "  Call compile_step again: other gradients need another plan."
                )

    def _refuse_gradient_hook(self) -> None:
        hooked = next(p for p in self._parameters if any(hooks(p) for hooks in _HOOKS))
        raise StepChanged(
            f"the parameter {self._name(hooked)} has a gradient hook that it had not when the step was compiled, and"
            " that a compiled step does not call.\n  Remove it, or do its work in the loss function."
        )

    def _check_memory(self) -> None:
        for parameter, was in zip(self._parameters, self._signatures, strict=True):
            if Signature.of(parameter) != was:
                raise StepChanged(
                    f"the parameter {self._name(parameter)} was {was} when the step was compiled, and is"
                    f" {Signature.of(parameter)}.\n"
                    "  Move and convert the model before compile_step, or call it again."
                )
        self._memory = list(map(Tensor.data_ptr, self._parameters))

    def _name(self, parameter: Tensor) -> str:
        return repr(self._names[id(parameter)])


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _children(model: nn.Module) -> dict[str, nn.Module]:
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    return {name: module for name, module in named if name}


def _check_same(kind: str, before: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    for name in [*before, *now]:
        if now.get(name) is not before.get(name):
            what = "is another object than" if name in before and name in now else "is there no more as"
            what = "was not there" if name not in before else what
            raise StepChanged(f"the {kind} {name!r} {what} when the step was compiled.\n  {remedy}")
