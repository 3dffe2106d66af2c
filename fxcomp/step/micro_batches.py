"""Groups of micro-batches.

step(batch)              adds gradients to the sums; nothing is sent
step(batch)              last of the group: sends the sums, updates, clears the sums
step(batch, last=True)   ends a shorter group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxcomp.capture.training import LossScale
from fxcomp.errors import BadCall, ReplicasDiffer
from fxcomp.runtime.aside import Aside
from fxcomp.runtime.clock import Looks
from fxcomp.site import Site
from fxcomp.state.inputs import Sums


class MicroBatchGroup:
    """Current group of `length` micro-batches, or fewer if it ends early."""

    def __init__(self, sums: Sums, length: int, site: Site, scale: LossScale | None):
        self._sums, self._length, self._scale = sums, length, scale
        ranks = site.ranks.world_size
        self._aside = Aside(site.transport, ranks, site.device) if length > 1 and ranks > 1 else None
        self._changes_of_scale = 0
        """`LossScale.changes` when the group began."""
        self._looks: list[Looks] = []
        self.is_like_first = True
        """True if all batches of the group have the type of the job's first batch."""
        self._unused: frozenset[str] | None = None

    @property
    def has_begun(self) -> bool:
        return self._sums.micro_batches > 0

    def ends(self, *, last: bool) -> bool:
        """Return True if the next micro-batch is the last one."""
        return last or self._sums.micro_batches + 1 >= self._length

    def check_scale(self) -> None:
        """Clear the sums and raise BadCall if the loss scale changed inside the group."""
        if self._scale is None or not self.has_begun or self._scale.changes() == self._changes_of_scale:
            return
        summed = self._sums.micro_batches
        self.clear()
        raise BadCall(
            f"the scale of the loss changed after {summed} of {self._length} micro-batches: their sums are in units of"
            " the old scale, and are discarded.\n"
            "  Call scaler.update(), or load a scaler's state, only after the call that ends a group."
        )

    def add(self, looks: Looks, unused: Sequence[str], *, is_like_first: bool) -> None:
        if self._scale is not None and not self.has_begun:
            self._changes_of_scale = self._scale.changes()
        self._sums.micro_batches += 1
        self._looks.append(looks)
        self._unused = frozenset(self.unused(unused))
        self.is_like_first &= is_like_first

    def unused(self, unused: Sequence[str]) -> Sequence[str]:
        """Return the parameters unused in the whole group. `unused`: parameters unused in the next micro-batch."""
        return unused if self._unused is None else [name for name in unused if name in self._unused]

    def complete(self, *, is_weighted: bool) -> None:
        """Let the next micro-batch end the group. `is_weighted`: the loss function returns a WeightedLoss."""
        if self._length > 1 or self._scale is not None:
            self._sums.complete(is_weighted=is_weighted)

    def compare_lengths(self) -> Callable[[], None] | None:
        """Begin to compare the group's length between ranks, while forward and backward run. Every rank calls it.

        The returned function waits, and raises ReplicasDiffer on all ranks if the lengths differ.
        """
        if self._aside is None:
            return None
        coming = self._aside.gather(self._sums.micro_batches + 1)

        def check() -> None:
            found = coming.read()
            other = next((rank for rank, length in enumerate(found) if length != found[0]), None)
            if other is not None:
                raise ReplicasDiffer(
                    f"rank 0 ends a group after {found[0]:g} micro-batches, rank {other} after {found[other]:g}: the"
                    " mean of their sums would be wrong. Nothing has been sent or updated, and the sums are discarded."
                    "\n  Call step the same number of times on every rank, with last=True at the same call."
                )

        return check

    def took(self, last: Looks) -> tuple[Looks, ...]:
        return (*self._looks, last)

    def clear(self) -> None:
        self._sums.clear()
        self._looks.clear()
        self.is_like_first, self._unused = True, None

    def check_is_over(self) -> None:
        if self.has_begun:
            raise BadCall(
                f"the gradients of {self._sums.micro_batches} of {self._length} micro-batches are summed up, which no"
                " saved state holds.\n"
                "  Save after the call that ends the group; step(batch, last=True) ends a shorter one."
            )
