"""A compiled step of two ranks in one process: rank 1 answers what rank 0 says, and no collective communicates.

States are loaded by the real `load_state_dict`, in milliseconds. The values of a fake collective are arbitrary, but the
same each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

import fxcomp
from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compat import groups
from fxcomp.runtime import agree, transport
from fxcomp.step.compiled_step import CompiledStep

TWO_RANKS = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1))

ANSWERS: dict[str, Callable[[Any], Any]] = {}
"""Answers of rank 1 to rank 0's value, by the end of the topic; by default the same value."""


def join() -> None:
    """Make this process rank 0 of two, whose rank 1 is imagined."""
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    agree.LINGER_S = 0.0
    transport.gc = SimpleNamespace(collect=lambda: 0)  # takes 0.1 s at each reconnection
    agree.Conversation.hear = _hear
    agree.Conversation.say = _say
    compat.group_timeout = groups.group_timeout = lambda: timedelta(seconds=5)


def _say(talk: Any, topic: str, value: Any) -> None:
    talk.said = topic, json.dumps(value)
    talk._topics += 1


def _hear(talk: Any, topic: str, ranks: Iterable[int]) -> list[Any]:
    said, value = talk.said
    assert said == topic
    answer = next((made for end, made in ANSWERS.items() if topic.endswith(end)), lambda same: same)
    return [json.loads(value) if rank == 0 else answer(json.loads(value)) for rank in ranks]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(rows)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batch(number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=made), torch.randn(4, 3, generator=made)


def compiled(optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any) -> CompiledStep:
    torch.manual_seed(0)
    model = Net()
    return fxcomp.compile_step(model, loss, optimizer(model.parameters()), batch(0), cluster=TWO_RANKS, **options)
