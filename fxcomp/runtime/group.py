"""A process group, its collectives in flight, and errors about its other ranks.

Payloads may be sent directly between ranks. An unfinished send or receive then identifies the missing rank, unlike a
backend's collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import LostTouch

MOST_NAMED = 8


class Work(Protocol):
    def wait(self) -> object: ...


class Done:
    """A collective that has finished, or has no part for this rank."""

    def wait(self) -> None:
        return


@dataclass(slots=True, eq=False)
class Group:
    """A process group, its ranks in order, and this rank's index.

    All ranks launch in the same order, so tags that count launches match.
    """

    handle: Any
    """torch's process group; None after `give_up`."""
    ranks: tuple[int, ...]
    place: int
    is_direct: bool
    """True if sends and receives replace gloo's all_gather of equal parts.

    For 15 MB from each of two ranks at 300 Mbit/s, they took 425 ms, and gloo's all_gather 590 to 640 ms (2026-11). On
    a link that ranks share, gloo's ring sends fewer bytes.
    """
    backends: Mapping[str, str]
    tags: Iterator[int] = field(default_factory=lambda: cycle(range(1 << 15)))
    under_way: set[UnderWay] = field(default_factory=set["UnderWay"])
    """Collectives in flight. Each keeps the connections open."""

    def is_over_nccl(self, device: torch.device) -> bool:
        return self.backends.get(device.type) == "nccl"

    @property
    def live(self) -> Any:
        # For None, torch would use the default group.
        if self.handle is None:
            raise _given_up()
        return self.handle

    @property
    def others(self) -> str:
        """Names of the ranks that may be missing from a backend's collective."""
        others = [rank for k, rank in enumerate(self.ranks) if k != self.place]
        named = ", ".join(map(str, others[:MOST_NAMED]))
        return f"rank {named}" if len(others) == 1 else f"one of ranks {named}{', ...' * (len(others) > MOST_NAMED)}"

    def start(self, collective: Callable[..., Any], *given: Any, finish: Callable[[], object] | None = None) -> Work:
        """Start one of the backend's collectives. `wait` of the result calls `finish`."""
        try:
            work = collective(*given, group=self.live, async_op=True)
        except RuntimeError as error:
            raise_if_lost(error, self.others)
            raise
        assert work is not None, "this rank is not in the group"
        flying = UnderWay(self, [(None, work)], finish)
        self.under_way.add(flying)
        return flying

    def exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], finish: Callable[[], object] | None = None
    ) -> Work:
        """Send `sent[k]` to the group's rank k and fill `received[k]` from it, for all other ranks. Skip empty parts.

        If a rank has gone, the others still get their parts, so that they do not wait for this rank.
        """
        tag, others = next(self.tags), len(self.ranks) - 1
        flying, lost = UnderWay(self, [], finish), None
        self.under_way.add(flying)
        for transfer, parts in ((dist.irecv, received), (dist.isend, sent)):
            for k in range(self.place - others, self.place):  # each rank starts with a different peer
                rank = self.ranks[k]
                if parts[k].numel():
                    try:
                        flying.add(rank, self._sent(transfer, parts[k], rank, tag))
                    except LostTouch as error:
                        lost = lost or error
        if lost is not None:
            try:
                raise lost
            finally:
                del lost  # the traceback refers to this frame, which keeps the connections open
        return flying

    def _sent(self, transfer: Callable[..., Any], part: Tensor, rank: int, tag: int) -> Any:
        try:
            return transfer(part, rank, group=self.live, tag=tag)
        except RuntimeError as error:
            raise_if_lost(error, f"rank {rank}")
            raise

    def give_up(self) -> Any:
        """Forget collectives in flight, and return the handle for closing."""
        for flying in self.under_way:
            flying.handles = None
        self.under_way.clear()
        handle, self.handle = self.handle, None
        return handle


@dataclass(slots=True, eq=False)
class UnderWay:
    """A collective in flight. Its wait raises LostTouch if another rank is gone or late."""

    group: Group
    handles: list[tuple[int | None, Any]] | None
    """torch Work objects, each with the peer rank of a send or receive. None after the group's `give_up`."""
    finish: Callable[[], object] | None = None

    def add(self, rank: int, work: Any) -> None:
        assert self.handles is not None, "the group was given up while something was launched in it"
        self.handles.append((rank, work))

    def wait(self) -> None:
        handles = self.handles
        if handles is None:
            raise _given_up()
        done, rank, work = 0, None, None
        try:  # no context manager: this runs in every step
            for done, (rank, work) in enumerate(handles):  # noqa: B007
                work.wait()
        except RuntimeError as error:
            if self.handles is not None:
                self.handles = handles[done:]  # a finished receive cannot be waited for again
            work = handles = None  # this frame is in the traceback and would keep the connections open
            raise_if_lost(error, self.group.others if rank is None else f"rank {rank}")
            raise
        self.handles = []
        self.group.under_way.discard(self)
        if self.finish is not None:
            self.finish()
            self.finish = None

    def get_future(self) -> Any:
        """Return the backend's future; None for sends and receives, whose end gloo does not report."""
        handles = self.handles or [(0, None)]
        rank, work = handles[0]
        return work.get_future() if rank is None else None


def call_when_done(work: Work, done: Callable[[], object]) -> None:
    """Call `done`, on any thread, when a collective ends, if the backend reports it."""
    future: Any = getattr(work, "get_future", lambda: None)()
    if future is not None:

        def told(_: object) -> None:
            done()

        future.add_done_callback(told)


def raise_if_lost(error: RuntimeError, who: str) -> None:
    """Raise LostTouch if the error means that another rank is gone or late."""
    if compat.is_lost_connection(error):
        told = str(error).partition("\n")[0]
        error.__traceback__ = None  # its frames would keep the group's connections open
        raise LostTouch(f"{who} left a collective, or never came: {told}") from None


def _given_up() -> LostTouch:
    return LostTouch("the process group of this collective has been given up")
