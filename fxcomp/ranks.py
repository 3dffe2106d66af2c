"""This rank among the others: agreement while compiling, process groups, and the same values to start from."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.cluster import Cluster, Level, Link
from fxcomp.cost.timeline import Processors
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
                own = _own_memory(tensor.data)
                sent = own.contiguous()
                dist.broadcast(sent.view(-1).view(torch.uint8), 0)
                if sent is not own:
                    own.copy_(sent)

    def processors(self) -> Processors:
        """What each rank's threads share: the processors it may use, each evenly among the ranks that may use it.

        A quota is taken to be shared by all ranks on the machine: they usually run in one container.
        """
        here, usable = compat.machine_name(), compat.usable_processors()
        machines = self.gather("which machine each rank is on", here)
        everyone = self.gather("which processors each rank may use", usable)
        neighbours = [theirs for machine, theirs in zip(machines, everyone, strict=True) if machine == here]
        mine = sum(1 / sum(number in theirs for theirs in neighbours) for number in usable)
        count = min(self.gather("counting processors", min(mine, compat.processor_quota() / len(neighbours))))
        threads = max(self.gather("counting threads", torch.get_num_threads()))
        # What compute takes was measured with all ranks computing: more than there is it did not take.
        return Processors(count, min(threads, count))

    # The network

    def cluster_of(self, given: Cluster | None) -> Cluster:
        """The user's cluster, or one told by the hosts' names; its links are then measured, not looked up."""
        if given is not None:
            return given
        if self._agreement is None:
            return Cluster(1, 1, intra=LOCAL_LINK, inter=LOCAL_LINK)
        names = self._agreement.attempt("naming hosts", compat.host_name)
        return Cluster.placed(_places(names), intra=LOCAL_LINK, inter=LOCAL_LINK)

    def transport(self, cluster: Cluster) -> Transport:
        """Groups for everything that is measured before there is a plan."""
        if self._agreement is None:
            return Nowhere()
        return Groups.create(_members(cluster), ["main"], _direct(cluster))

    def extend(self, transport: Transport, plan: Plan, cluster: Cluster) -> Transport:
        """Add the groups of the pool, if the plan offloads anything and there are none yet."""
        offloads = any(bucket.strategy.device is Device.CPU for bucket in plan.buckets)
        if not offloads or not isinstance(transport, Groups) or "pool" in transport.lanes:
            return transport
        return transport.joined(Groups.create(_members(cluster), ["pool"], _direct(cluster)))


def cluster_of_group(group: Any = None, *, intra: Link = LOCAL_LINK, inter: Link = LOCAL_LINK) -> Cluster:
    """The cluster that a live process group's ranks make, by the group's numbering; default: all ranks.

    Every rank of the group calls it. They tell each other the names of their hosts through the store. What a group
    gets of the links that it shares with others, the cluster of all ranks knows:
    `cluster_of_group().reach(torch.distributed.get_process_group_ranks(group))`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise NoProcessGroup(
            "torch.distributed is not initialised in this process, so there is no group to describe.\n"
            "  Call torch.distributed.init_process_group first, or write the cluster: fxcomp.Cluster.parse('8x4', ...)."
        )
    ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise NoProcessGroup(f"rank {dist.get_rank()} is not in the group of {ranks}: only its ranks may describe it.")
    what = f"hosts of {','.join(map(str, ranks))}"
    name = f"{what}_{next(_calls[what])}"
    place = ranks.index(dist.get_rank())
    agreement = Agreement(compat.default_store(), name, place, len(ranks), compat.group_timeout())
    return Cluster.placed(_places(agreement.attempt("naming hosts", compat.host_name)), intra=intra, inter=inter)


ALONE = Ranks(0, 1, None, False)
"""One rank that has nobody to agree with."""


def _own_memory(tensor: Tensor) -> Tensor:
    """An expanded tensor's elements, each once."""
    return tensor[tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())]


def _places(names: Sequence[str]) -> list[int]:
    """A number for each host, in the order in which ranks name them."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def _check_size(cluster: Cluster | None, world_size: int) -> None:
    if cluster is not None and cluster.world_size != world_size:
        raise BadCluster(
            f"the cluster {cluster.shape} has {cluster.world_size} ranks, the process group has {world_size}"
        )


def _direct(cluster: Cluster) -> list[str]:
    """The levels at which ranks have a link each. All ranks at once would share their hosts' links."""
    alone = cluster.hosts == 1 or cluster.ranks_per_host == 1
    return [level.value for level in Level if level is not Level.WORLD or alone]


def _members(cluster: Cluster) -> Mapping[str, list[tuple[int, ...]]]:
    """The groups of ranks at each level, in the same order on every rank. A level of one rank needs none.

    Where hosts differ, no strategy shares the work between a host's ranks: there is one group, of all.
    """
    levels = list(Level) if cluster.is_even else [Level.WORLD]
    return {level.value: list(cluster.groups(level)) for level in levels if cluster.ranks_at(level) > 1}
