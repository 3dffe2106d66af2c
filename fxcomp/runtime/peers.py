"""Ask after ranks that have not answered: whether their processes live, and whether they can still come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from fxcomp import compat
from fxcomp.runtime.presence import Presence, Sight, Whereabouts, presence

WATCHED = 32
"""So many missing ranks are asked after by each rank that waits; others ask after the rest, and tell all."""


class Peers:
    """The other ranks of one thing that was compiled, as processes.

    `name` is what all ranks call it; `numbers` are the job's, of the ranks.
    """

    def __init__(self, name: str, numbers: Sequence[int], mine: Presence | None) -> None:
        self.name, self._numbers, self._mine = name, numbers, mine
        self._store = compat.default_store()

    @classmethod
    def of(cls, name: str, numbers: Sequence[int]) -> Peers:
        """Let the others find this process, and find them."""
        mine = presence()
        found = cls(name, numbers, mine)
        if mine is not None:
            with suppress(Exception):  # a store that has gone is told by whoever reads it
                found._store.set(_key(compat.rank_in_job()), json.dumps(mine.address))
        return found

    @property
    def place(self) -> Whereabouts:
        """Where this process is; all who ask are told."""
        return self._mine.place if self._mine is not None else Whereabouts()

    def at(self, doing: str) -> None:
        """Say what this process does."""
        self.place.doing = doing

    def at_step(self, step: int | None) -> None:
        """Say which step this rank is in; None where it has left one by an error."""
        if step is None:
            self.place.steps.pop(self.name, None)
        else:
            self.place.steps[self.name] = step

    def look(self) -> Look:
        """Begin to ask after some of them."""
        return Look(self._address, self._why_never)

    def _address(self, rank: int) -> tuple[str, int, str] | None:
        key = _key(self._numbers[rank])
        if not self._store.check([key]):
            return None
        host, port, name = json.loads(self._store.get(key))
        return host, port, name

    def _why_never(self, rank: int, theirs: Whereabouts) -> str | None:
        """Say why a rank that lives will not come: it waits for this one inside a later step."""
        mine, step = self.place.steps.get(self.name), theirs.steps.get(self.name)
        if step is None or mine is None or step <= mine:
            return None
        return f"rank {self._numbers[rank]} is in step {step}, where it waits for the others"


class Look:
    """Asks after missing ranks for as long as one wait lasts."""

    def __init__(
        self, address: Callable[[int], tuple[str, int, str] | None], why_never: Callable[[int, Whereabouts], str | None]
    ) -> None:
        self._address, self._why_never = address, why_never
        self._sights: dict[int, Sight] = {}

    def gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """List those whose processes have ended, with what they did when they were seen last."""
        return {rank: sight.place.doing for rank, sight in self._seen(ranks) if sight.has_gone()}

    def never(self, ranks: Iterable[int]) -> dict[int, str]:
        """List those that live and cannot come, with the reason; `gone` has asked them."""
        whys = {rank: self._why_never(rank, sight.place) for rank, sight in self._seen(ranks)}
        return {rank: why for rank, why in whys.items() if why is not None}

    def close(self) -> None:
        for sight in self._sights.values():
            sight.close()
        self._sights.clear()

    def _seen(self, ranks: Iterable[int]) -> Iterable[tuple[int, Sight]]:
        for rank in list(ranks)[:WATCHED]:
            if rank not in self._sights and (address := self._address(rank)) is not None:
                self._sights[rank] = Sight(address)
            if rank in self._sights:
                yield rank, self._sights[rank]


def _key(number: int) -> str:
    return f"presence/{number}"
