"""Leave parameters unchanged if no rank uses them in a step: `find_unused_parameters`.

    used by this rank's program      its gradient goes into the bucket
    used only by other ranks         zeros go into the bucket, and the mean of all ranks updates it
    used by no rank                  parameter, optimizer state and residuals stay bitwise equal

One byte per parameter is exchanged from the beginning of the step, and read before the first bucket is packed. A
program that uses every parameter does not wait for it. Parameters that no rank uses are copied, updated with zeros, and
restored after the step.

DDP keeps the `.grad` of these parameters and does not report them to its hook. In the hook, a gradient that is zero on
every rank counts as unused: its residual stays, and its mean is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.optimizer import Owned
from fxcomp.capture.training import Training
from fxcomp.graph.captured import Captured
from fxcomp.runtime.aside import Aside, Coming
from fxcomp.runtime.runtime import Runtime
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState


def note_on_unused(example: Captured) -> list[str]:
    """Return a note on parameters that the example batch leaves unused."""
    if not example.unused:
        return []
    some = ", ".join(example.unused[:3]) + (", ..." if len(example.unused) > 3 else "")
    count, of = len(example.unused), len(example.gradient_names)
    return [f"the example batch leaves {count} of {of} parameters unused ({some}): zeros travel for them"]


def note_on_densified(example: Captured, sizes: Mapping[str, int]) -> list[str]:
    """Return notes on gradients that are sparse in eager PyTorch."""
    return [
        f"the gradient of {name!r} is sparse in eager PyTorch (sparse=True) and dense here: {sizes[name]:,} elements"
        for name in example.densified
    ]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Saved residuals of one parameter; if `owner` is set, also parameter values and optimizer state."""

    name: str
    residuals: list[Tensor]
    owed: Tensor | None
    owner: Owned | None = None
    values: Tensor | None = None
    optimizer_state: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, name: str, state: GradientState, owner: Owned | None = None) -> _Kept:
        residuals = [piece.values.clone() for piece in state.residuals.slices.get(name, ())]
        if owner is None:
            return cls(name, residuals, state.owed.get(name))
        values = owner.parameter.detach().clone()
        copied = {key: v.clone() if isinstance(v, Tensor) else v for key, v in owner.state.items()}
        return cls(name, residuals, state.owed.get(name), owner, values, copied)

    def put_back(self, state: GradientState) -> None:
        """Restore the values in place."""
        for piece, values in zip(state.residuals.slices.get(self.name, ()), self.residuals, strict=True):
            piece.values.copy_(values)
        if self.owed is not None:
            state.owed[self.name] = self.owed
        if self.owner is not None and self.values is not None:
            self.owner.parameter.detach().copy_(self.values)
            self._put_back_state(self.owner.state)

    def _put_back_state(self, state: dict[str, Any]) -> None:
        for key in [key for key in state if key not in self.optimizer_state]:
            del state[key]
        for key, value in self.optimizer_state.items():
            if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
                state[key].copy_(value)
            else:
                state[key] = value


class FindsUnused:
    def __init__(self, training: Training, site: Site):
        self._is_alone = site.ranks.world_size == 1
        self._owners = {owner.name: owner for owner in sorted(training.owned, key=lambda owner: owner.name)}
        self._aside = Aside(site.transport, site.ranks.world_size, site.device)

    @contextmanager
    def holding(self, unused: Sequence[str], state: GradientState, runtime: Runtime) -> Generator[Collection[str]]:
        """Run a step whose program does not use the parameters `unused`. Every rank calls it.

        Yields the parameters that no rank uses, once known. The state of these parameters is saved before their bucket
        is packed, and restored after the step's last line or an error.
        """
        held: dict[str, _Kept] = {}

        def hold(names: Iterable[str]) -> None:
            for name in names:
                held[name] = _Kept.of(name, state, self._owners[name])
                state.owed.pop(name, None)
                for piece in state.residuals.slices.get(name, ()):
                    piece.values.zero_()

        arriving = None
        if self._is_alone:
            hold(unused)
        else:
            left_out = set(unused)
            arriving = self._aside.any([name not in left_out for name in self._owners])
            if unused:
                used = arriving
                runtime.gradients.before_packing.append(lambda: hold(_unused_everywhere(self._owners, used)))
        try:
            yield held.keys()
            if arriving is not None:
                arriving.end()
        except BaseException:
            runtime.side.meet()  # lines on side streams may still write the state
            raise
        finally:
            runtime.gradients.before_packing.clear()
            for kept in held.values():
                kept.put_back(state)


def _unused_everywhere(names: Iterable[str], used: Coming) -> list[str]:
    return [name for name, is_used in zip(names, used.read(), strict=True) if not is_used]


# Gradients from DDP's backward pass

FIRST = 256
"""Number of leading elements that usually suffice to find that a gradient is nonzero."""


class ZeroGradients:
    """Gradients of a backward pass that are zero on this rank, with their saved residuals.

    On an asynchronous device, all residuals are saved, and `_flags` is read once after the pass.
    """

    def __init__(self, state: GradientState):
        self._state = state
        self._kept: dict[str, _Kept] = {}
        self._flags: dict[str, Tensor | bool] = {}
        """True for a nonzero gradient, by parameter."""

    def look_at(self, gradients: Mapping[str, Tensor]) -> None:
        """Save the residuals of a bucket's zero gradients before compression."""
        for name, gradient in gradients.items():
            flat = gradient.view(-1)
            if compat.works_later(flat.device):
                self._flags[name] = flat.any()
            else:
                self._flags[name] = bool(flat[:FIRST].any()) or bool(flat.any())
            if self._flags[name] is not True:
                self._kept[name] = _Kept.of(name, self._state)

    def put_back(self, means: Mapping[str, Tensor], site: Site) -> None:
        """Restore residuals of gradients that are zero on all ranks; set these means to 0. Every rank calls it."""
        flags = [self._flags[name] for name in means]
        here = [flag for flag in flags if isinstance(flag, Tensor)]
        used = torch.stack(here).byte() if here else torch.tensor(flags, dtype=torch.uint8)
        site.transport.all_reduce(used, "world", "main", "max").wait()
        is_used: list[int] = cast("Any", used).tolist()
        for name in (name for name, flag in zip(means, is_used, strict=True) if not flag):
            means[name].zero_()
            self._kept[name].put_back(self._state)
