"""Keep one process group: what is under way in it, and what its errors say about the other ranks.

Payloads may go straight from rank to rank, all at once. The send or receive that stays open then tells which rank did
not come; a collective of the backend's own cannot tell.
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
"""So many ranks are listed where any of them may be missing."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Done:
    """A collective that is over, or has no part for this rank."""

    def wait(self) -> None:
        return


@dataclass(slots=True, eq=False)
class Group:
    """A process group, its ranks in order, and this rank's place among them.

    Launches of a group come in the same order on every rank, so counting them gives equal tags.
    """

    handle: Any
    """None once the group has been given up."""
    ranks: tuple[int, ...]
    place: int
    is_direct: bool
    """Equal parts of an all_gather also go straight from rank to rank.

    gloo's own all_gather takes turns: for 15 MB each between two ranks at 300 Mbit/s it took 590 to 640 ms, sends and
    receives took 425 ms (2026-11). On a link that ranks share, gloo's ring sends fewer bytes and stays.
    """
    backends: Mapping[str, str]
    """The names of its backends, by type of device."""
    tags: Iterator[int] = field(default_factory=lambda: cycle(range(1 << 15)))
    under_way: set[UnderWay] = field(default_factory=set["UnderWay"])
    """Each keeps the connections open as long as it is known."""

    def is_over_nccl(self, device: torch.device) -> bool:
        """Tell the backend that has reductions to a root and means, and passes bytes on from rank to rank."""
        return self.backends.get(device.type) == "nccl"

    @property
    def live(self) -> Any:
        # Without a handle, torch would take the default group, which is the user's.
        if self.handle is None:
            raise _given_up()
        return self.handle

    @property
    def others(self) -> str:
        """Name the ranks of which one is missing where a collective of the backend's own does not end."""
        others = [rank for k, rank in enumerate(self.ranks) if k != self.place]
        named = ", ".join(map(str, others[:MOST_NAMED]))
        return f"rank {named}" if len(others) == 1 else f"one of ranks {named}{', ...' * (len(others) > MOST_NAMED)}"

    def start(self, collective: Callable[..., Any], *given: Any, finish: Callable[[], object] | None = None) -> Work:
        """Start a collective of the backend's own. Whoever waits for it runs `finish` then."""
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
        """Send a part to each other rank and receive one from each; an empty part is neither sent nor received.

        Where a rank has gone, the others get their parts all the same: they must not wait for this rank instead.
        """
        tag, others = next(self.tags), len(self.ranks) - 1
        flying, lost = UnderWay(self, [], finish), None
        self.under_way.add(flying)
        for transfer, parts in ((dist.irecv, received), (dist.isend, sent)):
            for k in range(self.place - others, self.place):  # each rank begins with another one
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
                del lost  # its traceback knows this frame, and this frame the connections
        return flying

    def _sent(self, transfer: Callable[..., Any], part: Tensor, rank: int, tag: int) -> Any:
        try:
            return transfer(part, rank, group=self.live, tag=tag)
        except RuntimeError as error:
            raise_if_lost(error, f"rank {rank}")
            raise

    def give_up(self) -> Any:
        """Forget what is under way; returns the handle, for whoever closes it."""
        for flying in self.under_way:
            flying.handles = None
        self.under_way.clear()
        handle, self.handle = self.handle, None
        return handle


@dataclass(slots=True, eq=False)
class UnderWay:
    """A collective of a group. Its wait raises LostTouch where another rank has gone, or does not come."""

    group: Group
    handles: list[tuple[int | None, Any]] | None
    """Works under way, each with the rank at its other end if it has one. None once the group has been given up."""
    finish: Callable[[], object] | None = None

    def add(self, rank: int, work: Any) -> None:
        """Wait for one more send or receive."""
        assert self.handles is not None, "the group was given up while something was launched in it"
        self.handles.append((rank, work))

    def wait(self) -> None:
        handles = self.handles
        if handles is None:
            raise _given_up()
        done, rank, work = 0, None, None
        try:  # not with: this runs in every step
            for done, (rank, work) in enumerate(handles):  # noqa: B007
                work.wait()
        except RuntimeError as error:
            if self.handles is not None:
                self.handles = handles[done:]  # a receive that has been waited for would be waited for in vain
            work = handles = None  # in the error's traceback, this frame would keep the connections open
            raise_if_lost(error, self.group.others if rank is None else f"rank {rank}")
            raise
        self.handles = []
        self.group.under_way.discard(self)
        if self.finish is not None:
            self.finish()
            self.finish = None

    def get_future(self) -> Any:
        """Return the backend's own; None for sends and receives, of which gloo does not tell."""
        handles = self.handles or [(0, None)]
        rank, work = handles[0]
        return work.get_future() if rank is None else None


def call_when_done(work: Work, done: Callable[[], object]) -> None:
    """Call `done` when a collective ends, in whatever thread notices.

    gloo tells of its collectives; it does not of its sends and receives, and then `done` is never called.
    """
    future: Any = getattr(work, "get_future", lambda: None)()
    if future is not None:

        def told(_: object) -> None:
            done()

        future.add_done_callback(told)


def raise_if_lost(error: RuntimeError, who: str) -> None:
    """Raise LostTouch for what a backend raises when another rank has gone, or does not come."""
    if compat.is_lost_connection(error):
        told = str(error).partition("\n")[0]
        error.__traceback__ = None  # its frames would keep the group's connections open
        raise LostTouch(f"{who} left a collective, or never came: {told}") from None


def _given_up() -> LostTouch:
    return LostTouch("the process group of this collective has been given up")
