"""Let all ranks know what one rank knows, through the store, with a timeout: nothing here can hang.

A collective that one rank never reaches blocks the others; a key that never appears only runs into its timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxcomp.errors import ModelsDiffer, PeerFailed


class Agreement:
    """One conversation of all ranks; `name` must be the same on all of them and new."""

    def __init__(
        self,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]  # documented, but torch does not list it
        name: str,
        rank: int,
        world_size: int,
        timeout: timedelta,
    ):
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._store = store
        self._name = name

    def attempt(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """Do something that may fail here, and learn how it went everywhere: the results in rank order.

        `work` returns plain data. A rank whose work raises tells the others before it raises; they raise PeerFailed.
        """
        try:
            mine = {"value": work()}
        except Exception as error:
            self._put(f"{topic}/{self.rank}", {"error": f"{type(error).__name__}: {error}"})
            raise
        self._put(f"{topic}/{self.rank}", mine)
        answers = [self._get(f"{topic}/{rank}", topic, rank) for rank in range(self.world_size)]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise PeerFailed(f"rank {rank} failed in {topic}: {answer['error']}")
        return [answer["value"] for answer in answers]

    def from_rank_0(self, topic: str, work: Callable[[], Any]) -> Any:
        """What rank 0 computes, on every rank. `work` runs on rank 0 alone and returns plain data."""
        if self.rank == 0:
            try:
                answer = {"value": work()}
            except Exception as error:
                self._put(topic, {"error": f"{type(error).__name__}: {error}"})
                raise
            self._put(topic, answer)
        answer = self._get(topic, topic, 0)
        if "error" in answer:
            raise PeerFailed(f"rank 0 failed in {topic}: {answer['error']}")
        return answer["value"]

    def check_same(self, topic: str, facts: dict[str, Any]) -> None:
        """Raise ModelsDiffer on every rank, with the first difference, unless all ranks bring the same facts."""
        everyone = self.attempt(topic, lambda: facts)
        for rank, theirs in enumerate(everyone):
            for key in sorted({*everyone[0], *theirs}):
                if everyone[0].get(key) != theirs.get(key):
                    raise ModelsDiffer(
                        f"rank {rank} and rank 0 bring different steps: {key} is {theirs.get(key, 'missing')!r} on rank"
                        f" {rank} and {everyone[0].get(key, 'missing')!r} on rank 0.\n"
                        "  Build the same model and optimizer on every rank, and pass the same arguments."
                    )

    def _put(self, key: str, value: dict[str, Any]) -> None:
        self._store.set(f"{self._name}/{key}", json.dumps(value))

    def _get(self, key: str, topic: str, rank: int) -> dict[str, Any]:
        key = f"{self._name}/{key}"
        try:
            self._store.wait([key], self.timeout)
        except Exception as error:  # the store raises DistStoreError or RuntimeError, by version and kind
            raise PeerFailed(
                f"rank {rank} did not arrive at {topic} within {self.timeout.total_seconds():g} s.\n"
                "  It may have died, or never made this call: every rank must. The timeout is init_process_group's."
            ) from error
        return json.loads(self._store.get(key))
