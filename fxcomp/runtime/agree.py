"""Exchange JSON data between all ranks through torch's store, with a timeout, so that no rank hangs.

A topic is a point that all ranks reach in the same order. Each rank writes its answer to a key:

    name/0/0  name/0/1  name/0/2     topic 0: answers of ranks 0, 1 and 2
    name/1/0                         topic 1: only rank 0's answer is read
    name/failed/0                    first failure

The first failing rank writes name/failed/0, which waiting ranks poll. A waiting rank also writes this key if a missing
rank's process has ended or is in a later step.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxcomp import compat
from fxcomp.errors import PeerFailed, RanksApart, ReplicasDiffer
from fxcomp.runtime.members import Members
from fxcomp.runtime.presence import Presence, address_of, place_of

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # documented, but torch does not list it

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_A_RANK_S = 0.0002, 0.02, 0.0001
"""Pauses between store polls, in s: the first, and the longest, which is at least PAUSE_A_RANK_S per rank."""

PATIENCE_S = 0.5
"""Interval, in s, between checks that the processes of missing ranks are alive."""

LINGER_S = 2.0
"""Longest time, in s, that rank 0, which may host the store, waits for the others to read a failure."""

WATCHED = 32
"""Maximum number of missing ranks that each waiting rank checks."""


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def check_store(store: Any) -> None:
    """Raise RanksApart if the store holds answers of an earlier start of the job."""
    if compat.is_of_another_process(store):
        raise RanksApart(
            f"rank {dist.get_rank()} was another process in this store before: ranks would read its old answers, and"
            " process groups would find addresses that no longer exist.\n"
            f"  Start torchrun with {OWN_STORE} in its environment: each start then has a store of its own."
        )
    if (what := compat.outlives_restarts()) and dist.get_rank() == 0:
        warnings.warn(
            f"{what} restarts dead ranks with their old store: any process group may then find addresses that no"
            f" longer exist, and fxcomp refuses to run.\n  Start torchrun with {OWN_STORE} set.",
            stacklevel=2,
        )


class Conversation:
    """Topics that all ranks answer in the same order; `name` must be new in the store and equal on all ranks.

    `root` is the name of these ranks' first conversation, and a key of `Presence.steps`.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        members: Members,
        timeout: timedelta,
        presence: Presence | None = None,
        root: str = "",
    ):
        self.store, self.name, self.members, self.timeout = store, name, members, timeout
        self.rank, self.world_size = members.place, len(members)
        self.presence = presence
        self.root = root or name
        self._topics = 0
        self._failures = 0
        """Number of topics at which all ranks raised; part of the key of a failure."""
        self._known: BaseException | None = None

    def named(self, name: str, members: Members | None = None) -> Conversation:
        return Conversation(self.store, name, members or self.members, self.timeout, self.presence, self.root)

    # Topics

    def attempt(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """Run `work` and return every rank's result, JSON data, in rank order.

        If `work` raises, this rank reports the failure before it raises, and the others raise PeerFailed.
        """
        self._answer(topic, work)
        return self.hear(topic, range(self.world_size))

    def from_rank_0(self, topic: str, work: Callable[[], Any]) -> Any:
        """Compute JSON data on rank 0 and return it on every rank."""
        self._answer(topic, work if self.rank == 0 else lambda: None)
        return self.hear(topic, [0])[0]

    def check_same(self, topic: str, facts: dict[str, Any]) -> None:
        """Raise ReplicasDiffer on every rank, with the first difference, unless all facts are equal."""
        everyone = self.attempt(topic, lambda: facts)
        for rank, theirs in enumerate(everyone):
            for key in sorted({*everyone[0], *theirs}):
                if everyone[0].get(key) != theirs.get(key):
                    first, other = (self._number(0), everyone[0]), (self._number(rank), theirs)
                    self._known = _models_differ(key, first, other)
                    raise self._known

    def say(self, topic: str, value: Any) -> None:
        self._topics += 1
        with self._store_lives(topic):
            self.store.set(self._key(self._topics - 1, self.rank), json.dumps([topic, value]))

    def hear(self, topic: str, ranks: Iterable[int]) -> list[Any]:
        """Return the answers of `ranks` to this rank's latest topic.

        Raises PeerFailed if a rank is late or gone, or the store is gone.
        """
        keys = {rank: self._key(self._topics - 1, rank) for rank in ranks}
        with self._store_lives(topic):
            self._wait(keys, topic)
            answers = [json.loads(self.store.get(key)) for key in keys.values()]
        for rank, (theirs, _) in zip(keys, answers, strict=True):
            if theirs != topic:
                raise PeerFailed(
                    f"rank {self._number(rank)} is at {theirs}, rank {self._number(self.rank)} at {topic}.\n"
                    "  Make the same calls on every rank, in the same order."
                )
        return [value for _, value in answers]

    # Failing

    def knows(self, error: BaseException) -> bool:
        """Return whether all ranks raise at the topic where this error was raised."""
        return self._known is error

    def described(self, what: str, error: BaseException) -> str:
        if isinstance(error, PeerFailed):
            return str(error)
        return f"rank {self._number(self.rank)} failed in {what}: {type(error).__name__}: {error}"

    def give_up(self, what: str, error: BaseException, *, lingers: bool = False) -> None:
        """End the conversation with an error, which the other ranks raise at their next wait.

        If `lingers`, rank 0 waits until the others have read the error.
        """
        mine = self.described(what, error)
        while self.knows(self._fail(mine, lingers=lingers)):
            pass  # an earlier failure, at which all ranks raised: report under the next key

    @property
    def was_missed(self) -> bool:
        """True if the other ranks gave up waiting for this rank."""
        with self._store_lives("beginning"):
            return self.store.check([self._failed]) and self.rank in json.loads(self.store.get(self._failed))["missing"]

    def forget(self) -> None:
        """Delete this rank's answers, except the last, from the store. All ranks must have read them."""
        for number in range(self._topics - 1):
            with suppress(Exception):  # not every store supports deletion
                self.store.delete_key(self._key(number, self.rank))

    @property
    def _failed(self) -> str:
        return f"{self.name}/failed/{self._failures}"

    def _answer(self, topic: str, work: Callable[[], Any]) -> None:
        if self.presence is not None:
            self.presence.doing = topic
        try:
            mine = work()
        except BaseException as error:
            is_own = not isinstance(error, PeerFailed)  # another rank may report the cause of a broken collective
            first = self._fail(self.described(topic, error), is_known=is_own, lingers=True)
            self._topics += 1
            if not is_own:
                raise first from None
            if self.knows(first):
                self._known = error
            raise
        self.say(topic, mine)

    def _fail(
        self, why: str, *, is_known: bool = False, missing: Sequence[int] = (), lingers: bool = False
    ) -> PeerFailed:
        """Report a failure, and return the first failure that any rank reported.

        `is_known`: all ranks raise at this topic. `missing`: ranks that timed out.
        """
        failure, key = json.dumps({"error": why, "is_known": is_known, "missing": list(missing)}), self._failed
        first = self._heard(compat.set_once(self.store, key, failure))
        if lingers and self._number(self.rank) == 0:
            self._linger(key)
        return first

    def _linger(self, failed: str) -> None:
        heard = [f"{failed}/{rank}" for rank in range(self.world_size)]
        until = time.monotonic() + LINGER_S
        with suppress(Exception):
            while not self.store.check(heard) and time.monotonic() < until:
                time.sleep(LONGEST_PAUSE_S)

    def _heard(self, text: str | bytes) -> PeerFailed:
        failure = json.loads(text)
        with suppress(Exception):  # best effort
            self.store.set(f"{self._failed}/{self.rank}", "")
        error = PeerFailed(failure["error"])
        if failure["is_known"]:
            self._known = error
            self._failures += 1
        return error

    # Waiting

    def _key(self, number: int, rank: int) -> str:
        return f"{self.name}/{number}/{rank}"

    def _number(self, rank: int) -> int:
        return self.members.numbers[rank]

    def _wait(self, keys: Mapping[int, str], topic: str) -> None:
        wanted = list(keys.values())
        start, pause, looks = time.monotonic(), FIRST_PAUSE_S, 0
        longest = max(LONGEST_PAUSE_S, PAUSE_A_RANK_S * self.world_size)
        while not self.store.check(wanted):  # wait() would block other threads' access to the store
            # If the failing rank has answered this topic, all ranks read its failure at the next topic.
            if self.store.check([self._failed]) and not self.store.check(wanted):
                raise self._heard(self.store.get(self._failed))
            waited = time.monotonic() - start
            if waited > self.timeout.total_seconds():
                missing = self._missing(keys)
                raise self._fail(
                    f"rank {self._number(missing[0])} did not arrive at {topic} within"
                    f" {self.timeout.total_seconds():g} s.\n"
                    "  It may hang, or never made this call: every rank must. The timeout is init_process_group's.",
                    missing=missing,
                )
            if self.presence is not None and waited > PATIENCE_S * (looks + 1):
                looks = int(waited / PATIENCE_S)
                self._look_for(keys, topic, self.presence)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        missing = [rank for rank, key in keys.items() if not self.store.check([key])]
        return sorted(missing, key=lambda rank: (rank - self.rank) % self.world_size) or [next(iter(keys))]

    def _look_for(self, keys: Mapping[int, str], topic: str, presence: Presence) -> None:
        missing = self._missing(keys)
        for rank in missing[:WATCHED]:
            why = self._absence(rank, topic, presence)
            if why is not None and not self.store.check([keys[rank]]):  # it may have answered and then ended
                raise self._fail(why, missing=[rank])

    def _absence(self, rank: int, topic: str, presence: Presence) -> str | None:
        """Return the reason why a rank will never answer; None if an answer may still come."""
        number, here = self._number(rank), f"rank {self._number(self.rank)}"
        address = address_of(number, self.store)
        try:
            place = {} if address is None else place_of(address)
        except ProcessLookupError:
            last = f"; it was last seen at: {presence.seen[number]}" if number in presence.seen else ""
            return (
                f"rank {number} has gone before it arrived at {topic}{last}.\n  Its process has ended, or has destroyed"
                f" its process group: see its own output. {here} noticed it while it waited."
            )
        if place:
            presence.seen[number] = place["doing"]
        theirs, mine = place.get("steps", {}).get(self.root), presence.steps.get(self.root)
        if theirs is None or mine is None or theirs <= mine:
            return None
        return (
            f"rank {number} is in step {theirs}, where it waits for the others, and {here} is at {topic}.\n"
            "  Make the same calls on every rank, in the same order."
        )

    @contextmanager
    def _store_lives(self, topic: str) -> Generator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, PeerFailed) or not compat.is_store_gone(error):
                raise
            compat.leave_store(self.store)
            how = "does not answer" if "timeout" in str(error).lower() else "has ended"
            raise PeerFailed(
                f"the process that hosts the store {how}, while rank {self._number(self.rank)} was at {topic}.\n"
                "  It is rank 0 of init_process_group, unless torchrun or another process serves the store: see"
                " its output for the cause."
            ) from error


def _models_differ(key: str, first: tuple[int, dict[str, Any]], other: tuple[int, dict[str, Any]]) -> ReplicasDiffer:
    (zero, known), (rank, theirs) = first, other
    return ReplicasDiffer(
        f"rank {rank} and rank {zero} bring different steps: {key} is {theirs.get(key, 'missing')!r} on rank {rank} and"
        f" {known.get(key, 'missing')!r} on rank {zero}.\n"
        "  Build the same model and optimizer on every rank, and pass the same arguments."
    )
