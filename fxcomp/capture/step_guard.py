"""Notice when a step is not the one that was captured.

Tracing has no guards of its own, so each call compares what tracing baked in. What differs either leads to another
capture (a key that was not seen yet) or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.identity import Identity
from fxcomp.capture.optimizer import live_numbers
from fxcomp.capture.reach.worlds import Change, Worlds
from fxcomp.capture.shared_memory import memory_of
from fxcomp.capture.training import Training
from fxcomp.capture.values import is_plain, key_of, what_is
from fxcomp.errors import StepChanged, UnsupportedBatch

T = TypeVar("T")

_PLAIN = (bool, int, float, str, type(None))


class TensorType(NamedTuple):
    """What is baked in of a tensor in a batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    strides: tuple[int, ...] | None
    """None where it is contiguous."""
    requires_grad: bool
    same_as: int
    """The first leaf that is the same tensor, which may be itself."""
    shares_with: int
    """The first leaf in the same memory, which may be itself. What is written into one changes the other."""


@dataclass(frozen=True, slots=True)
class BatchType:
    """Structure, shapes, dtypes and devices of a batch; values that are no tensors are part of it."""

    structure: pytree.TreeSpec
    leaves: tuple[Hashable, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(leaf.shape if isinstance(leaf, TensorType) else None for leaf in self.leaves)

    def like(self) -> Hashable:
        """The type without sizes: what two batches of different lengths share."""
        ranks = tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf, TensorType) else leaf for leaf in self.leaves)
        return (str(self.structure), ranks)


def batch_type(batch: Any) -> tuple[BatchType, list[Any]]:
    """The type of a batch, and its leaves."""
    leaves, structure = pytree.tree_flatten(batch)
    tensors: dict[int, int] = {}
    memories: dict[int, int] = {}
    return BatchType(structure, tuple(_leaf_type(x, i, tensors, memories) for i, x in enumerate(leaves))), leaves


def batch_change(batch: Any, before: BatchType, now: BatchType) -> Change | None:
    """The first thing that differs between the types of an earlier batch and of this one."""
    if before.structure != now.structure:
        return Change("the structure of the batch", str(before.structure), str(now.structure), _PAD)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    for path, was, new in zip(paths, before.leaves, now.leaves, strict=True):
        if was == new:
            continue
        if isinstance(was, TensorType) and isinstance(new, TensorType):
            if was.shape != new.shape:
                return Change(f"the shape of batch{path}", str(list(was.shape)), str(list(new.shape)), _PAD)
            return Change(f"the type of batch{path}", str(was), str(new), "Convert it before the call.")
        return Change(f"batch{path}", _plain_text(was), _plain_text(new), "Pass it as a tensor.")
    return None


_PAD = "Pad batches to a few sizes, and give all of them one structure."


def _plain_text(leaf: Hashable) -> str:
    return "a tensor" if isinstance(leaf, TensorType) else str(cast("tuple[object, ...]", leaf)[-1])


def _leaf_type(leaf: Any, place: int, tensors: dict[int, int], memories: dict[int, int]) -> Hashable:
    if isinstance(leaf, Tensor):
        strides = None if leaf.is_contiguous() else leaf.stride()
        same_as = tensors.setdefault(id(leaf), place)
        shares_with = memories.setdefault(memory_of(leaf), place)
        device = str(leaf.device)
        return TensorType(tuple(leaf.shape), leaf.dtype, device, strides, leaf.requires_grad, same_as, shares_with)
    if is_plain(leaf):
        return key_of(leaf)
    remedy = "call its .item() before the step" if hasattr(leaf, "item") else "convert it before the call"
    raise UnsupportedBatch(
        f"a batch holds a {what_is(leaf)}; it may hold tensors, numbers, strings and None in tuples, lists and"
        f" dicts.\n  Make it one of these: {remedy}."
    )


class Key(NamedTuple):
    """Everything but the batch that a capture bakes in."""

    world: int
    """The number of what Python could read; the same numbers mean the same on this rank alone."""
    options: tuple[Hashable, ...]
    surroundings: tuple[Hashable, ...]


class StepGuard:
    """Reads everything that a capture depends on, cheaply, before each step."""

    def __init__(self, training: Training):
        self._optimizer = training.optimizer
        self._identity = Identity(training.model, training.optimizer)
        self._worlds = Worlds(training.model, {"loss_fn": training.loss_fn, **compat.global_module_hooks()})

    def key(self) -> Key:
        """Look at everything. Raises StepChanged for what another capture would not be enough for."""
        self._identity.check()
        world = self._worlds.number(before_walk=self._identity.check_structure)
        return Key(world, tuple(map(_baked_options, self._optimizer.param_groups)), _surroundings())

    def change(self, old: Key, new: Key) -> Change | None:
        """The first thing that differs between two keys; None if nothing does."""
        if change := self._worlds.difference(old.world, new.world):
            return change
        for number, (was, now) in enumerate(zip(old.options, new.options, strict=True)):
            if was != now:
                return Change(f"the options of parameter group {number}", str(was), str(now))
        for name, was, now in zip(_SURROUNDINGS, old.surroundings, new.surroundings, strict=True):
            if was != now:
                return Change(name, str(was), str(now))
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
    """A parameter group's options without the numbers that are live; of those, only which are there."""
    live = live_numbers(group)
    baked = tuple((key, value) for key, value in group.items() if isinstance(value, _PLAIN) and key not in live)
    own = tuple((key, value) for key, value in baked if key not in ("initial_lr", "max_lr", "min_lr", "max_momentum",
                                                                    "base_momentum"))  # fmt: skip
    return (own, tuple(live))


_SURROUNDINGS: dict[str, Callable[[], Hashable]] = {
    "autocast on the CPU": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "autocast on CUDA": lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "torch.backends.cudnn": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic),
    "which kernels attention may use": lambda: (
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ),
}


def _surroundings() -> tuple[Hashable, ...]:
    """What torch is told outside the model, and tracing bakes in."""
    return tuple(read() for read in _SURROUNDINGS.values())
