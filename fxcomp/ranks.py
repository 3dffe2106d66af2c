"""This rank among the others: agreement while compiling, process groups, and the same values to start from."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.cluster import Cluster, Level, Link
from fxcomp.errors import BadCluster, NoProcessGroup
from fxcomp.runtime.agree import Agreement
from fxcomp.runtime.transport import Groups, Nowhere, Transport
from fxcomp.strategy import Device, Plan

T = TypeVar("T")

LOCAL_LINK = Link(alpha_us=30.0, gb_per_s=5.0)  # assumed: loopback; live measurements replace it

_calls: dict[str, itertools.count[int]] = defaultdict(itertools.count)


class Ranks:
    """All ranks that compile the same thing now. Alone, every method is nothing."""

    def __init__(self, rank: int, world_size: int, agreement: Agreement | None, fits_links: bool):
        self.rank, self.world_size = rank, world_size
        self.fits_links = fits_links
        self._agreement = agreement

    @classmethod
    def join(cls, cluster: Cluster | None, what: str) -> Ranks:
        """Meet the others, who must all come here for the same `what`, as many times as this rank."""
        running = dist.is_available() and dist.is_initialized()
        if not running:
            if cluster is not None and cluster.world_size > 1:
                raise NoProcessGroup(
                    f"the cluster has {cluster.world_size} ranks, but torch.distributed is not initialised in this"
                    " process.\n  Call torch.distributed.init_process_group first (torchrun sets what it needs), or use"
                    " fxcomp explain to ask about a cluster that is not here."
                )
            return cls(0, 1, None, False)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if world_size == 1:
            _check_size(cluster, 1)
            return cls(0, 1, None, False)
        name = f"{what}_{next(_calls[what])}"
        agreement = Agreement(compat.default_store(), name, rank, world_size, compat.group_timeout())
        ranks = cls(rank, world_size, agreement, cluster is None)
        ranks.attempt("checking the cluster", lambda: _check_size(cluster, world_size))
        return ranks

    # Agreeing

    def attempt(self, topic: str, work: Callable[[], T]) -> T:
        """Do something that may fail here, and tell the others if it did."""
        if self._agreement is None:
            return work()
        done: list[T] = []
        self._agreement.attempt(topic, lambda: done.append(work()))
        return done[0]

    def gather(self, topic: str, value: T) -> list[T]:
        """Every rank's value, which is plain data, in rank order."""
        return [value] if self._agreement is None else self._agreement.attempt(topic, lambda: value)

    def from_rank_0(self, topic: str, work: Callable[[], Any]) -> Any:
        """What rank 0 computes, which is plain data."""
        return work() if self._agreement is None else self._agreement.from_rank_0(topic, work)

    def check_same(self, topic: str, facts: dict[str, Any]) -> None:
        """Raise ModelsDiffer unless all ranks bring the same facts."""
        if self._agreement is not None:
            self._agreement.check_same(topic, facts)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Start from rank 0's values, as DistributedDataParallel does."""
        if self._agreement is None:
            return
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.data, 0)

    def has_spare_processor(self) -> bool:
        """Whether the ranks on this machine leave it a processor beside the threads that they compute with."""
        here = compat.machine_name()
        sharing = self.gather("counting ranks on a machine", here).count(here)
        spare = compat.processors() // sharing > torch.get_num_threads()
        return all(self.gather("counting processors", spare))

    # The network

    def cluster_of(self, given: Cluster | None) -> Cluster:
        """The user's cluster, or one told by the hosts' names; its links are then measured, not looked up."""
        if given is not None:
            return given
        if self._agreement is None:
            return Cluster(1, 1, intra=LOCAL_LINK, inter=LOCAL_LINK)
        names = self._agreement.attempt("naming hosts", compat.host_name)
        hosts = list(dict.fromkeys(names))
        placement = tuple(hosts.index(name) for name in names)
        counts = {placement.count(host) for host in range(len(hosts))}
        if len(counts) > 1:
            return Cluster(self.world_size, 1, intra=LOCAL_LINK, inter=LOCAL_LINK)
        return Cluster(len(hosts), counts.pop(), intra=LOCAL_LINK, inter=LOCAL_LINK, placement=placement)

    def transport(self, cluster: Cluster) -> Transport:
        """Groups for everything that is measured before there is a plan."""
        if self._agreement is None:
            return Nowhere()
        return Groups.create(_members(cluster), ["main"], _direct(cluster))

    def extend(self, transport: Transport, plan: Plan, cluster: Cluster) -> Transport:
        """Add the groups of the pool, if the plan offloads anything."""
        offloads = any(bucket.strategy.device is Device.CPU for bucket in plan.buckets)
        if not offloads or not isinstance(transport, Groups):
            return transport
        return transport.joined(Groups.create(_members(cluster), ["pool"], _direct(cluster)))


ALONE = Ranks(0, 1, None, False)
"""One rank that has nobody to agree with."""


def _check_size(cluster: Cluster | None, world_size: int) -> None:
    if cluster is not None and cluster.world_size != world_size:
        raise BadCluster(
            f"the cluster {cluster.hosts}x{cluster.ranks_per_host} has {cluster.world_size} ranks,"
            f" the process group has {world_size}"
        )


def _direct(cluster: Cluster) -> list[str]:
    """The levels at which ranks have a link each. All ranks at once would share their hosts' links."""
    alone = cluster.hosts == 1 or cluster.ranks_per_host == 1
    return [level.value for level in Level if level is not Level.WORLD or alone]


def _members(cluster: Cluster) -> Mapping[str, list[tuple[int, ...]]]:
    """The groups of ranks at each level, in the same order on every rank. A level of one rank needs none."""
    members: dict[str, list[tuple[int, ...]]] = {}
    for level in Level:
        if cluster.ranks_at(level) > 1:
            members[level.value] = list(dict.fromkeys(cluster.group(level, rank) for rank in range(cluster.world_size)))
    return members
