"""Feed a program: find what its inputs stand for among the user's objects and the gradient state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.optimizer import has_tensors, live_numbers, materialize_state
from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.training import Owned, Training
from fxcomp.codegen.program import Program
from fxcomp.errors import StepChanged
from fxcomp.graph.captured import Captured
from fxcomp.graph.info import InputKind, Source
from fxcomp.graph.names import ARGUMENTS
from fxcomp.state.gradient_state import GradientState


class Inputs:
    """The inputs of one training's programs, and the optimizer state that they need."""

    def __init__(self, training: Training):
        self.training = training
        self.parameters = dict(training.model.named_parameters())
        self._fresh_state = dict(training.fresh_state)
        self._has_state = True
        """True if the optimizer keeps state at all, as far as is known."""
        self._kept_by_optimizer: Mapping[str, Mapping[str, Any]] = {}
        """The state of each parameter, as it was looked up for this step."""

    def of(self, program: Program, leaves: Sequence[Any], state: GradientState) -> tuple[list[Any], ...]:
        """The arguments of a program for a batch's leaves."""
        self._make_missing_state()
        lists: dict[InputKind, list[Any]] = {kind: [] for kind in ARGUMENTS}
        buffers = dict(self.training.model.named_buffers())
        numbers = self.live_numbers()
        parameters, kept = self.parameters, self._kept_by_optimizer
        for source in program.inputs:
            match source.kind:
                case InputKind.STATE:
                    value = kept[source.name][source.key]
                case InputKind.PARAMETER:
                    value = parameters[source.name]
                case InputKind.BATCH:
                    value = leaves[source.index]
                case InputKind.HYPER:
                    value = numbers[source.index][source.key]
                case InputKind.BUFFER:
                    value = buffers[source.name]
                case _:
                    value = _kept(source, state)
            lists[source.kind].append(value)
        return tuple(lists.values())

    # The optimizer

    def expect_other_state(self) -> None:
        """Make what is missing of the optimizer's state: an option that changed may ask for more than before."""
        self._has_state = True
        self._make_missing_state()

    def has_stepped(self) -> None:
        """Note that the optimizer's first step is over."""
        self._fresh_state.clear()

    def is_fresh(self, owner: Owned) -> bool:
        """Tell a parameter whose first step is still to come: nobody has loaded another state since."""
        return self._fresh_state.get(owner.name) is self.training.optimizer.state[owner.parameter]

    def live_numbers(self) -> list[dict[str, float]]:
        """The numbers of each parameter group that a step reads anew, such as `lr`. Raises StepChanged."""
        numbers = [live_numbers(group) for group in self.training.optimizer.param_groups]
        for index, group in enumerate(numbers):
            if "dampening" not in group or not self._fresh_state:
                continue
            fresh = {self.is_fresh(owner) for owner in self.training.owned if owner.group == index}
            if fresh == {True, False}:
                raise StepChanged(
                    f"parameter group {index} has momentum for some parameters and none yet for others, which with"
                    " dampening cannot be stepped together.\n  Put the new parameters into a group of their own."
                )
            if fresh == {True}:
                group["dampening"] = 0.0  # SGD's first step takes the gradient as it is
        return numbers

    def _make_missing_state(self) -> None:
        """Make the optimizer's state if it is not there, as its own first step would."""
        optimizer, owned = self.training.optimizer, self.training.owned
        kept = self._look_up(optimizer, owned)
        if self._has_state and not all(map(has_tensors, kept.values())):
            self._fresh_state |= materialize_state(optimizer, owned)
            kept = self._look_up(optimizer, owned)
            self._has_state = any(map(has_tensors, kept.values()))
        self._kept_by_optimizer = kept

    @staticmethod
    def _look_up(optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> dict[str, Mapping[str, Any]]:
        """Look each parameter up once: hashing a tensor runs in Python."""
        return {owner.name: optimizer.state.get(owner.parameter, {}) for owner in owned}

    def rates(self) -> dict[int, float]:
        """The learning rate of each parameter group."""
        return {index: numbers["lr"] for index, numbers in enumerate(self.live_numbers())}

    def names_by_group(self) -> Mapping[int, Sequence[str]]:
        """The trained parameters of each parameter group."""
        groups: dict[int, list[str]] = {}
        for owner in self.training.owned:
            groups.setdefault(owner.group, []).append(owner.name)
        return groups

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of every parameter."""
        return {name: parameter.numel() for name, parameter in self.parameters.items()}


def _kept(source: Source, state: GradientState) -> Tensor:
    """Find what a rank keeps of a bucket."""
    match source.kind:
        case InputKind.VELOCITY:
            assert state.velocities is not None, "a step with momentum correction has velocities"
            return state.velocities.of(source.index)
        case InputKind.RESIDUAL:
            return state.residuals.of(source.index, source.slot)
        case _:
            return state.compressor_states.of(source.index, source.slot)


@dataclass(frozen=True, slots=True)
class Example:
    """A captured step with the batch that it was captured for: enough to run it."""

    captured: Captured
    inputs: Inputs
    leaves: Sequence[Any]
    guard: StepGuard

    def feed(self, program: Program, state: GradientState) -> None:
        """Do what comes before each run of a program: look for changes, and find its arguments."""
        self.guard.key()
        batch_type(self.leaves)
        self.arguments(program, state)

    def arguments(self, program: Program, state: GradientState) -> tuple[list[Any], ...]:
        """The arguments of a program that was made from the capture."""
        return self.inputs.of(program, self.leaves, state)
