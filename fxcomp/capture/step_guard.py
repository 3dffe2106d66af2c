"""Notice when a step is not the one that was captured.

Tracing has no guards of its own, so each call compares what tracing baked in. A difference either leads to another
capture (a key that was not seen yet) or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from fxcomp import compat
from fxcomp.capture.change import Change
from fxcomp.capture.optimizer import NOT_OF_THE_UPDATE, baked, class_name, is_torchs, live_numbers
from fxcomp.capture.reach.snapshots import Snapshots
from fxcomp.capture.structure_guard import StructureGuard
from fxcomp.capture.surroundings import READ, surroundings
from fxcomp.capture.training import Training
from fxcomp.errors import StepChanged

T = TypeVar("T")


class Key(NamedTuple):
    """Everything that a capture bakes in beside the batch."""

    snapshot: int
    """The number of everything that Python could read, which counts on this rank alone."""
    options: tuple[Hashable, ...]
    attributes: tuple[Hashable, ...]
    """Those of optimizers that are classes of the user's."""
    surroundings: tuple[Hashable, ...]
    frozen: tuple[int, ...] = ()


class StepGuard:
    """Reads everything that a capture depends on, cheaply, before each step."""

    def __init__(self, training: Training):
        self._training = training
        self._structure = StructureGuard(training.model, training.optimizers, finds_unused=training.finds_unused)
        self._snapshots = Snapshots(training.model, {"loss_fn": training.loss_fn, **compat.global_module_hooks()})

    def key(self) -> Key:
        """Read everything. Raises StepChanged for a change that needs another plan."""
        self._structure.check()
        snapshot = self._snapshots.number(before_walk=self._structure.check_places)
        options = tuple(map(_baked_options, self._training.groups))
        attributes = tuple(map(_attributes, self._training.optimizers))
        return Key(snapshot, options, attributes, surroundings(), self._structure.frozen())

    def change(self, old: Key, new: Key) -> Change | None:
        """Name the first thing that differs between two keys; None if nothing does."""
        if change := self._snapshots.difference(old.snapshot, new.snapshot):
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


def settled(guard: StepGuard, trace: Callable[[], T]) -> T:
    """Trace, and again if the model set itself up at its first call. Raises StepChanged if every call changes it."""
    start = guard.key()
    traced = trace()
    ready = guard.key()
    if ready == start:
        return traced
    traced = trace()
    again = guard.key()
    if again != ready:
        raise StepChanged(
            f"the forward pass itself changes the model: {guard.change(ready, again)}. A compiled step"
            " does not run that Python again.\n  Keep such counters outside the model, or in a buffer."
        )
    return traced


def _baked_options(group: dict[str, Any]) -> tuple[Hashable, ...]:
    """Read a parameter group's options; of the numbers that are live only their names."""
    live = live_numbers(group)
    own = tuple(
        (key, baked(value))
        for key, value in group.items()
        if key not in _NOT_BAKED and not {key, f"{key}_0", f"{key}_1"} & live.keys()
    )
    return (own, tuple(live))


def _attributes(optimizer: torch.optim.Optimizer) -> tuple[Hashable, ...]:
    """Read what a user's class may have computed with beside its groups; torch's own classes do not."""
    if is_torchs(optimizer):
        return ()
    return tuple((key, baked(value)) for key, value in vars(optimizer).items() if key not in NOT_OF_THE_UPDATE)


_NOT_BAKED = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Entries that no update reads: the group's members, and schedulers' notes."""
