"""Compare the update of each parameter with the user's own optimizer on a copy.

Updates use the average of the ranks' gradients. The check exchanges two numbers per parameter, because a weighted sum
of the average is the average of the weighted sums.

If ranks exchange momenta, the update follows from formulas (docs/where_the_mean_stands.md), with v the frozen second
moment and d its bias-corrected root:

    x = m(g) / d                        payload: momentum that a rank's optimizer computes from its gradient g
    m <- d M                            M: average of payloads, clamped to LARGEST_MEAN
    g = (d M - m(0)) / (m(1) - m(0))    gradient that gives this momentum, because m is linear
    v <- v growth                       compensates the bias correction, so d stays the same

The user's optimizer updates a copy with this gradient and a second moment that gives v.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.capture.batch_type import memory_of
from fxcomp.capture.optimizer import Owned, class_name, fresh_states, state_tensors
from fxcomp.capture.optimizer_state import is_fresh, may_change
from fxcomp.capture.probe import copied
from fxcomp.capture.shadow import plain_options, shadow_of, step_alone
from fxcomp.capture.training import Training
from fxcomp.graph.moments import LARGEST_MEAN
from fxcomp.graph.work import is_sequence
from fxcomp.runtime.runtime import Runtime
from fxcomp.state.momenta import MovedState, correction
from fxcomp.step.verify.differences import FLOOR, HALF, difference, moved_otherwise
from fxcomp.step.verify.eager import largest

COLUMNS = 128

ROUNDING = 1e-5
"""Relative tolerance of a weighted sum of float32 gradients with independent roundings; `HALF` for 16-bit ones."""


class Means:
    """Weighted sums of local gradients, then of their average."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[str, tuple[float, float]] = {}
        """Weighted sum and sum of squares, by parameter."""
        self.is_known = False

    def add(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Add a local gradient, or its part from element `start` on."""
        weighted, squares = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = weighted + weighted_sum(gradient, start), squares + square_sum(gradient)

    def average(self, names: Sequence[str], runtime: Runtime, ranks: int) -> None:
        """Average over the ranks. Every rank calls it with the same names."""
        mine = [number for name in names for number in self._sums[name]]
        numbers = torch.tensor(mine, dtype=torch.float64, device=self._device)
        runtime.transport.all_reduce(numbers, "world", "main").wait()
        values = [float(number) / ranks for number in numbers.cpu()]
        self._sums = dict(zip(names, zip(values[0::2], values[1::2], strict=True), strict=True))
        self.is_known = True

    def contradict(self, name: str, gradient: Tensor, factor: float) -> bool:
        expected, squares = self._sums[name]
        rounding = HALF.get(gradient.dtype, ROUNDING)
        found, allowed = weighted_sum(gradient), rounding * math.sqrt(squares) * factor + _least(gradient)
        if not math.isfinite(expected) or not math.isfinite(allowed):
            return math.isfinite(found)
        return not abs(found - factor * expected) <= allowed + 1e-30


def _least(gradient: Tensor) -> float:
    """Return a bound on the weighted sum of values below the type's smallest subnormal (6e-8 for fp16)."""
    known = torch.finfo(gradient.dtype)
    return known.smallest_normal * known.eps * math.sqrt(gradient.numel())


def weighted_sum(value: Tensor, start: int = 0) -> float:
    """Sum values with weights that depend on the position only; neighbours have different weights.

    `start` is the position of the first value, so that sums of parts add up.
    """
    flat = value.detach().double().reshape(-1)
    row, column = divmod(start, COLUMNS)
    flat = torch.nn.functional.pad(flat, (column, -(column + flat.numel()) % COLUMNS)).view(-1, COLUMNS)
    rows = _weights(row + flat.shape[0], 251, flat.device)[row:]
    return float((flat @ _weights(COLUMNS, 127, flat.device) @ rows).item())


def square_sum(value: Tensor) -> float:
    return float(value.detach().double().square().sum().item())


def _weights(count: int, prime: int, device: torch.device) -> Tensor:
    return (torch.arange(count, dtype=torch.float64, device=device) * 73 + 11).remainder(prime) * (2 / prime) - 1


Rule = Callable[..., None]

CLIPPED = 1e-3
"""Relative tolerance of the norm of clipped gradients in fp32."""


class UpdateCheck:
    """Checks of one step's updates, with copies of one parameter and its state at a time."""

    def __init__(
        self,
        training: Training,
        relative: float,
        written: Collection[str] = (),
        moved: Mapping[str, MovedState] | None = None,
    ):
        self._training, self._relative = training, relative
        recorded = [owner for owner in training.owned if owner.parameter in fresh_states(owner.optimizer)]
        self._fresh = {owner.name for owner in recorded if is_fresh(owner)}
        """Names of parameters that have never been updated."""
        self._states = {o.name: copied(o.state) for o in recorded if may_change(o.state)}
        """Copies of states that the step may replace."""
        self._shadows = {id(each): shadow_of(each) for each in training.optimizers}
        self._owners = {id(owner.parameter): owner for owner in training.owned}
        self._versions = {name: p._version for name, p in training.model.named_parameters()}
        self._sharing: dict[int, dict[str, Tensor]] = {}
        """Parameters by memory: views of one tensor share a version counter."""
        for name, parameter in training.model.named_parameters():
            self._sharing.setdefault(memory_of(parameter), {})[name] = parameter
        self._written, self._moved = written, moved or {}
        self._times: Counter[str] = Counter()
        self._arrived = 0.0
        self._sent = 0.0
        self.expected: dict[str, Tensor] = {}
        """Expected gradients of the updates; only on a single rank."""
        self.means = Means(training.device)
        """Sums that check averaged gradients, with several ranks and no compression."""
        self.largest = 0.0
        """Largest magnitude of all expected gradients."""
        self.rounding: Mapping[str, float] = {}
        """Additional tolerance of gradients, from estimated rounding errors."""
        self.wrong: str = ""
        self.updated = 0

    def rule(self, _: str, run: Rule) -> Rule:
        """Wrap an emitted optimizer function to check its updates, unless the function has no gradient argument."""
        names = run.__code__.co_varnames[: run.__code__.co_argcount]
        if {"parameters", "gradients"} <= set(names):
            return self._rule_by_lists(names, run)
        if not {"parameter", "gradient"} <= set(names):
            return run

        def observed(*arguments: Any) -> None:
            given = dict(zip(names, arguments, strict=True))
            if not self.wrong:
                self._check(lambda: run(*arguments), given["parameter"], given["gradient"])

        return observed

    def _rule_by_lists(self, names: Sequence[str], run: Rule) -> Rule:
        """Wrap a function that updates several parameters: call it for each parameter alone."""

        def observed(*arguments: Any) -> None:
            for place in range(len(arguments[names.index("parameters")])):
                alone: list[Any] = [[each[place]] if is_sequence(each) else each for each in arguments]
                given = dict(zip(names, alone, strict=True))
                if not self.wrong:
                    self._check(partial(run, *alone), given["parameters"][0], given["gradients"][0])

        return observed

    def bucket(self, value: Tensor) -> None:
        self._arrived += square_sum(value)

    def finish(self, names: tuple[str, ...], *, skipped: bool) -> None:
        """Check that each parameter was updated exactly once, and no other parameter changed."""
        if self.wrong:
            return
        for name in names:
            if self._times[name] != (0 if skipped else 1):
                self.wrong = f"{name!r} was updated {self._times[name]} times"
                return
        for name, parameter in self._training.model.named_parameters():
            if name not in self._written and parameter._version != self._versions[name]:
                self.wrong = f"{name!r} was changed outside of the optimizer's update"
                return
        if self._arrived > 0 and not skipped:
            self._check_clipping()

    @property
    def _clipping(self) -> float:
        limit = self._training.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (math.sqrt(self._arrived) + 1e-6))

    def _check_clipping(self) -> None:
        arrived, sent = math.sqrt(self._arrived), math.sqrt(self._sent)
        wanted = self._clipping * arrived
        noise = max(CLIPPED, *(HALF.get(each.parameter.dtype, 0.0) for each in self._training.owned))
        if math.isfinite(wanted) and abs(sent - wanted) > noise * wanted:
            self.wrong = (
                f"the averaged gradients have the norm {arrived:.6g}, clipped {sent:.6g} instead of {wanted:.6g}"
            )

    def _check(self, run: Callable[[], None], parameter: Tensor, gradient: Tensor) -> None:
        owner = self._owners[id(parameter)]
        state = owner.state
        moved = self._moved.get(owner.name)
        if moved is not None and not moved.is_known:
            run()
            self._count(owner)
            return
        tensors = {"": parameter.detach(), **state_tensors(state)}
        try:
            if moved is None and not self.is_expected(owner.name, gradient):
                return
            known = self._states.pop(owner.name, {})
            before = {key: known.get(key, value).clone() for key, value in tensors.items()}
            if moved is None:
                own = self.step_own(owner, state, before, gradient)
            else:
                own = self._moved_update(moved, owner, before, gradient)
        except compat.OUT_OF_MEMORY:  # skip the check
            run()
            self._count(owner)
            return
        if owner.name not in self._written and parameter._version != self._versions[owner.name]:
            self.wrong = f"{owner.name!r} was changed before the optimizer's update"
            return
        run()
        for key in tensors:
            if not self.wrong and isinstance(own.get(key), Tensor):
                self._compare(owner, key, before[key], tensors[key], own[key])
        if self.wrong:
            for key, value in tensors.items():
                value.copy_(before[key])
        else:
            self._count(owner)

    def as_sent(self, name: str, sent: Tensor, gradient: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the sent value and the value expected from eager's `gradient`, in the same unit."""
        moved = self._moved.get(name)
        if moved is None:
            return sent, gradient
        if not moved.is_known:
            return sent, sent
        owner = self._training.owners[name]
        tensors = {"": owner.parameter.detach(), **state_tensors(owner.state)}
        if moved.magnitude is not None:
            divisor = moved.divisor(owner, tensors[moved.magnitude])
            sent = sent * divisor.reshape(-1)[start : start + sent.numel()].view(sent.shape)
        return sent, self._own_mean(moved, owner, tensors, gradient)

    def step_own(
        self, owner: Owned, state: Mapping[str, Any], before: Mapping[str, Tensor], gradient: Tensor
    ) -> dict[str, Any]:
        """Update a copy with the user's optimizer. Return the parameter, with key "", and its state."""
        value = before[""].clone()
        given = {key: before[key].clone() if key in before else other for key, other in state.items()}
        limit = self._training.max_grad_value
        gradient = gradient if limit is None else gradient.clamp(-limit, limit)
        stand_in = nn.Parameter(value)
        stand_in.grad = gradient
        state = {} if owner.name in self._fresh else given
        shadow = self._shadows[id(owner.optimizer)]
        return {"": value, **step_alone(shadow, stand_in, plain_options(owner.options), state)}

    def _own_mean(self, moved: MovedState, owner: Owned, before: Mapping[str, Tensor], gradient: Tensor) -> Tensor:
        """Return the momentum that the optimizer computes from a rank's own gradient."""
        return self.step_own(owner, owner.state, before, gradient)[moved.mean]

    def _moved_update(
        self, moved: MovedState, owner: Owned, given: Mapping[str, Tensor], shared: Tensor
    ) -> dict[str, Any]:
        """Return the parameter, with key "", and its state after an update with the average payload `shared`.

        Computed in double precision, because squares of a gradient can far exceed the frozen second moment.
        """
        state, key = owner.state, moved.magnitude
        before = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
        target = shared = shared.double()
        if key is not None:
            target = shared.clamp(-LARGEST_MEAN, LARGEST_MEAN) * moved.divisor(owner, before[key])
        nothing, ones = torch.zeros_like(shared), torch.ones_like(shared)
        of_nothing = self._own_mean(moved, owner, before, nothing)
        gradient = (target - of_nothing) / (self._own_mean(moved, owner, before, ones) - of_nothing)
        if key is None:
            found = self.step_own(owner, state, before, gradient)
        else:
            frozen = before[key] * (correction(owner, 1) / correction(owner))
            squares = self.step_own(owner, state, {**before, key: nothing}, gradient)[key]
            kept = self.step_own(owner, state, {**before, key: ones}, gradient)[key] - squares
            stays = {**before, key: (frozen - squares) / kept}
            found = {**self.step_own(owner, state, stays, gradient), key: frozen}
        return {name: value.to(given[name].dtype) if name in given else value for name, value in found.items()}

    def _count(self, owner: Owned) -> None:
        sharing = self._sharing[memory_of(owner.parameter)]
        self._versions |= {name: parameter._version for name, parameter in sharing.items()}
        self._times[owner.name] += 1
        self.updated += 1

    def is_expected(self, name: str, gradient: Tensor) -> bool:
        """Check a gradient against the averaged and clipped eager gradient."""
        if self._arrived > 0:
            self._sent += square_sum(gradient)
        if self.means.is_known and self.means.contradict(name, gradient, self._clipping):
            self.wrong = f"the gradient that updates {name!r} is not the mean of the ranks' own, clipped if asked for"
            return False
        expected = self.expected.pop(name, None)
        if expected is None:
            return True
        noise = FLOOR * self._relative * self.largest + self.rounding.get(name, 0.0)
        off = difference(gradient, expected, self._relative, noise)
        if off is not None:
            self.wrong = (
                f"the gradient that updates {name!r} differs from eager's, clipped if asked for, by up to"
                f" {off:.3g}, where it reaches {largest(expected):.3g}"
            )
        return off is None

    def _compare(self, owner: Owned, key: str, before: Tensor, after: Tensor, expected: Tensor) -> None:
        found = moved_otherwise(before, after, expected.to(after.device))
        if found is not None:
            what = f"the {key} of {owner.name!r}" if key else f"the update of {owner.name!r}"
            self.wrong = (
                f"{what} differs from {class_name(owner.optimizer)}'s by up to {found[0]:.3g}, where it moves it by"
                f" {found[1]:.3g}"
            )
