"""Name the site of a step: its ranks, the cluster that they make, the network between them, the device.

Ranks beside a group average other tensors over the same links at the same time.

                 host 0          host 1
    group 0      rank 0 ──────── rank 2        shard 0 of the gradients
    group 1      rank 1 ──────── rank 3        shard 1, beside group 0 on the same link

Groups that begin each collective together share their links in the same way whenever they are timed, and with one
table of costs they decide for one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.errors import LostTouch
from fxcomp.plan.plan import Plan
from fxcomp.ranks import ALONE, Ranks
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.runtime.transport import NullTransport, Transport

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

    def together(self, what: str) -> AbstractContextManager[None]:
        """Do something that the ranks of all groups do: where it fails on one it fails on all."""
        return self.ranks.together(what)

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


@dataclass(frozen=True, slots=True)
class Site:
    """One rank's place among the others."""

    ranks: Ranks
    cluster: Cluster
    transport: Transport
    device: torch.device
    beside: Beside = NOBODY
    """Other groups whose ranks share links and hosts with these."""

    @classmethod
    def of(cls, ranks: Ranks, cluster: Cluster | None, device: torch.device, beside: Beside = NOBODY) -> Site:
        """Take the user's cluster, or the one that the hosts' names tell; every rank calls it."""
        found = ranks.cluster_of(cluster)
        return cls(ranks, found, ranks.transport(found), device, beside)

    @classmethod
    def imagined(cls, cluster: Cluster, device: torch.device) -> Site:
        """A cluster that is only asked about: nothing is sent."""
        return cls(ALONE, cluster, NullTransport(), device)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def everyone(self, topic: str, value: T) -> list[T]:
        """The values of all ranks of all groups, which are plain data; every one of them calls it."""
        return [each for group in self.beside.gather(topic, self.ranks.gather(topic, value)) for each in group]

    def processors(self) -> Processors:
        """Count the processors of each rank: those that it may use, each evenly among the ranks that may use it.

        A quota is taken to be shared by all ranks on the machine: they usually run in one container.
        """
        here, usable = compat.machine_name(), compat.usable_processors()
        machines = self.everyone("which machine each rank is on", here)
        allowed = self.everyone("which processors each rank may use", usable)
        neighbours = [theirs for machine, theirs in zip(machines, allowed, strict=True) if machine == here]
        mine = sum(1 / sum(number in theirs for theirs in neighbours) for number in usable)
        quota = compat.processor_quota() / len(neighbours)
        count = min(self.everyone("counting processors", min(mine, quota)))
        threads = max(self.everyone("counting threads", torch.get_num_threads()))
        # What compute takes was measured with all ranks computing: more than there is it did not take.
        return Processors(count, min(threads, count))

    def make_groups_for(self, plan: Plan) -> None:
        """Make the process groups that a plan still lacks; every rank calls it."""
        self.ranks.extend(self.transport, plan)

    def sum_over_ranks(self, value: Tensor) -> None:
        """Make a tensor its sum over all ranks, in place; every rank calls it."""
        self.transport.all_reduce(value, "world", "main").wait()

    def gather_numbers(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, as many on each, in rank order; every rank calls it. An error says what they are."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = mine.new_zeros(self.ranks.world_size * len(values))
        try:
            self.transport.start(Transfer(Pattern.ALL_GATHER, mine, everyone, self.ranks.world_size, "world")).wait()
        except LostTouch as lost:
            raise LostTouch(f"all_gather@world of {what} did not end: {lost}") from None
        return [part.tolist() for part in everyone.view(-1, len(values))]  # pyright: ignore[reportUnknownMemberType]
