"""Exchange answers between all ranks through the store, with a timeout: nothing here can hang.

A collective that one rank never reaches blocks the others; a key that never appears only runs into its timeout. Ranks
answer each topic in turn, and answers are numbered: rank 1's third answer is the third thing that the others wait for
from it. So a rank that fails anywhere between two topics can tell them without knowing where they are: it answers
whatever comes next with its error.

A rank whose process has ended, or that waits for this one somewhere else, answers nothing. Whoever notices answers in
its place, so that all others hear it at once.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxcomp import compat
from fxcomp.errors import PeerFailed, RanksApart, ReplicasDiffer
from fxcomp.runtime.presence import Inquiry, Peers

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # documented, but torch does not list it

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_A_RANK_S = 0.0002, 0.02, 0.0001
"""Between two reads of the store: short at first, and longer the more ranks ask one store."""

PATIENCE_S = 0.5
"""After so long, and again each time, processes that have not answered are asked after."""

LINGER_S = 2.0
"""A failed rank that may host the store waits for so long until the others have heard."""


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def check_store(store: Any) -> None:
    """Refuse what an earlier start of the job has left: ranks would take its answers for those of today."""
    if compat.is_of_another_process(store):
        raise RanksApart(
            f"rank {dist.get_rank()} was another process in this store before: ranks would read what it answered then,"
            " and process groups find addresses that are gone.\n"
            f"  Start torchrun with {OWN_STORE} in its environment: each start then has a store of its own."
        )
    if (what := compat.outlives_restarts()) and dist.get_rank() == 0:
        warnings.warn(
            f"{what} starts dead ranks again with the store that they had: process groups may then find addresses that"
            f" are gone, whoever makes them, and fxcomp refuses.\n  Start torchrun with {OWN_STORE} set.",
            stacklevel=2,
        )


class Conversation:
    """One conversation of all ranks; `name` must be the same on all of them and new."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        timeout: timedelta,
        numbers: Sequence[int] | None = None,
        peers: Peers | None = None,
    ):
        self.name = name
        self._numbers = numbers or range(world_size)
        """The ranks' names in errors."""
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.store = store
        self.peers = peers
        """The processes of the ranks, where they can be asked after."""
        self._answered = 0
        """The number of answers that this rank has given to all."""
        self._told = 0
        """The number of answers of rank 0 alone that have been given, or heard."""
        self._known: BaseException | None = None

    def named(self, name: str) -> Conversation:
        """Start another conversation of the same ranks."""
        return Conversation(self.store, name, self.rank, self.world_size, self.timeout, self._numbers, self.peers)

    # Topics

    def attempt(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """Do work that may fail here, and return every rank's result in rank order.

        `work` returns plain data. A rank whose work raises tells the others before it raises; they raise PeerFailed.
        """
        if self.peers is not None:
            self.peers.at(topic)
        try:
            mine = {"value": work()}
        except BaseException as error:
            with suppress(PeerFailed):  # without a store there is nobody to tell
                self._answer(self._failure(topic, error))
                if not isinstance(error, PeerFailed):
                    self._has_heard(f"{self._answered - 1}")  # this rank knows an error of its own
                self._linger(f"{self._answered - 1}")
            if isinstance(error, PeerFailed):  # a collective broke off; another rank may know why
                self._check(topic, self._answers(topic), f"{self._answered - 1}")
            self._known_to_all(error)
            raise
        self._answer({"topic": topic, **mine})
        answers = self._answers(topic)
        self._check(topic, answers, f"{self._answered - 1}")
        return [answer["value"] for answer in answers]

    def from_rank_0(self, topic: str, work: Callable[[], Any]) -> Any:
        """Compute on rank 0 and return the result on every rank; it is plain data."""
        number = self._told
        if self.rank == 0:
            try:
                answer = {"topic": topic, "value": work()}
            except BaseException as error:
                with suppress(PeerFailed):
                    self._tell(self._failure(topic, error))
                    self._linger(f"told/{number}")
                self._known_to_all(error)
                raise
            self._tell(answer)
            return answer["value"]
        self._told += 1
        answer = self.read({0: f"told/{number}"}, topic)[0]
        self._check(topic, [answer], f"told/{number}")
        return answer["value"]

    def check_same(self, topic: str, facts: dict[str, Any]) -> None:
        """Raise ReplicasDiffer on every rank, with the first difference, unless all ranks bring the same facts."""
        everyone = self.attempt(topic, lambda: facts)
        for rank, theirs in enumerate(everyone):
            for key in sorted({*everyone[0], *theirs}):
                if everyone[0].get(key) != theirs.get(key):
                    first, other = (self._numbers[0], everyone[0]), (self._numbers[rank], theirs)
                    error = _models_differ(key, first, other)
                    self._known_to_all(error)
                    raise error

    # Failing

    def knows(self, error: BaseException) -> bool:
        """Return whether all ranks raise at the topic where this rank raised this error."""
        return self._known is error

    def described(self, what: str, error: BaseException) -> str:
        """Describe an error for the other ranks; one heard from another rank keeps that rank's words."""
        if isinstance(error, PeerFailed):
            return str(error)
        return f"rank {self._numbers[self.rank]} failed in {what}: {type(error).__name__}: {error}"

    def give_up(self, what: str, error: BaseException) -> None:
        """Answer whatever the others wait for next with an error; this rank says nothing more here."""
        answer = json.dumps({**self._failure(what, error), "gone": True})
        # What comes next may be half said already.
        keys = [f"{self._answered}/{self.rank}", f"{self._answered + 1}/{self.rank}"]
        if self.rank == 0:
            keys += [f"told/{self._told}", f"told/{self._told + 1}"]
        for key in keys:
            with suppress(Exception):  # without a store there is nobody to tell
                self.store.set(f"{self.name}/{key}", answer)

    def stay_away(self, what: str, error: BaseException) -> None:
        """Answer this conversation with an error in place of taking part in it, and let the others hear it."""
        self.give_up(what, error)
        self._has_heard("0")  # another rank may stay away, too
        self._linger("0")

    @property
    def was_missed(self) -> bool:
        """True if another rank has waited here for this one in vain, and given up."""
        with self._store_lives("beginning"):
            return self.store.check([f"{self.name}/missed/{self.rank}"])

    def forget(self) -> None:
        """Clear this rank's answers before its last one from the store: all ranks have read them."""
        keys = [f"{number}/{self.rank}" for number in range(self._answered - 1)]
        keys += [f"told/{number}" for number in range(self._told)] if self.rank == 0 else []
        for key in keys:
            with suppress(Exception):  # not every store can
                self.store.delete_key(f"{self.name}/{key}")

    # The store

    def _check(self, topic: str, answers: list[dict[str, Any]], number: str) -> None:
        """Raise PeerFailed for the first rank that failed, or is elsewhere; `number` is the answers'."""
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            self._has_heard(number)
            failed.sort(key=lambda answer: answer["heard"])
            error = PeerFailed(failed[0]["error"])
            if not any("gone" in answer for answer in failed):
                self._known = error
            raise error
        for rank, answer in enumerate(answers):
            if answer["topic"] != topic:
                raise PeerFailed(
                    f"rank {self._numbers[rank]} is at {answer['topic']}, rank {self._numbers[self.rank]} at {topic}.\n"
                    "  Make the same calls on every rank, in the same order."
                )

    def _failure(self, topic: str, error: BaseException) -> dict[str, Any]:
        return {"topic": topic, "error": self.described(topic, error), "heard": isinstance(error, PeerFailed)}

    def _answers(self, topic: str) -> list[dict[str, Any]]:
        number = self._answered - 1
        return self.read({rank: f"{number}/{rank}" for rank in range(self.world_size)}, topic)

    def _known_to_all(self, error: BaseException) -> None:
        if not isinstance(error, PeerFailed):  # a collective that broke off breaks off anywhere
            self._known = error

    def _answer(self, answer: dict[str, Any]) -> None:
        with self._store_lives(answer["topic"]):
            self.store.set(f"{self.name}/{self._answered}/{self.rank}", json.dumps(answer))
        self._answered += 1

    def _tell(self, answer: dict[str, Any]) -> None:
        with self._store_lives(answer["topic"]):
            self.store.set(f"{self.name}/told/{self._told}", json.dumps(answer))
        self._told += 1

    def _has_heard(self, number: str) -> None:
        with suppress(Exception):  # as a courtesy
            self.store.set(f"{self.name}/heard/{number}/{self.rank}", "")

    def _linger(self, number: str) -> None:
        """Let the others hear of a failure before this process ends, and perhaps the store with it."""
        if self._numbers[self.rank] != 0:
            return
        heard = [f"{self.name}/heard/{number}/{rank}" for rank in range(self.world_size) if rank != self.rank]
        until = time.monotonic() + LINGER_S
        with suppress(Exception):
            while not self.store.check(heard) and time.monotonic() < until:
                time.sleep(LONGEST_PAUSE_S)

    # Waiting

    def read(self, keys: Mapping[int, str], topic: str) -> list[dict[str, Any]]:
        """Read the answers of ranks about a topic.

        Raises PeerFailed if one does not come in time, or if the store has gone. For a rank whose process has ended,
        or that cannot come, its failure is read.
        """
        asking = nullcontext() if self.peers is None else closing(self.peers.inquire())
        with self._store_lives(topic), asking as inquiry:
            self._wait(keys, topic, inquiry)
            return [json.loads(self.store.get(f"{self.name}/{key}")) for key in keys.values()]

    def _wait(self, keys: Mapping[int, str], topic: str, inquiry: Inquiry | None) -> None:
        wanted = [f"{self.name}/{key}" for key in keys.values()]
        start, pause, asked = time.monotonic(), FIRST_PAUSE_S, 0
        longest = max(LONGEST_PAUSE_S, PAUSE_A_RANK_S * self.world_size)
        while not self.store.check(wanted):  # not wait: it would keep other threads from the store
            waited = time.monotonic() - start
            if waited > self.timeout.total_seconds():
                raise self._missed(self._missing(keys)[0], topic)
            if inquiry is not None and waited > PATIENCE_S * (asked + 1):
                asked = int(waited / PATIENCE_S)
                self._answer_for_others(keys, topic, inquiry)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        """List the ranks that have not answered, from the one after this rank on."""
        missing = [rank for rank, key in keys.items() if not self.store.check([f"{self.name}/{key}"])]
        return sorted(missing, key=lambda rank: (rank - self.rank) % self.world_size) or [next(iter(keys))]

    def _answer_for_others(self, keys: Mapping[int, str], topic: str, inquiry: Inquiry) -> None:
        """Answer for ranks that never will; an answer of their own, given meanwhile, stays."""
        missing = self._missing(keys)
        here = f"rank {self._numbers[self.rank]}"
        for rank, doing in inquiry.gone(missing).items():
            last = f"; it was last seen at: {doing}" if doing else ""
            why = (
                f"rank {self._numbers[rank]} has gone before it arrived at {topic}{last}.\n  Its process has ended, or"
                f" has destroyed its process group: see its own output. {here} noticed it while it waited."
            )
            self._answer_for(rank, keys[rank], topic, why)
        for rank, why in inquiry.never(missing).items():
            told = f"{why}, and {here} is at {topic}.\n  Make the same calls on every rank, in the same order."
            self._answer_for(rank, keys[rank], topic, told)

    def _answer_for(self, rank: int, key: str, topic: str, why: str) -> None:
        if rank != self.rank:
            failure = {"topic": topic, "error": why, "heard": True, "gone": True}
            compat.set_once(self.store, f"{self.name}/{key}", json.dumps(failure))

    def _missed(self, rank: int, topic: str) -> PeerFailed:
        with suppress(Exception):
            self.store.set(f"{self.name}/missed/{rank}", topic)
        return PeerFailed(
            f"rank {self._numbers[rank]} did not arrive at {topic} within {self.timeout.total_seconds():g} s.\n"
            "  It may hang, or never made this call: every rank must. The timeout is init_process_group's."
        )

    @contextmanager
    def _store_lives(self, topic: str) -> Generator[None]:
        """Say so where the store does not answer."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, PeerFailed) or not compat.is_store_gone(error):
                raise
            raise PeerFailed(
                f"the process that hosts the store has ended, while rank {self._numbers[self.rank]} was at {topic}.\n"
                "  It is rank 0 of init_process_group, unless torchrun or another process serves the store: its own"
                " output says why."
            ) from error


def _models_differ(key: str, first: tuple[int, dict[str, Any]], other: tuple[int, dict[str, Any]]) -> ReplicasDiffer:
    """Say what two ranks, each with its number, bring of one name."""
    (zero, known), (rank, theirs) = first, other
    return ReplicasDiffer(
        f"rank {rank} and rank {zero} bring different steps: {key} is {theirs.get(key, 'missing')!r} on rank {rank} and"
        f" {known.get(key, 'missing')!r} on rank {zero}.\n"
        "  Build the same model and optimizer on every rank, and pass the same arguments."
    )
