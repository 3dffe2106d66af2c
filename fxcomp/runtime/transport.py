"""Move payloads between ranks: collectives over process groups, or nowhere at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from fxcomp import compat


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """What the runtime asks of a network. `level` is intra, inter or world; `lane` is main, or pool for offloads."""

    def all_reduce(self, value: Tensor, level: str, lane: str) -> Work:
        """Sum `value` over the ranks, in place."""
        ...

    def all_gather(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        """Fill `out` with every rank's `value`, in rank order."""
        ...

    def reduce_scatter(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        """Sum `value` over the ranks; `out` gets this rank's part of it."""
        ...

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:
        """Give every rank rank `source`'s `value`, in place."""
        ...


class Groups:
    """Collectives over torch.distributed process groups, one for each level and lane.

    A lane has a group of its own because another thread issues its collectives: order holds only within a group.
    """

    def __init__(self, groups: Mapping[tuple[str, str], dist.ProcessGroup]):
        self._groups = dict(groups)

    @classmethod
    def create(cls, members: Mapping[str, Sequence[Sequence[int]]], lanes: Sequence[str]) -> Groups:
        """Make the groups; every rank calls this with the same arguments. `members` lists a level's groups of ranks."""
        mine: dict[tuple[str, str], dist.ProcessGroup] = {}
        for lane in lanes:
            for level, lists in members.items():
                for ranks in lists:
                    backend = "gloo" if lane == "pool" else None
                    group: Any = dist.new_group(list(ranks), backend=backend)  # pyright: ignore[reportUnknownMemberType]  # untyped
                    if dist.get_rank() in ranks:
                        mine[level, lane] = group
        return cls(mine)

    def all_reduce(self, value: Tensor, level: str, lane: str) -> Work:
        group = self._groups[level, lane]
        return _started(dist.all_reduce(value, group=group, async_op=True))  # pyright: ignore[reportUnknownMemberType]  # untyped

    def all_gather(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        return _started(compat.all_gather(out, value, group=self._groups[level, lane], async_op=True))

    def reduce_scatter(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        return _started(compat.reduce_scatter(out, value, group=self._groups[level, lane], async_op=True))

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:
        return _started(dist.broadcast(value, source, group=self._groups[level, lane], async_op=True))

    def joined(self, other: Groups) -> Groups:
        """These groups and others."""
        return Groups({**self._groups, **other._groups})


def _started(work: Any) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


class _Done:
    def wait(self) -> None:
        return


class Nowhere:
    """No network: every collective ends at once, with this rank's own values.

    What a step costs without communication is measured with it.
    """

    def all_reduce(self, value: Tensor, level: str, lane: str) -> Work:  # noqa: ARG002
        return _Done()

    def all_gather(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:  # noqa: ARG002
        out.view(-1, value.numel()).copy_(value)
        return _Done()

    def reduce_scatter(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:  # noqa: ARG002
        out.copy_(value[: out.numel()])
        return _Done()

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:  # noqa: ARG002
        return _Done()
