"""Ranks as threads of one process: what they agree on and sum, without a network and in milliseconds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxcomp.errors import PeerFailed
from fxcomp.state.handover import Sharing


class Left(Exception):
    """Another rank has ended, and will not come."""


class Board:
    """Where all ranks of one world put what the others wait for."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.posted: list[list[Any]] = [[] for _ in range(ranks)]
        self.topics: set[tuple[int, str]] = set()
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def meet(self, rank: int, value: Any) -> list[Any]:
        """Collect what every rank brings to its next meeting."""
        with self._changed:
            mine = self.posted[rank]
            mine.append(value)
            self._changed.notify_all()

            def is_there(theirs: list[Any]) -> bool:
                return len(theirs) >= len(mine)

            def is_decided() -> bool:
                return all(is_there(theirs) or other in self._gone for other, theirs in enumerate(self.posted))

            assert self._changed.wait_for(is_decided, 20), "a rank hangs"
            if not all(map(is_there, self.posted)):
                raise Left
            return [theirs[len(mine) - 1] for theirs in self.posted]

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class VirtualRank:
    """One of them, as `fxcomp.ranks.Ranks` is one of several processes."""

    def __init__(self, board: Board, rank: int):
        self.board, self.rank, self.world_size = board, rank, board.ranks

    def attempt(self, topic: str, work: Callable[[], Any]) -> Any:
        self._begin(topic)
        error, result = None, None
        try:
            result = work()
        except Exception as failed:
            error = failed
        everyone = self.board.meet(self.rank, (topic, error))
        assert len({theirs for theirs, _ in everyone}) == 1, f"ranks speak of different things: {everyone}"
        if error is not None:
            raise error
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                raise PeerFailed(f"rank {rank} failed in {topic}: {type(theirs).__name__}: {theirs}")
        return result

    def gather(self, topic: str, value: Any) -> list[Any]:
        self._begin(topic)
        return [json.loads(theirs) for theirs in self.board.meet(self.rank, json.dumps(value))]

    def _begin(self, topic: str) -> None:
        assert (self.rank, topic) not in self.board.topics, f"{topic!r} comes twice"
        self.board.topics.add((self.rank, topic))

    def sum_over_ranks(self, value: Tensor) -> None:
        everyone = self.board.meet(self.rank, value.clone())
        value.copy_(torch.stack(everyone).sum(dim=0))

    def sharing(self, topic: str = "a topic") -> Sharing:
        return Sharing(self, self.sum_over_ranks, topic, torch.device("cpu"))


def try_virtual(ranks: int, work: Callable[[VirtualRank], Any]) -> list[Any]:
    """Return what `work(rank)` returned or raised on each rank."""
    board = Board(ranks)
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(VirtualRank(board, rank))
        except Exception as error:
            results[rank] = error
        board.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def run_virtual(ranks: int, work: Callable[[VirtualRank], Any]) -> list[Any]:
    """Return what `work(rank)` returned on each rank; raise what it raised."""
    results = try_virtual(ranks, work)
    failed = [result for result in results if isinstance(result, Exception)]
    for error in sorted(failed, key=lambda error: isinstance(error, Left | PeerFailed)):
        raise error
    return results
