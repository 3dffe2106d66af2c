"""The ranks beside a group: theirs average other tensors over the same links at the same time.

                 host 0          host 1
    group 0      rank 0 ──────── rank 2        shard 0 of the gradients
    group 1      rank 1 ──────── rank 3        shard 1, beside group 0 on the same link

Groups that begin each collective together share their links in the same way whenever they are timed, and with one
table of costs they decide for one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from fxcomp import compat
from fxcomp.ranks import ALONE, Ranks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Beside:
    """One rank of every group that shares links with this rank's: this one, and those that hold other shards."""

    ranks: Ranks
    group: Any = None
    """Their process group."""

    @classmethod
    def of(cls, group: Any, what: str) -> Beside:
        """Take the ranks of a process group; each of them calls it, for the same `what`."""
        ranks = Ranks.join(None, f"{what} beside each other", group)
        return cls(ranks, group) if ranks.world_size > 1 else NOBODY

    @contextmanager
    def together(self, what: str) -> Generator[None]:
        """Do something that the ranks of all groups do: where it fails on one it fails on all."""
        with self.ranks.together(what):
            yield

    def do_the_same(self, topic: str, facts: dict[str, Any]) -> bool:
        """Tell groups that have the same to decide; the answer is the same on all of them."""
        everyone = self.ranks.gather(topic, facts)
        return all(theirs == everyone[0] for theirs in everyone)

    def gather(self, topic: str, value: T) -> list[T]:
        """Every group's value, which is plain data, in the groups' order."""
        return self.ranks.gather(topic, value)

    def from_first(self, topic: str, work: Callable[[], Any]) -> Any:
        """Hand all groups what the first one computes, which is plain data."""
        return self.ranks.from_rank_0(topic, work)

    def largest(self, value: Tensor) -> None:
        """Make a tensor its largest value over the groups, in place: all wait for the last one."""
        if self.group is not None:
            compat.largest(value, self.group)


NOBODY = Beside(ALONE)
"""No other group."""
