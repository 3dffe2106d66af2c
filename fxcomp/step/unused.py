"""Agree on the parameters that no rank uses in a step, and keep all that is theirs as it was: `find_unused_parameters`.

    used by this rank's program      its gradient goes into the bucket
    used by other ranks alone        zeros go there in its place, and the mean of all ranks updates it
    used by no rank                  parameter, optimizer state and what is owed to it stay, bit for bit

A captured program knows what it uses, so a byte a parameter travels when the step begins, and is there before the first
bucket is packed. Where a program uses everything nothing waits for it. What no rank uses is copied, set to zero where
it would be sent, and put back after the step: its update runs on zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp.capture.training import Training
from fxcomp.graph.captured import Captured
from fxcomp.runtime.group import Work
from fxcomp.runtime.runtime import Runtime
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState


def note_on_unused(example: Captured) -> list[str]:
    """Say how many parameters the example batch leaves unused: their zeros travel like gradients."""
    if not example.unused:
        return []
    some = ", ".join(example.unused[:3]) + (", ..." if len(example.unused) > 3 else "")
    count, of = len(example.unused), len(example.gradient_names)
    return [f"the example batch leaves {count} of {of} parameters unused ({some}): zeros travel for them"]


def note_on_densified(example: Captured, sizes: Mapping[str, int]) -> list[str]:
    """Say which gradients are sparse in eager PyTorch and travel whole."""
    return [
        f"the gradient of {name!r} is sparse in eager PyTorch (sparse=True) and dense here: {sizes[name]:,} elements"
        for name in example.densified
    ]


class FindsUnused:
    """Begins steps in which some parameters may be unused."""

    def __init__(self, training: Training, site: Site):
        self._training, self._site = training, site
        self._names = sorted(owner.name for owner in training.owned)
        is_cuda = site.device.type == "cuda"
        self._stream = torch.cuda.Stream(site.device) if is_cuda else None
        """Beside the step's own, so that reading what arrives does not wait for the forward pass."""

    def begin(self, unused: Sequence[str], state: GradientState, runtime: Runtime) -> UnusedHere:
        """Tell the other ranks what this rank's program leaves unused; every rank calls it before each step.

        The step runs inside what is returned.
        """
        here = UnusedHere(self._training, tuple(unused), state, runtime)
        if self._site.ranks.world_size == 1:
            here.hold(unused)
            return here
        is_unused = set(unused)
        with self._beside():
            used = torch.tensor([name not in is_unused for name in self._names], dtype=torch.uint8)
            used = used.to(self._site.device)
            arriving = _ArrivingFlags(self._site.transport.all_reduce(used, "world", "main", "max"), used)
        here.arriving = arriving
        if unused:
            runtime.before_packing.append(lambda: here.hold(self._nobodys(arriving)))
        return here

    def _nobodys(self, arriving: _ArrivingFlags) -> list[str]:
        with self._beside():
            arriving.work.wait()
            flags = arriving.used.cpu()
        return [name for name, is_used in zip(self._names, flags, strict=True) if not bool(is_used)]

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass(frozen=True, slots=True)
class _ArrivingFlags:
    """The collective that finds the parameters used on any rank, and the memory that it fills."""

    work: Work
    used: Tensor


class UnusedHere:
    """One step: what no rank uses is held from before its first bucket until it is over."""

    def __init__(self, training: Training, unused: tuple[str, ...], state: GradientState, runtime: Runtime):
        self._owners = {owner.name: owner for owner in training.owned if owner.name in unused}
        self._state, self._runtime = state, runtime
        self.arriving: _ArrivingFlags | None = None
        self.held: dict[str, _Kept] = {}
        """Values of parameters that no rank uses, by parameter."""

    def hold(self, names: Sequence[str]) -> None:
        """Copy what belongs to these parameters, and let nothing of it be sent."""
        for name in names:
            parameter = self._owners[name].parameter
            residuals = [piece.values for piece in self._state.residuals.slices.get(name, ())]
            self.held[name] = _Kept(
                parameter.detach().clone(),
                {key: _copied(value) for key, value in self._owners[name].state.items()},
                [values.clone() for values in residuals],
                self._state.owed.pop(name, None),
            )
            for values in residuals:
                values.zero_()

    def __enter__(self) -> UnusedHere:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Put everything back after the step's last line, or after an error."""
        self._runtime.before_packing.clear()
        if self.arriving is not None and error is None:
            self.arriving.work.wait()
        for name, kept in self.held.items():
            parameter = self._owners[name].parameter
            parameter.detach().copy_(kept.parameter)
            self._put_back_state(self._owners[name].state, kept.optimizer_state)
            for piece, values in zip(self._state.residuals.slices.get(name, ()), kept.residuals, strict=True):
                piece.values.copy_(values)
            if kept.owed is not None:
                self._state.owed[name] = kept.owed

    @staticmethod
    def _put_back_state(state: dict[str, Any], kept: dict[str, Any]) -> None:
        """Put values back where they lie: others refer to the tensors."""
        for key in [key for key in state if key not in kept]:
            del state[key]
        for key, value in kept.items():
            if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
                state[key].copy_(value)
            else:
                state[key] = value


@dataclass(frozen=True, slots=True)
class _Kept:
    """The values that belong to one parameter."""

    parameter: Tensor
    optimizer_state: dict[str, Any]
    residuals: list[Tensor]
    owed: Tensor | None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
