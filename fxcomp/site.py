"""Ranks, cluster, network and device of a step.

Ranks in other groups average other tensors over the same links at the same time:

                 host 0          host 1
    group 0      rank 0 ──────── rank 2        shard 0 of the gradients
    group 1      rank 1 ──────── rank 3        shard 1, on the same link as group 0

Groups with equal buckets, hosts and options measure links at the same time, and the first group chooses one plan for
all. Their collectives then start together, and share links equally.
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
    """Communication between process groups that share links: this rank and one rank of each other group."""

    ranks: Ranks
    group: Any = None

    @classmethod
    def of(cls, group: Any, what: str) -> Beside:
        """Return the ranks of process group `group`. All of these ranks call `of`."""
        ranks = Ranks.join(None, f"{what} next to each other", group)
        return cls(ranks, group) if ranks.world_size > 1 else NOBODY

    def together(self, what: str) -> AbstractContextManager[None]:
        """Run a block on the ranks of all groups. An error on one rank is raised on all."""
        return self.ranks.together(what)

    def do_the_same(self, topic: str, facts: dict[str, Any]) -> bool:
        """Return True if all groups pass equal `facts`. All groups get the same result."""
        everyone = self.ranks.gather(topic, facts)
        return all(theirs == everyone[0] for theirs in everyone)

    def gather(self, topic: str, value: T) -> list[T]:
        """Return every group's value (plain data)."""
        return self.ranks.gather(topic, value)

    def from_first(self, topic: str, work: Callable[[], Any]) -> Any:
        return self.ranks.from_rank_0(topic, work)

    def largest(self, value: Tensor) -> None:
        """Set a tensor to its maximum over the groups, in place. All groups call it."""
        if self.group is not None:
            compat.largest(value, self.group)


NOBODY = Beside(ALONE)


@dataclass(frozen=True, slots=True)
class Site:
    ranks: Ranks
    cluster: Cluster
    transport: Transport
    device: torch.device
    beside: Beside = NOBODY
    """Groups that share links and hosts with this site's ranks."""

    @classmethod
    def of(cls, ranks: Ranks, cluster: Cluster | None, device: torch.device, beside: Beside = NOBODY) -> Site:
        """Return the site for the given cluster, or for a cluster derived from host names. Every rank calls it."""
        found = ranks.cluster_of(cluster)
        return cls(ranks, found, ranks.transport(found), device, beside)

    @classmethod
    def imagined(cls, cluster: Cluster, device: torch.device) -> Site:
        """Return a site for planning, without communication."""
        return cls(ALONE, cluster, NullTransport(), device)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def everyone(self, topic: str, value: T) -> list[T]:
        """Return the values (plain data) of all ranks of all groups. All these ranks call it."""
        return [each for group in self.beside.gather(topic, self.ranks.gather(topic, value)) for each in group]

    def processors(self) -> Processors:
        """Return the processors per rank. Ranks that may use the same processor share it evenly.

        A CPU quota is assumed to cover all ranks of a machine, because they usually run in one container.
        """
        here, usable = compat.machine_name(), compat.usable_processors()
        machines = self.everyone("which machine each rank is on", here)
        allowed = self.everyone("which processors each rank may use", usable)
        neighbours = [theirs for machine, theirs in zip(machines, allowed, strict=True) if machine == here]
        mine = sum(1 / sum(number in theirs for theirs in neighbours) for number in usable)
        quota = compat.processor_quota() / len(neighbours)
        count = min(self.everyone("counting processors", min(mine, quota)))
        threads = max(self.everyone("counting threads", torch.get_num_threads()))
        # Compute was measured on all ranks at once, so it used only this rank's processors.
        return Processors(count, min(threads, count))

    def make_groups_for(self, plan: Plan) -> None:
        """Create the process groups that a plan still needs. Every rank calls it."""
        self.ranks.extend(self.transport, plan)

    def sum_over_ranks(self, value: Tensor) -> None:
        self.transport.all_reduce(value, "world", "main").wait()

    def gather_numbers(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, in rank order. Every rank passes equally many.

        `what` names the numbers in errors.
        """
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = mine.new_zeros(self.ranks.world_size * len(values))
        try:
            self.transport.start(Transfer(Pattern.ALL_GATHER, mine, everyone, self.ranks.world_size, "world")).wait()
        except LostTouch as lost:
            raise LostTouch(f"all_gather@world of {what} did not end: {lost}") from None
        return [part.tolist() for part in everyone.view(-1, len(values))]  # pyright: ignore[reportUnknownMemberType]
