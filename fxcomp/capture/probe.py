"""Find side effects and state of an optimizer's step, by stepping a stand-in for the smallest parameter of each group.

The probe records the first value that a first step writes to each state entry. These values are the initial state if
a step that starts with them gives exactly the first step's result.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxcomp import compat, errors
from fxcomp.capture.optimizer import Owned, baked, class_name, is_number, is_torchs, refused
from fxcomp.capture.shadow import plain_options, shadow_of, step_alone, step_together, unseen


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Parameter, state and group after the first step of a stand-in parameter."""

    value: Tensor
    begun: Mapping[str, Any]
    """First value that the step wrote to each state entry."""
    state: Mapping[str, Any]
    group: Mapping[str, Any]


def first_step(shadow: torch.optim.Optimizer, options: Mapping[str, Any], value: Tensor, gradient: Tensor) -> FirstStep:
    """Take the first step of a shadow (copied optimizer) on copies of a parameter's value and gradient."""
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    group: dict[str, Any] = {**options, "params": [parameter]}
    usual, recorders = shadow.state, _Recorders()
    shadow.state, shadow.param_groups = recorders, [group]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        shadow.step()
    finally:
        shadow.state, shadow.param_groups = usual, []
    recorder = recorders[parameter]
    return FirstStep(parameter.detach(), recorder.begun, dict(recorder), group)


class _StateRecorder(dict[str, Any]):
    def __init__(self, given: Mapping[str, Any] | None = None):
        super().__init__()
        self.begun: dict[str, Any] = {}
        self.update(given or {})

    def __setitem__(self, key: str, value: Any) -> None:
        self.begun.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **more: Any) -> None:
        for key, value in dict(*given, **more).items():
            self[key] = value


class _Recorders(dict[Tensor, _StateRecorder]):
    def __missing__(self, key: Tensor) -> _StateRecorder:
        super().__setitem__(key, _StateRecorder())
        return self[key]

    def __setitem__(self, key: Tensor, value: Mapping[str, Any]) -> None:
        super().__setitem__(key, _StateRecorder(value))


_STEPS = 4
"""Number of steps for which a counter must grow by the same increment."""

_RATE = 1e-3
"""Learning rate of stand-ins if the group's rate is zero, as in a warm-up."""

_TORCHS_NOTES = ("_opt_called", "_warned_capturable_if_run_uncaptured")


@dataclass(frozen=True, slots=True)
class Habits:
    """Rules by which an optimizer's step initializes and updates the state of a parameter."""

    counters: Mapping[str, float] = field(default_factory=dict[str, float])
    """Increment per step of each counter, a Python number in the state."""
    zeros: frozenset[str] = frozenset()
    """State tensors that the first step sets from the gradient, as SGD sets its momentum buffer.

    A first step that starts from zeros has the same result.
    """
    follows_parameter: bool = False
    """True if the initial value of a state entry depends on the parameter's values."""
    is_like_others: bool = True
    """True if the first step uses the same formula as later steps; otherwise the initial state is unknown."""

    def beginning(self, step: FirstStep) -> dict[str, Any]:
        """Return the state before a first step."""
        made: dict[str, Any] = {}
        for key, value in step.begun.items():
            if key in self.counters:
                made[key] = step.state[key] - self.counters[key]
            else:
                made[key] = torch.zeros_like(value) if key in self.zeros and isinstance(value, Tensor) else value
        return made


def probe(optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> dict[int, Habits]:
    """Return `Habits` by group number. Raises Unsupported for side effects that a graph of one update cannot have."""
    members: dict[int, list[Owned]] = {}
    for owner in sorted(owned, key=lambda owner: owner.parameter.numel()):
        members.setdefault(owner.group, []).append(owner)
    known: dict[Any, Habits] = {}
    found: dict[int, Habits] = {}
    with unseen(), named(optimizer):
        for group, owners in members.items():
            smallest = owners[0]
            options = ((key, baked(value)) for key, value in smallest.options.items() if key not in ("lr", "params"))
            likeness = (*options, smallest.parameter.dtype)
            if likeness not in known:
                known[likeness] = _Probe(optimizer, smallest).habits()
            found[group] = known[likeness]
        if not is_torchs(optimizer):
            _check_are_apart(optimizer, [owners[:2] for owners in members.values()])
            _check_tells_by_values(optimizer, owned)
    return found


def check_habits(optimizer: torch.optim.Optimizer, owned: Sequence[Owned], known: Mapping[int, Habits]) -> None:
    """Raise StepChanged if new options of a user's optimizer change counters or make the initial state unknown."""
    if is_torchs(optimizer):
        return
    for group, now in probe(optimizer, owned).items():
        before = known[group]
        if now.counters != before.counters or (before.is_like_others and not now.is_like_others):
            raise errors.StepChanged(
                f"parameter group {group} of {class_name(optimizer)} has other options than when the step was compiled,"
                " and with them the class keeps other state.\n  Call compile_step again after changing them."
            )


class _Probe:
    def __init__(self, optimizer: torch.optim.Optimizer, owner: Owned):
        self._optimizer, self._shadow = optimizer, shadow_of(optimizer)
        self._options = probe_options(owner)
        self._draws = Draws(owner.parameter)

    def habits(self) -> Habits:
        value, elsewhere = self._draws(0.1), self._draws(0.1)
        gradient, another = self._draws(), self._draws()
        attributes = _facts(vars(self._shadow))
        first = first_step(self._shadow, self._options, value, gradient)
        self._check_unchanged("its parameter group", _facts(self._options), _facts(first.group))
        self._check_unchanged("itself", attributes, _facts(vars(self._shadow)))
        if not is_torchs(self._optimizer) and not first.state and torch.equal(first.value, value):
            self._refuse("changes neither the parameters of its groups nor a state of theirs")

        of_another = first_step(self._shadow, self._options, value, another)
        of_other_value = first_step(self._shadow, self._options, elsewhere, gradient)
        counters = self._counters(first)
        zeros = _differing(first.begun, of_another.begun) - set(counters)
        follows = _differing(first.begun, of_other_value.begun) - zeros - set(counters)
        habits = Habits(counters, zeros, bool(follows))
        alike = self._is_first(habits.beginning(first), first, value, gradient)
        return habits if alike else replace(habits, is_like_others=False)

    def _is_first(self, state: Mapping[str, Any], first: FirstStep, value: Tensor, gradient: Tensor) -> bool:
        # SGD's first step ignores dampening.
        options = self._options | ({"dampening": 0.0} if "dampening" in self._options else {})
        after, states = stepped(self._shadow, options, value, gradient, state)
        return same(after, first.value) and all(same(each, states.get(key)) for key, each in first.state.items())

    def _counters(self, first: FirstStep) -> dict[str, float]:
        """Return the increment per step of each Python number in the state. Raises Unsupported if increments vary."""
        seen: dict[str, list[Any]] = {}
        value, state = first.value, first.state
        for _ in range(_STEPS):
            for key in state:
                seen.setdefault(key, []).append(state[key])
            value, state = stepped(self._shadow, self._options, value, self._draws(), state)
        return {key: step for key, values in seen.items() if (step := self._growth(key, values)) != 0}

    def _growth(self, key: str, values: Sequence[Any]) -> float:
        kinds = sorted({type(value).__name__ for value in values})
        if all(isinstance(value, Tensor) for value in values) or all(value is None for value in values):
            return 0
        if not all(map(is_number, values)):
            self._refuse(
                f"keeps a {' or '.join(kinds)} under {key!r} of its state, where tensors and numbers are followed"
            )
        growth = {after - before for before, after in pairwise(values)}
        if len(growth) > 1:
            self._refuse(
                f"keeps a Python number under {key!r} of its state that changes unevenly, from {values[0]:g} to"
                f" {values[1]:g} to {values[2]:g}: a graph would repeat one of them",
                "Keep it in a tensor",
            )
        return growth.pop()

    def _check_unchanged(self, what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for key in {**before, **after}:
            if key not in _TORCHS_NOTES and not same(before.get(key), after.get(key)):
                self._refuse(
                    f"writes to {key!r} of {what}, which the update of one parameter must leave alone",
                    "Keep it in the state of each parameter",
                )

    def _refuse(self, why: str, remedy: str = "") -> NoReturn:
        raise refused(self._optimizer, why, remedy)


def _check_are_apart(optimizer: torch.optim.Optimizer, members: Sequence[Sequence[Owned]]) -> None:
    shadow = shadow_of(optimizer)
    owners = [owner for group in members for owner in group]
    values = {owner.name: Draws(owner.parameter)(0.1) for owner in owners}
    gradients = {owner.name: Draws(owner.parameter, seed)() for seed, owner in enumerate(owners, 1)}
    together, apart = dict(values), dict(values)
    states: dict[str, dict[str, Any]] = {owner.name: {} for owner in owners}
    states_apart = dict(states)
    for _ in range(2):
        stand_ins = {owner.name: stand_in_for(together[owner.name], gradients[owner.name]) for owner in owners}
        groups = [
            (probe_options(group[0]), [(stand_ins[o.name], copied(states[o.name])) for o in group]) for group in members
        ]
        states = dict(zip(stand_ins, step_together(shadow, groups), strict=True))
        together = {name: stand_in.detach() for name, stand_in in stand_ins.items()}
        for owner in owners:
            stand_in = stand_in_for(apart[owner.name], gradients[owner.name])
            options = probe_options(owner)
            states_apart[owner.name] = step_alone(shadow, stand_in, options, copied(states_apart[owner.name]))
            apart[owner.name] = stand_in.detach()
    for owner in owners:
        if not same(together[owner.name], apart[owner.name]):
            raise refused(
                optimizer,
                f"updates {owner.name!r} differently if it steps other parameters too, but a compiled step updates each"
                " by itself, as soon as its gradient has arrived",
                "max_grad_norm= of compile_step is there for a norm over all gradients",
            )


def _check_tells_by_values(optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> None:
    shadow, knowing = shadow_of(optimizer), shadow_of(optimizer, knows_parameters=True)
    for owner in owned:
        draw, options, itself = Draws(owner.parameter), probe_options(owner), owner.parameter
        value, gradient = draw(0.1), draw()
        stand_in, before = stand_in_for(value, gradient), (itself.data, itself.grad)
        if itself.is_meta:
            continue
        try:
            itself.data, itself.grad = value.clone(), gradient.clone()
            for parameter, steps in ((stand_in, shadow), (itself, knowing)):
                torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
                step_alone(steps, parameter, options, {})
            is_same = same(stand_in.detach(), itself.detach())
        finally:
            itself.data, itself.grad = before
        if not is_same:
            raise refused(
                optimizer,
                f"knows {owner.name!r} by an attribute, its identity or a table, and not by its group and state alone",
                "Make parameter groups with options of their own",
            )


class Draws:
    """Random values with a parameter's layout, from a private generator.

    Meta parameters get values on the CPU, with dimensions cut to 256 elements to fit host memory.
    """

    def __init__(self, like: Tensor, seed: int = 0):
        like = like.detach()
        sizes = [min(size, 256) for size in like.shape]
        self._like = torch.empty(sizes, dtype=like.dtype, device="cpu") if like.is_meta else like
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(self._like.shape, generator=self._generator, dtype=torch.float32, device="cpu") * scale
        value = torch.empty_like(self._like)  # keeps strides
        value.copy_(drawn)
        return value


def probe_options(owner: Owned) -> dict[str, Any]:
    """Return the group's options, with a nonzero learning rate."""
    options = plain_options(owner.options)
    return options if options.get("lr", 1) else options | {"lr": _RATE}


def stand_in_for(value: Tensor, gradient: Tensor) -> nn.Parameter:
    stand_in = nn.Parameter(value.clone())
    stand_in.grad = gradient.clone()
    return stand_in


def stepped(
    shadow: torch.optim.Optimizer,
    options: Mapping[str, Any],
    value: Tensor,
    gradient: Tensor,
    state: Mapping[str, Any],
) -> tuple[Tensor, dict[str, Any]]:
    """Step a shadow on copies. Return the new value and state."""
    stand_in = stand_in_for(value, gradient)
    after = step_alone(shadow, stand_in, options, copied(state))
    return stand_in.detach(), after


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def same(one: Any, other: Any) -> bool:
    """Return whether two values have equal types and equal elements."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


def _differing(state: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(key for key in state if not same(state[key], other.get(key)))


def _facts(table: Mapping[str, Any]) -> dict[str, Any]:
    return copied({k: v for k, v in table.items() if isinstance(v, bool | int | float | str | Tensor | None)})


@contextmanager
def named(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Replace an error of the optimizer's step by Unsupported, which names the optimizer."""
    try:
        yield
    except errors.FxcompError:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        if isinstance(error, compat.DATA_DEPENDENT):
            why = f"decides by the values of tensors, which one graph cannot: {first_line}"
        else:
            why = f"raises {type(error).__name__} where it is given a gradient: {first_line}"
        more = "If an option was switched on that needs more state (eagerly it raises too), build the optimizer with it"
        raise refused(optimizer, why, more if isinstance(error, KeyError) else "") from error
