"""Exchange answers between all ranks through the store, with a timeout: nothing here can hang.

A collective that one rank never reaches blocks the others; a key that never appears only runs into its timeout. Ranks
answer each topic in turn, and answers are numbered: rank 1's third answer is the third thing that the others wait for
from it. So a rank that fails anywhere between two topics can tell them without knowing where they are: it answers
whatever comes next with its error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxcomp.errors import ModelsDiffer, PeerFailed

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # documented, but torch does not list it


class Agreement:
    """One conversation of all ranks; `name` must be the same on all of them and new."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        timeout: timedelta,
        numbers: Sequence[int] | None = None,
    ):
        self.name = name
        self._numbers = numbers or range(world_size)
        """What errors call the ranks."""
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.store = store
        self._answered = 0
        """The number of answers that this rank has given to all."""
        self._told = 0
        """The number of answers of rank 0 alone that have been given, or heard."""
        self._known: BaseException | None = None

    def named(self, name: str) -> Agreement:
        """Start another conversation of the same ranks."""
        return Agreement(self.store, name, self.rank, self.world_size, self.timeout, self._numbers)

    # Topics

    def attempt(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """Do work that may fail here, and return every rank's result in rank order.

        `work` returns plain data. A rank whose work raises tells the others before it raises; they raise PeerFailed.
        """
        try:
            mine = {"value": work()}
        except BaseException as error:
            self._answer(self._failure(topic, error))
            if isinstance(error, PeerFailed):  # a collective broke off; another rank may know why
                self._check(topic, self._answers(topic))
            self._known_to_all(error)
            raise
        self._answer({"topic": topic, **mine})
        answers = self._answers(topic)
        self._check(topic, answers)
        return [answer["value"] for answer in answers]

    def from_rank_0(self, topic: str, work: Callable[[], Any]) -> Any:
        """Compute on rank 0 and return the result on every rank; it is plain data."""
        number = self._told
        if self.rank == 0:
            try:
                answer = {"topic": topic, "value": work()}
            except BaseException as error:
                self._tell(self._failure(topic, error))
                self._known_to_all(error)
                raise
            self._tell(answer)
            return answer["value"]
        self._told += 1
        answer = self.read(f"told/{number}", topic, 0)
        self._check(topic, [answer])
        return answer["value"]

    def check_same(self, topic: str, facts: dict[str, Any]) -> None:
        """Raise ModelsDiffer on every rank, with the first difference, unless all ranks bring the same facts."""
        everyone = self.attempt(topic, lambda: facts)
        for rank, theirs in enumerate(everyone):
            for key in sorted({*everyone[0], *theirs}):
                if everyone[0].get(key) != theirs.get(key):
                    error = ModelsDiffer(
                        f"rank {self._numbers[rank]} and rank {self._numbers[0]} bring different steps: {key} is"
                        f" {theirs.get(key, 'missing')!r} on rank {self._numbers[rank]} and"
                        f" {everyone[0].get(key, 'missing')!r} on rank {self._numbers[0]}.\n"
                        "  Build the same model and optimizer on every rank, and pass the same arguments."
                    )
                    self._known_to_all(error)
                    raise error

    # Failing

    def knows(self, error: BaseException) -> bool:
        """Tell whether all ranks raise at the topic where this rank raised this error."""
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

    @property
    def was_missed(self) -> bool:
        """True if another rank has waited here for this one in vain, and given up."""
        return self.store.check([f"{self.name}/missed/{self.rank}"])

    def forget(self) -> None:
        """Clear this rank's answers before its last one from the store: all ranks have read them."""
        keys = [f"{number}/{self.rank}" for number in range(self._answered - 1)]
        keys += [f"told/{number}" for number in range(self._told)] if self.rank == 0 else []
        for key in keys:
            with suppress(Exception):  # not every store can
                self.store.delete_key(f"{self.name}/{key}")

    # The store

    def _check(self, topic: str, answers: list[dict[str, Any]]) -> None:
        """Raise PeerFailed for the first rank that failed, or is elsewhere."""
        failed = [answer for answer in answers if "error" in answer]
        failed.sort(key=lambda answer: answer["heard"])
        if failed:
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
        return [self.read(f"{number}/{rank}", topic, rank) for rank in range(self.world_size)]

    def _known_to_all(self, error: BaseException) -> None:
        if not isinstance(error, PeerFailed):  # a collective that broke off breaks off anywhere
            self._known = error

    def _answer(self, answer: dict[str, Any]) -> None:
        self.store.set(f"{self.name}/{self._answered}/{self.rank}", json.dumps(answer))
        self._answered += 1

    def _tell(self, answer: dict[str, Any]) -> None:
        self.store.set(f"{self.name}/told/{self._told}", json.dumps(answer))
        self._told += 1

    def read(self, key: str, topic: str, rank: int) -> dict[str, Any]:
        """Read a rank's answer about a topic. Raises PeerFailed if it does not come in time."""
        try:
            self.store.wait([f"{self.name}/{key}"], self.timeout)
        except Exception as error:  # the store raises DistStoreError or RuntimeError, by version and kind
            with suppress(Exception):
                self.store.set(f"{self.name}/missed/{rank}", topic)
            raise PeerFailed(
                f"rank {self._numbers[rank]} did not arrive at {topic} within {self.timeout.total_seconds():g} s.\n"
                "  It may have died, or never made this call: every rank must. The timeout is init_process_group's."
            ) from error
        return json.loads(self.store.get(f"{self.name}/{key}"))
