"""Hand over what ranks owe from one layout to another: the sum over the ranks stays what it was.

What a rank keeps stands for `weight · values` of the mean gradient, in every slot, and what waits for its next gradient
counts as it is: `owed / ranks`. Together the ranks owe E, the sum of all that. Under another plan, or for another
number of ranks,

- what lies as it did, in the same slot and shared by ranks in the same way, stays where it is, bit for bit where the
  unit is the same;
- of everything else E goes into the first slot of the new layout: every rank that keeps a place there holds E / total,
  where total is the sum of their weights, and other slots start at zero;
- what no slot feeds back any more waits for the next gradient.

So three ranks that owe 3, 6 and 9 (of the mean gradient: 6) become two that hold 6 each, and still owe 6. Two shots
keep a second residual, of the mean itself: the owner's counts once, a worker's 1/ranks. Both go into the same E.
Holding a part each instead of handing one rank all of it keeps small what each rank compresses next.
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
    """Values of states that all ranks share, at topics that begin alike."""

    peers: Ranks
    sum_over_ranks: Callable[[Tensor], None]
    """Make a tensor its sum over the ranks, in place; every rank calls it."""
    topic: str
    device: torch.device

    def attempt(self, what: str, work: Callable[[], T]) -> T:
        return self.peers.attempt(f"{self.topic}: {what}", work)

    def gather(self, what: str, value: T) -> list[T]:
        return self.peers.gather(f"{self.topic}: {what}", value)


@dataclass(frozen=True, slots=True)
class Holding:
    """This rank's part of what so many ranks owe: slices in buckets, and what waits for the next gradient, flat.

    There may be several of a parameter: from ranks that are no more.
    """

    ranks: int
    slices: Mapping[str, Sequence[Slice]]
    owed: Mapping[str, Sequence[Tensor]]

    @classmethod
    def of(cls, ranks: int, slices: Mapping[str, Sequence[Slice]], owed: Mapping[str, Tensor]) -> Holding:
        """Take what one rank holds by itself."""
        return cls(ranks, slices, {name: [waits] for name, waits in owed.items()})

    def lies(self, name: str, into: Arena, ranks: int) -> bool:
        """Tell a parameter of which everything can stay where it is, or that has nothing."""
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
        """Tell a parameter of which this rank is to keep something, and brings nothing."""
        return bool(into.slices.get(name)) and not self.slices.get(name) and not self.owed.get(name)

    def add_to(self, name: str, mean: Tensor) -> None:
        for held in self.slices.get(name, ()):
            held.add_to(mean)
        for value in self.owed.get(name, ()):
            mean.add_(value.to(mean.device), alpha=1 / self.ranks)

    def stay(self, name: str, into: Arena) -> Tensor | None:
        """Put what lies as it did into its slots; returns what is still owed."""
        for slot in into.slices.get(name, ()):
            held = next((piece for piece in self.slices.get(name, ()) if slot.lies_like(piece)), None)
            if held is None:
                slot.values.zero_()
            else:
                slot.go_on_from(held)
        return next((value.clone() for value in self.owed.get(name, ())), None)


def hand_over(holding: Holding, into: Arena, sizes: Mapping[str, int], sharing: Sharing) -> dict[str, Tensor]:
    """Fill an arena with what is held, and return what waits for the next gradients; every rank calls it.

    `sizes` has every parameter that gets a gradient, in the same order on all ranks. The arena must not share memory
    with what is held.
    """

    names, ranks = list(sizes), sharing.peers.world_size

    def looked_at() -> tuple[list[int], list[int], list[int]]:
        moving = [k for k, name in enumerate(names) if not holding.lies(name, into, ranks)]
        owed = [k for k, name in enumerate(names) if name in holding.owed and name not in into.covered]
        return moving, owed, [k for k, name in enumerate(names) if holding.lacks(name, into)]

    everyone = sharing.gather("where residuals lie", sharing.attempt("reading residuals", looked_at))
    # What moves on one rank moves on all of them: each gets its part of the mean. And all wait for the same. What one
    # rank lacks and another has moves too: they may have to hold the same.
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
    """Copy the part of a mean that nobody keeps a slot for; None where there is none."""
    if sum(map(len, covered)) == mean.numel():
        return None
    rest = mean.clone()
    for extent in covered:
        rest[extent.start : extent.stop] = 0
    return rest
