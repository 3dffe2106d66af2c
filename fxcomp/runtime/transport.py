"""Move payloads between ranks: collectives over process groups, or nowhere at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from fxcomp import compat


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """What the runtime asks of a network. `level` is intra, inter or world; `lane` is main, or pool for offloads."""

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:
        """Make `value` its sum over the ranks, or with `how="max"` the largest, in place."""
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


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group, its ranks in order, and whether payloads may go straight from rank to rank.

    Launches of a group come in the same order on every rank, so counting them gives equal tags.
    """

    handle: Any
    ranks: tuple[int, ...]
    is_direct: bool
    tags: Iterator[int] = field(default_factory=lambda: cycle(range(1 << 15)))


class Groups:
    """Collectives over torch.distributed process groups, one for each level and lane.

    A lane has a group of its own because another thread issues its collectives: order holds only within a group.
    """

    def __init__(self, groups: Mapping[tuple[str, str], _Group]):
        self._groups = dict(groups)

    @classmethod
    def create(
        cls, members: Mapping[str, Sequence[Sequence[int]]], lanes: Sequence[str], direct: Collection[str]
    ) -> Groups:
        """Make the groups; every rank calls this with the same arguments.

        `members` lists a level's groups of ranks. At the levels in `direct`, a gather may send every payload straight
        to each rank: right where no two ranks share a link, for there a ring would send fewer bytes over it.
        """
        mine: dict[tuple[str, str], _Group] = {}
        for lane in lanes:
            for level, lists in members.items():
                for ranks in lists:
                    backend = "gloo" if lane == "pool" else None
                    handle: Any = dist.new_group(list(ranks), timeout=compat.group_timeout(), backend=backend)  # pyright: ignore[reportUnknownMemberType]  # untyped
                    if dist.get_rank() in ranks:
                        is_direct = level in direct and dist.get_backend(handle) == "gloo"
                        mine[level, lane] = _Group(handle, tuple(ranks), is_direct)
        return cls(mine)

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:
        group = self._groups[level, lane].handle
        op = dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM
        return _started(dist.all_reduce(value, op, group=group, async_op=True))  # pyright: ignore[reportUnknownMemberType]  # untyped

    def all_gather(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        group = self._groups[level, lane]
        if group.is_direct and value.device.type == "cpu":
            return self._exchange(value, out, group)
        return _started(compat.all_gather(out, value, group=group.handle, async_op=True))

    def reduce_scatter(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        return _started(compat.reduce_scatter(out, value, group=self._groups[level, lane].handle, async_op=True))

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:
        return _started(dist.broadcast(value, source, group=self._groups[level, lane].handle, async_op=True))

    def _exchange(self, value: Tensor, out: Tensor, group: _Group) -> Work:
        """A gather as sends and receives, all at once.

        gloo's own all_gather takes turns: two ranks over 300 Mbit/s need 630 ms for 15 MB each, and 425 ms like this
        (measured, 2026-11).
        """
        tag = next(group.tags)
        size = value.numel()
        parts = {rank: out[place * size : (place + 1) * size] for place, rank in enumerate(group.ranks)}
        me = dist.get_rank()
        others = [rank for rank in group.ranks if rank != me]
        receives = [dist.irecv(parts[rank], rank, group=group.handle, tag=tag) for rank in others]
        sends = [dist.isend(value, rank, group=group.handle, tag=tag) for rank in others]
        parts[me].copy_(value)
        return _All([_started(work) for work in (*receives, *sends)])

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lane for _, lane in self._groups))

    def group(self, level: str, lane: str) -> tuple[Any, tuple[int, ...]]:
        """The process group itself and its ranks, for collectives that no step contains."""
        found = self._groups[level, lane]
        return found.handle, found.ranks

    def joined(self, other: Groups) -> Groups:
        """These groups and others."""
        return Groups({**self._groups, **other._groups})


def _started(work: Any) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


def call_when_done(work: Work, done: Callable[[], object]) -> None:
    """Have `done` called, in whatever thread finds out, when a collective ends, where its backend tells of that.

    gloo's collectives do; its sends and receives do not, and then `done` is never called.
    """
    try:
        future: Any = getattr(work, "get_future", lambda: None)()
    except RuntimeError:  # "not implemented", by torch 2.13's gloo for sends and receives
        return
    if future is not None:

        def told(_: object) -> None:
            done()

        future.add_done_callback(told)


@dataclass(frozen=True, slots=True)
class _All:
    """Several things under way, as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _Done:
    def wait(self) -> None:
        return


class Nowhere:
    """No network: every collective ends at once, with this rank's own values.

    What a step costs without communication is measured with it.
    """

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:  # noqa: ARG002
        return _Done()

    def all_gather(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:  # noqa: ARG002
        out.view(-1, value.numel()).copy_(value)
        return _Done()

    def reduce_scatter(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:  # noqa: ARG002
        out.copy_(value[: out.numel()])
        return _Done()

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:  # noqa: ARG002
        return _Done()
