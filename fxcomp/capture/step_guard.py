"""Check before each step that the captured step still applies.

Tracing has no guards, so each call compares parameters, modules, hooks, optimizer options, and torch's settings and
modes. A difference causes another capture (a new key) or an error.
"""

# private tables of nn.Module
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.capture.batch_type import Change
from fxcomp.capture.optimizer import (
    NOT_OF_THE_UPDATE,
    baked,
    class_name,
    forget_written,
    groups_of,
    is_torchs,
    live_numbers,
)
from fxcomp.capture.training import Training
from fxcomp.capture.untouched import put_back_if_refused
from fxcomp.capture.watch import Signature, Watched
from fxcomp.errors import StepChanged, Unsupported
from fxcomp.runtime.arrivals import has_foreign_hooks

_REQUIRES_GRAD = attrgetter("requires_grad")
_BACKWARD_HOOKS = attrgetter("_backward_hooks")
_ACCUMULATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class StructureGuard:
    """Parameters, modules and parameter groups at compilation, to compare with the current ones."""

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
        self._groups: list[list[Tensor]] = [list(group["params"]) for group in groups_of(optimizers)]

    def check(self) -> None:
        """Raise StepChanged if requires_grad, memory, group or hooks of a parameter, or optimizer hooks, changed."""
        if list(map(_REQUIRES_GRAD, self._parameters)) != self._trainable:
            self._check_trainable()
        if any(map(_BACKWARD_HOOKS, self._parameters)) or any(map(_ACCUMULATE_HOOKS, self._parameters)):
            self._check_gradient_hooks()
        if list(map(Tensor.data_ptr, self._parameters)) != self._memory:
            self._check_memory()
        now = groups_of(self._optimizers)
        if len(now) != len(self._groups) or not all(map(_has_parameters, now, self._groups)):
            raise StepChanged(
                "the optimizer's groups hold other parameters than when the step was compiled.\n"
                "  Call compile_step again after add_param_group, or after moving a parameter."
            )
        for optimizer in self._optimizers:
            if kinds := compat.optimizer_hooks(optimizer, forget_written):
                raise StepChanged(
                    f"the optimizer has a {kinds[0]} that was added after the step was compiled, and that a compiled"
                    " step does not call.\n  Remove it, or do its work around step(batch)."
                )

    def frozen(self) -> tuple[int, ...]:
        """Return the indices of parameters frozen since compilation; empty without `find_unused_parameters`."""
        if not self._finds_unused:
            return ()
        now = map(_REQUIRES_GRAD, self._parameters)
        return tuple(k for k, (is_, was) in enumerate(zip(now, self._trainable, strict=True)) if was and not is_)

    def check_places(self) -> None:
        """Raise StepChanged if a parameter or module was replaced."""
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

    def _check_gradient_hooks(self) -> None:
        for hooked in filter(has_foreign_hooks, self._parameters):
            raise StepChanged(
                f"the parameter {self._name(hooked)} has a gradient hook that was added after the step was compiled,"
                " and that a compiled step does not call.\n  Remove it, or do its work in the loss function."
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


def _has_parameters(group: dict[str, Any], known: list[Tensor]) -> bool:
    return len(group["params"]) == len(known) and all(map(is_, group["params"], known))


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


READ: dict[str, Callable[[], Hashable]] = {
    "autocast on the CPU": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "autocast on CUDA": lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
    "the cache of autocast": torch.is_autocast_cache_enabled,
    "the default dtype": torch.get_default_dtype,
    "the default device": compat.default_device,
    "torch.use_deterministic_algorithms": compat.determinism,
    "torch.backends.cudnn": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic),
    "the precision of float32": compat.float32_precision,
    "which libraries the CPU may use": compat.cpu_libraries,
    "which kernels attention may use": lambda: (
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ),
    "the order of attention's kernels": compat.attention_order,
    "the number of threads": torch.get_num_threads,
    "how subclasses of tensors are asked": compat.subclass_dispatch,
}
"""Readers of the settings that a capture fixes, by name."""


def surroundings() -> tuple[Hashable, ...]:
    """Read the settings in READ. Raises Unsupported for modes that a compiled step would ignore."""
    if modes := compat.function_modes():
        _refuse(f"the TorchFunctionMode {modes[0]} is", "Enter it inside loss_fn, where it is traced with the rest.")
    if mode := compat.dispatch_mode():
        _refuse(f"the TorchDispatchMode {mode} is", "Enter it inside loss_fn, or leave it while the step runs.")
    if compat.has_saved_tensor_hooks():
        _refuse(
            "hooks for saved tensors (torch.autograd.graph) are",
            "Enter them inside loss_fn, around the forward pass: there they are traced.",
        )
    if compat.is_inside_transform():
        _refuse("a transformation of torch.func, or forward-mode differentiation, is", "Call the step outside of it.")
    if torch.is_anomaly_enabled():
        _refuse(
            "anomaly detection (torch.autograd.set_detect_anomaly) is",
            "It watches autograd's backward pass, which a compiled step does not run. Switch it off; to find a gradient"
            " that is not finite, run loss_fn eagerly under it with this batch.",
        )
    return tuple([read() for read in READ.values()])


def _refuse(what: str, remedy: str) -> None:
    raise Unsupported(f"{what} on around the compiled step, which would not take part in it.\n  {remedy}")


T = TypeVar("T")


class Key(NamedTuple):
    """Everything that a capture depends on, except the batch."""

    watched: int
    """Result of `Watch.number`. Ranks may number the same values differently."""
    options: tuple[Hashable, ...]
    attributes: tuple[Hashable, ...]
    """Attributes of optimizers of user classes."""
    surroundings: tuple[Hashable, ...]
    frozen: tuple[int, ...] = ()


class StepGuard:
    """Current key of a step, computed before each step."""

    def __init__(self, training: Training):
        self._training = training
        self._structure = StructureGuard(training.model, training.optimizers, finds_unused=training.finds_unused)
        self._options = [_BakedOptions() for _ in training.groups]

    def key(self) -> Key:
        """Return the key. Raises StepChanged for a change that needs another plan."""
        self._structure.check()
        watched = self._training.watch.number(before_look=self._structure.check_places)
        groups = self._training.groups
        options = tuple(known.read(group) for known, group in zip(self._options, groups, strict=True))
        attributes = tuple(map(_attributes, self._training.optimizers))
        return Key(watched, options, attributes, surroundings(), self._structure.frozen())

    def watched(self) -> Watched:
        return self._training.watch.watched()

    def capturing(self) -> AbstractContextManager[None]:
        """Do not count changes of floats (LIVE_AFTER in watch.py) inside the context."""
        return self._training.watch.capturing()

    def change(self, old: Key, new: Key) -> Change | None:
        if change := self._training.watch.difference(old.watched, new.watched):
            return change
        for number, (was, now) in enumerate(zip(old.options, new.options, strict=True)):
            if was != now:
                return Change(f"the options of parameter group {number}", str(was), str(now))
        for optimizer, was, now in zip(self._training.optimizers, old.attributes, new.attributes, strict=True):
            if was != now:
                return Change(f"the attributes of the {class_name(optimizer)}", str(was), str(now))
        for name, was, now in zip(READ, old.surroundings, new.surroundings, strict=True):
            if was != now:
                return Change(name, str(was), str(now))
        if old.frozen != new.frozen:
            return Change("the number of frozen parameters", str(len(old.frozen)), str(len(new.frozen)))
        return None


def settled(guard: StepGuard, trace: Callable[[], T], graph: Callable[[T], GraphModule]) -> T:
    """Return `trace()`. If tracing changed the model, as a lazy set-up does, return a second trace.

    Raises StepChanged if the second trace changes the model too, or if its graph differs from the first.
    """
    start = guard.key()
    with put_back_if_refused(guard.watched()), guard.capturing():
        return _settled(guard, start, trace, graph)


def _settled(guard: StepGuard, start: Key, trace: Callable[[], T], graph: Callable[[T], GraphModule]) -> T:
    first = trace()
    ready = guard.key()
    if ready == start:
        return first
    traced = trace()
    again = guard.key()
    if again != ready:
        raise StepChanged(
            f"the forward pass itself changes the model: {guard.change(ready, again)}. A compiled step"
            " does not run that Python again.\n  Keep such counters outside the model, or in a buffer."
        )
    if not _compute_the_same(graph(first), graph(traced)):
        raise StepChanged(
            f"the forward pass sets itself up at its first call, which computes something else than later calls:"
            f" {guard.change(start, ready)}. A compiled step would begin as the second call.\n"
            "  Let it decide by a buffer, or call it once, with a batch like this one, before the step."
        )
    return traced


def _compute_the_same(one: GraphModule, other: GraphModule) -> bool:
    if str(one.graph) != str(other.graph):
        return False
    names = [cast("str", node.target) for node in one.graph.nodes if node.op == "get_attr"]
    pairs = [(attrgetter(name)(one), attrgetter(name)(other)) for name in names]
    return all(a is b or compat.is_fake(a) or torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


class _BakedOptions:
    """Options of a parameter group. Live numbers (graph inputs) appear only by name."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._baked: tuple[Hashable, ...] = ()

    def read(self, group: dict[str, Any]) -> tuple[Hashable, ...]:
        """Return the options. Reuse the last result if every value is the same object and none is a list or dict."""
        values = [*group, *group.values()]
        if len(values) != len(self._seen) or not all(map(is_, values, self._seen)):
            self._baked = _baked_options(group)
            has_parts = any(isinstance(v, list | dict) for k, v in group.items() if k not in _NOT_BAKED)
            self._seen = [] if has_parts else values
        return self._baked


def _baked_options(group: dict[str, Any]) -> tuple[Hashable, ...]:
    # A tensor lr is always live; reading it would wait for its device.
    live = live_numbers({**group, "lr": 0.0} if isinstance(group.get("lr"), Tensor) else group)
    own = tuple(
        (key, baked(value))
        for key, value in group.items()
        if key not in _NOT_BAKED and not {key, f"{key}_0", f"{key}_1"} & live.keys()
    )
    return (own, tuple(live))


def _attributes(optimizer: torch.optim.Optimizer) -> tuple[Hashable, ...]:
    if is_torchs(optimizer):
        return ()
    return tuple((key, baked(value)) for key, value in vars(optimizer).items() if key not in NOT_OF_THE_UPDATE)


_NOT_BAKED = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Options that no update reads."""
