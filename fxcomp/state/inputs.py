"""Collect a program's inputs from the user's objects, the gradient state and the micro-batch sums."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxcomp.capture.optimizer import fresh_states, is_kept, live_numbers, read_together
from fxcomp.capture.optimizer_state import is_fresh, materialize_state, may_change, renew_state
from fxcomp.capture.probe import check_habits
from fxcomp.capture.training import Owned, Training
from fxcomp.codegen.program import Program
from fxcomp.errors import StepChanged
from fxcomp.graph.info import ARGUMENTS, InputKind
from fxcomp.state.gradient_state import GradientState


class Sums:
    """Gradient sums over a group of micro-batches, and the factor that converts them to a mean.

    Sums cover whole parameters, in fp32 or wider, under any plan, and are allocated on first use.
    """

    def __init__(self, training: Training, length: int = 1):
        """Sum up `length` micro-batches, or fewer if a group ends early."""
        self._length = length
        self._like = {owner.name: owner.parameter for owner in training.owned}
        self._device, self._scale = training.device, training.loss_scale
        self._sums: dict[str, Tensor] = {}
        self.micro_batches = 0
        self.factor = torch.ones((), device=training.device) if self._scale is None else self._scale.inverse
        """Factor on the summed gradients, applied in the group's last micro-batch."""

        self.count = torch.zeros(1, dtype=torch.float64, device=training.device)
        """Number of elements that the group's weighted losses have summed so far."""

    def of(self, name: str) -> Tensor:
        """Return the running sum of a parameter's gradients, initially zero. Micro-batches add to it in place."""
        if name not in self._sums:
            like = self._like[name]
            wide = torch.promote_types(like.dtype, torch.float32)
            self._sums[name] = torch.zeros(like.shape, dtype=wide, device=self._device)
        return self._sums[name]

    def complete(self, *, is_weighted: bool) -> None:
        """Set `factor` before the last micro-batch of a group: it averages, and removes the loss scale.

        For weighted losses `share` averages, and `factor` only removes the scale.
        """
        ends_after = self.micro_batches + 1
        if self._scale is None:
            self.factor.fill_(1.0 if is_weighted else 1 / ends_after)
        else:
            torch.mul(self._scale.inverse, 1.0 if is_weighted else self._length / ends_after, out=self.factor)

    def seed(self, *, is_weighted: bool) -> Tensor:
        """Return a micro-batch's initial gradient for backward: scale / length, or the scale for weighted losses."""
        assert self._scale is not None, "only a scaled loss has a seed"
        scale = self._scale.scale
        return scale if is_weighted or self._length == 1 else scale / self._length

    def whole(self, name: str, gradient: Tensor, share: Tensor | None = None) -> Tensor:
        """Return a group's mean gradient. `gradient` is the last micro-batch's, `share` the result of `self.share`."""
        before = self._sums.get(name)
        if before is None and share is None and self._scale is None:
            return gradient
        total = gradient if before is None else before + gradient
        factor = self.factor if share is None else share
        if share is not None and self._scale is not None:
            factor = share * self.factor
        return (total * factor).to(gradient.dtype)

    def share(self, count: Tensor | None, sum_over_ranks: Callable[[Tensor], object], ranks: int) -> Tensor:
        """Return the weight of summed gradients: `ranks` / (elements in the group on all ranks). Every rank calls it.

        `count` is the number of elements in the last micro-batch.
        """
        everywhere = self.count.clone() if count is None else self.count + count
        sum_over_ranks(everywhere)
        return torch.where(everywhere > 0, ranks / everywhere, 0.0)[0].float()

    def clear(self) -> None:
        for total in self._sums.values():
            total.zero_()
        self.count.zero_()
        self.micro_batches = 0


class Inputs:
    """Inputs of one training's programs, and the optimizer state that they use."""

    def __init__(self, training: Training, micro_batches: int = 1):
        self.training = training
        self.parameters = dict(training.model.named_parameters())
        self.sums = Sums(training, micro_batches)
        habits = {owner.name: training.habits[owner.group].counters for owner in training.owned}
        self._owners = training.owners
        self._counters = habits if any(habits.values()) else {}
        """Increments per step of Python numbers in optimizer states, by parameter and key."""
        self._stateless = set[str]()
        """Names of parameters known to have no optimizer state."""
        self.numbers: Sequence[Mapping[str, float]] = ()
        self._kept_by_optimizer: Mapping[str, Mapping[str, Any]] = {}

    def of(self, program: Program, leaves: Sequence[Any], state: GradientState) -> tuple[list[Any], ...]:
        self._make_missing_state()
        lists: dict[InputKind, list[Any]] = {kind: [] for kind in ARGUMENTS}
        buffers = dict(self.training.model.named_buffers())
        numbers = self.numbers = self._numbers_of(self._renewed(program))
        parameters, kept = self.parameters, self._kept_by_optimizer
        live = self.training.watch.live if program.captured.live else {}
        for source in program.inputs:
            match source.kind:
                case InputKind.STATE:
                    value = kept[source.name][source.key]
                case InputKind.PARAMETER:
                    value = parameters[source.name]
                case InputKind.BATCH:
                    value = live[source.key].value if source.key else leaves[source.index]
                case InputKind.HYPER:
                    value = numbers[source.index][source.key]
                case InputKind.BUFFER:
                    value = buffers[source.name]
                case InputKind.SUM:
                    value = self.sums.of(source.name)
                case InputKind.COUNT:
                    value = self.sums.count
                case InputKind.SCALE:
                    value = self.sums.seed(is_weighted=program.captured.is_weighted)
                case InputKind.FACTOR:
                    value = self.sums.factor
                case InputKind.RESIDUAL:
                    value = state.residuals.of(source.index, source.slot)
                case _:
                    value = state.compressor_states.of(source.index, source.slot)
            lists[source.kind].append(value)
        return tuple(lists.values())

    # The optimizer

    def expect_other_state(self) -> None:
        """Create missing optimizer state after an option changed. Raises StepChanged if the state's layout changed."""
        for optimizer in self.training.optimizers:
            owned = [owner for owner in self.training.owned if owner.optimizer is optimizer]
            check_habits(optimizer, owned, self.training.habits)
        self._stateless.clear()
        self._make_missing_state()

    def has_stepped(self, program: Program, unmoved: Collection[str] = ()) -> None:
        """Advance Python step counters, and mark optimizer states as not fresh, except for parameters in `unmoved`."""
        for owner in self._maybe_fresh(program):
            if owner.name not in unmoved:
                fresh_states(owner.optimizer).pop(owner.parameter, None)
        for source in program.inputs if self._counters else ():
            if source.kind is InputKind.STATE and (growth := self._counters[source.name].get(source.key)) is not None:
                self._owners[source.name].state[source.key] += growth

    def _maybe_fresh(self, program: Program) -> list[Owned]:
        if not any(map(fresh_states, self.training.optimizers)):
            return []
        updated = {source.name for source in program.inputs if source.kind is InputKind.STATE}
        return [owner for owner in self.training.owned if owner.name in updated]

    def _renewed(self, program: Program) -> dict[int, set[bool]]:
        """Reset fresh (never stepped) optimizer states that a program updates.

        Return the values of `is_fresh` that occur in each parameter group.
        """
        kinds: dict[int, set[bool]] = {}
        fresh: list[Owned] = []
        for owner in self._maybe_fresh(program):
            kinds.setdefault(owner.group, set()).add(is_new := is_fresh(owner))
            fresh += [owner] if is_new and may_change(owner.state) else []
        renew_state(fresh, self.training.habits)
        return kinds

    def _numbers_of(self, fresh: Mapping[int, set[bool]]) -> list[dict[str, float]]:
        """Return the live numbers of each parameter group, such as `lr`. Raises StepChanged."""
        read = read_together(self.training.groups)
        numbers = [live_numbers(group, read) for group in self.training.groups]
        for index, group in enumerate(numbers):
            if "dampening" not in group or index not in fresh:
                continue
            if fresh[index] == {True, False}:
                raise StepChanged(
                    f"parameter group {index} has momentum for some parameters and none yet for others, which with"
                    " dampening cannot be stepped together.\n  Put the new parameters into a group of their own."
                )
            if fresh[index] == {True}:
                group["dampening"] = 0.0  # SGD's first step does not dampen the gradient
        return numbers

    def _make_missing_state(self) -> None:
        owned = self.training.owned
        kept = {owner.name: owner.state for owner in owned}  # one lookup each, since hashing a tensor runs in Python
        missing = [owner for owner in owned if owner.name not in self._stateless and not is_kept(kept[owner.name])]
        if missing:
            materialize_state(missing, self.training.habits)
            kept = {owner.name: owner.state for owner in owned}
            self._stateless |= {owner.name for owner in missing if not is_kept(kept[owner.name])}
        self._kept_by_optimizer = kept

    def rates(self, numbers: Sequence[Mapping[str, float]] | None = None) -> dict[int, float]:
        """Return the learning rate of each parameter group, from `numbers` or else from the optimizers."""
        read = self._numbers_of({}) if numbers is None else numbers
        return {index: of_group["lr"] for index, of_group in enumerate(read)}

    def names_by_group(self) -> Mapping[int, Sequence[str]]:
        groups: dict[int, list[str]] = {}
        for owner in self.training.owned:
            groups.setdefault(owner.group, []).append(owner.name)
        return groups

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in self.parameters.items()}
