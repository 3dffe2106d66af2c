"""Move payloads between ranks: collectives over process groups, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import LostTouch


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """A network as the runtime uses it. `level` is intra, inter or world; `lane` is main, or pool for offloads."""

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

    def settle(self) -> None:
        """Wait for what nobody has waited for, where every rank has launched it."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    """A process group, its ranks in order, and whether payloads may go straight from rank to rank.

    Launches of a group come in the same order on every rank, so counting them gives equal tags.
    """

    handle: Any
    """None once the group has been given up."""
    ranks: tuple[int, ...]
    is_direct: bool
    tags: Iterator[int] = field(default_factory=lambda: cycle(range(1 << 15)))
    under_way: set[_UnderWay] = field(default_factory=set["_UnderWay"])
    """Each keeps the connections open as long as it is known."""

    @property
    def live(self) -> Any:
        # Without a handle, torch would take the default group, which is the user's.
        if self.handle is None:
            raise LostTouch("the process group of this collective has been given up")
        return self.handle

    def started(self, work: Any) -> Work:
        assert work is not None, "this rank is not in the group"
        flying = _UnderWay(work, self.under_way)
        self.under_way.add(flying)
        return flying


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A collective of a group. Its wait raises LostTouch where another rank has gone, or does not come."""

    work: Any
    """None once the group has been given up."""
    others: set[_UnderWay]

    def wait(self) -> None:
        work = self.work
        if work is None:
            raise LostTouch("the process group of this collective has been given up")
        try:  # not with: this runs in every step
            work.wait()
        except RuntimeError as error:
            _TRANSLATED.__exit__(type(error), error, None)
            raise
        self.others.discard(self)

    def get_future(self) -> Any:
        return self.work.get_future()


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
        me, timeout = dist.get_rank(), compat.group_timeout()
        for lane in lanes:
            for level, lists in members.items():
                for ranks in lists:
                    backend = "gloo" if lane == "pool" else None
                    with _TRANSLATED:
                        handle: Any = dist.new_group(list(ranks), timeout=timeout, backend=backend)  # pyright: ignore[reportUnknownMemberType]  # untyped
                    if me in ranks:
                        is_direct = level in direct and dist.get_backend(handle) == "gloo"
                        mine[level, lane] = _Group(handle, tuple(ranks), is_direct)
        return cls(mine)

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:
        group = self._groups[level, lane]
        op = dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM
        with _TRANSLATED:
            return group.started(dist.all_reduce(value, op, group=group.live, async_op=True))  # pyright: ignore[reportUnknownMemberType]  # untyped

    def all_gather(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        group = self._groups[level, lane]
        with _TRANSLATED:
            if group.is_direct and value.device.type == "cpu":
                return _exchange(value, out, group)
            return group.started(compat.all_gather(out, value, group=group.live, async_op=True))

    def reduce_scatter(self, value: Tensor, out: Tensor, level: str, lane: str) -> Work:
        group = self._groups[level, lane]
        with _TRANSLATED:
            return group.started(compat.reduce_scatter(out, value, group=group.live, async_op=True))

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:
        group = self._groups[level, lane]
        with _TRANSLATED:
            return group.started(dist.broadcast(value, source, group=group.live, async_op=True))

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lane for _, lane in self._groups))

    def group(self, level: str, lane: str) -> tuple[Any, tuple[int, ...]]:
        """The process group itself and its ranks, for collectives that no step contains."""
        found = self._groups[level, lane]
        return found.live, found.ranks

    def add(self, other: Groups) -> None:
        """Take in other groups, in the place of those of the same level and lane."""
        self._groups.update(other._groups)

    @property
    def is_idle(self) -> bool:
        """True if every collective that was launched has been waited for."""
        return not any(group.under_way for group in self._groups.values())

    def settle(self) -> None:
        """Wait for what nobody has waited for, where every rank has launched it."""
        for group in self._groups.values():
            for flying in list(group.under_way):
                flying.wait()

    def give_up(self) -> None:
        """Close the groups' connections: other ranks that wait, or will, in one of them get an error at once.

        Whatever is under way here may go on until the others have noticed; nobody waits for it.
        """
        handles: list[Any] = []
        for group in self._groups.values():
            for flying in list(group.under_way):
                flying.work = None
            group.under_way.clear()
            if group.handle is not None:
                handles.append(group.handle)
                group.handle = None
        compat.destroy_groups(handles)


def _exchange(value: Tensor, out: Tensor, group: _Group) -> Work:
    """Gather by sends and receives, all at once.

    gloo's own all_gather takes turns: two ranks over 300 Mbit/s need 630 ms for 15 MB each, and 425 ms like this
    (measured, 2026-11).
    """
    tag = next(group.tags)
    size = value.numel()
    parts = {rank: out[place * size : (place + 1) * size] for place, rank in enumerate(group.ranks)}
    me = dist.get_rank()
    others = [rank for rank in group.ranks if rank != me]
    receives = [group.started(dist.irecv(parts[rank], rank, group=group.live, tag=tag)) for rank in others]
    sends = [group.started(dist.isend(value, rank, group=group.live, tag=tag)) for rank in others]
    parts[me].copy_(value)
    return _All([*receives, *sends])


class _Translated:
    """Translate what backends raise when another rank has gone, or does not come, into LostTouch."""

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and compat.is_lost_connection(error):
            told = str(error).partition("\n")[0]
            error.__traceback__ = None  # its frames would keep the group's connections open
            raise LostTouch(f"a collective did not end, because another rank left it or never came: {told}") from None


_TRANSLATED = _Translated()
"""Shared by all: entering an object takes a tenth of the time of a generator."""


def call_when_done(work: Work, done: Callable[[], object]) -> None:
    """Call `done` when a collective ends, in whatever thread notices.

    gloo tells of its collectives; it does not of its sends and receives, and then `done` is never called.
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


class NullTransport:
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

    def settle(self) -> None:
        return
