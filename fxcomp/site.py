"""Name the site of a step: its ranks, the cluster that they make, the network between them, the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import LostTouch
from fxcomp.plan.plan import Plan
from fxcomp.ranks import ALONE, Ranks
from fxcomp.runtime.moves import Move
from fxcomp.runtime.transport import NullTransport, Transport


@dataclass(frozen=True, slots=True)
class Site:
    """One rank's place among the others."""

    ranks: Ranks
    cluster: Cluster
    transport: Transport
    device: torch.device

    @classmethod
    def of(cls, ranks: Ranks, cluster: Cluster | None, device: torch.device) -> Site:
        """Take the user's cluster, or the one that the hosts' names tell; every rank calls it."""
        found = ranks.cluster_of(cluster)
        return cls(ranks, found, ranks.transport(found), device)

    @classmethod
    def imagined(cls, cluster: Cluster, device: torch.device) -> Site:
        """A cluster that is only asked about: nothing is sent."""
        return cls(ALONE, cluster, NullTransport(), device)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def make_groups_for(self, plan: Plan) -> None:
        """Make the process groups that a plan needs beyond those that there are; every rank calls it."""
        self.ranks.extend(self.transport, plan)

    def sum_over_ranks(self, value: Tensor) -> None:
        """Make a tensor its sum over all ranks, in place; every rank calls it."""
        self.transport.all_reduce(value, "world", "main").wait()

    def gather_numbers(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, as many on each, in rank order; every rank calls it. An error says what they are."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = mine.new_zeros(self.ranks.world_size * len(values))
        try:
            self.transport.all_gather(Move(mine, everyone, self.ranks.world_size, "world")).wait()
        except LostTouch as lost:
            raise LostTouch(f"all_gather@world of {what} did not end: {lost}") from None
        return [part.tolist() for part in everyone.view(-1, len(values))]  # pyright: ignore[reportUnknownMemberType]
