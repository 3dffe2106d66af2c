"""Move residuals from one layout to another while preserving their sum over the ranks.

A slice, part of a rank's residual in one slot, contributes `weight · values` to the mean gradient's residual. Owed
values have no slot and are added to the rank's next gradient; they contribute `owed / ranks`. Under another plan or
number of ranks,

- a slice stays on its rank if its slot, place and fraction of all ranks' weights are unchanged: its values are copied,
  and rescaled if the weight itself has changed;
- the rest R of the sum goes to the first slot of the new layout: each rank with this slot gets R / (sum of these ranks'
  weights), and other slots start at zero;
- values that no slot covers are owed.

For example, residuals 3, 6 and 9 on three ranks (mean 6) become 6 on each of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fxcomp.ranks import Ranks
from fxcomp.runtime.arena import Arena, Slice

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Collectives on states. `topic` begins the description of each collective in errors."""

    peers: Ranks
    sum_over_ranks: Callable[[Tensor], None]
    """Sums a tensor over the ranks in place. Every rank calls it."""
    topic: str
    device: torch.device

    def attempt(self, what: str, work: Callable[[], T]) -> T:
        return self.peers.attempt(f"{self.topic}: {what}", work)

    def gather(self, what: str, value: T) -> list[T]:
        return self.peers.gather(f"{self.topic}: {what}", value)


@dataclass(frozen=True, slots=True)
class Holding:
    """This rank's part of the residual of `ranks` ranks: slices, and flat owed values.

    A parameter has several owed values if this rank loads the states of several saved ranks.
    """

    ranks: int
    slices: Mapping[str, Sequence[Slice]]
    owed: Mapping[str, Sequence[Tensor]]

    @classmethod
    def of(cls, ranks: int, slices: Mapping[str, Sequence[Slice]], owed: Mapping[str, Tensor]) -> Holding:
        return cls(ranks, slices, {name: [waits] for name, waits in owed.items()})

    def lies(self, name: str, into: Arena, ranks: int) -> bool:
        """Return True if a parameter's slices and owed values, if any, can stay on this rank."""
        held, owed = self.slices.get(name, ()), self.owed.get(name, ())
        if not held and not owed:
            return True
        if ranks != self.ranks:
            return False
        if owed:
            return not held and len(owed) == 1 and name not in into.covered
        slots = into.slices.get(name, ())
        return all(sum(slot.lies_like(piece) for slot in slots) == 1 for piece in held) and all(
            sum(slot.lies_like(piece) for piece in held) <= 1 for slot in slots
        )

    def lacks(self, name: str, into: Arena) -> bool:
        """Return True if this rank has slots for a parameter but no values."""
        return bool(into.slices.get(name)) and not self.slices.get(name) and not self.owed.get(name)

    def add_to(self, name: str, mean: Tensor) -> None:
        for held in self.slices.get(name, ()):
            held.add_to(mean)
        for value in self.owed.get(name, ()):
            mean.add_(value.to(mean.device), alpha=1 / self.ranks)

    def stay(self, name: str, into: Arena) -> Tensor | None:
        """Copy matching slices into their slots. Return a copy of the owed values, or None."""
        for slot in into.slices.get(name, ()):
            held = next((piece for piece in self.slices.get(name, ()) if slot.lies_like(piece)), None)
            if held is None:
                slot.values.zero_()
            else:
                slot.go_on_from(held)
        return next((value.clone() for value in self.owed.get(name, ())), None)


def hand_over(holding: Holding, into: Arena, sizes: Mapping[str, int], sharing: Sharing) -> dict[str, Tensor]:
    """Fill the new residuals `into` from old ones, and return the values that are owed. Every rank calls it.

    `sizes` has each parameter with a gradient, in the same order on all ranks. `into` and `holding` must not share
    memory.
    """

    names, ranks = list(sizes), sharing.peers.world_size

    def looked_at() -> tuple[list[int], list[int], list[int]]:
        moving = [k for k, name in enumerate(names) if not holding.lies(name, into, ranks)]
        owed = [k for k, name in enumerate(names) if name in holding.owed and name not in into.covered]
        return moving, owed, [k for k, name in enumerate(names) if holding.lacks(name, into)]

    everyone = sharing.gather("where residuals lie", sharing.attempt("reading residuals", looked_at))
    # A parameter that moves on one rank moves on all, because each gets a part of the mean. A parameter moves too if
    # only some ranks owe its values, or if only some lack them, because values may have to be equal on all ranks.
    moving = {k for theirs, _, _ in everyone for k in theirs}
    lacks = Counter(k for _, _, theirs in everyone for k in theirs)
    moving |= {k for k, count in lacks.items() if count < ranks}
    waits = Counter(k for _, theirs, _ in everyone for k in theirs)
    moved = [name for k, name in enumerate(names) if k in moving or waits[k] not in (0, ranks)]

    def adding() -> tuple[Tensor, dict[str, Tensor]]:
        parts = [sizes[name] for name in moved]
        whole = torch.zeros(sum(parts), device=sharing.device)
        means = dict(zip(moved, torch.split(whole, parts), strict=True))
        for name, mean in means.items():
            holding.add_to(name, mean)
        return whole, means

    whole, means = sharing.attempt("adding up residuals", adding)
    if moved:
        sharing.sum_over_ranks(whole)

    def placing() -> dict[str, Tensor]:
        owed: dict[str, Tensor] = {}
        for name in sizes:
            if name in means:
                for slot in into.slices.get(name, ()):
                    slot.stand_for(means[name])
                stays = _uncovered(means[name], into.covered.get(name, ()))
            else:
                stays = holding.stay(name, into)
            if stays is not None:
                owed[name] = stays.to(sharing.device)
        return owed

    return sharing.attempt("placing residuals", placing)


def _uncovered(mean: Tensor, covered: Sequence[range]) -> Tensor | None:
    """Return the mean with zeros at elements that a slot covers; None if slots cover all elements."""
    if sum(map(len, covered)) == mean.numel():
        return None
    rest = mean.clone()
    for extent in covered:
        rest[extent.start : extent.stop] = 0
    return rest
