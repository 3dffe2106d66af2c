"""Exchanges that average all workers' gradients: with one compressor, two, or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from tasks import Task
from torch import Tensor

from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.plan.legs import cut_points
from fxcomp.testing import Replica, average, average_in_two_shots, replicas_of, shards_of

MOMENTUM = 0.9

Exchange = Callable[[list[Tensor]], Tensor]
"""Returns one gradient from all workers' gradients, and keeps their residuals and states."""


def exact_mean(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(gradients)).mean(dim=0)


def compressed(
    compressor: Compressor, shapes: Sequence[Sequence[int]], workers: int, *, feedback: bool, seed: int = 0
) -> Exchange:
    """Compress every worker's gradient and average the payloads."""
    bound, segments = compressor.bound_to(shapes, workers), tuple(map(math.prod, shapes))
    replicas = replicas_of(bound, segments, workers, feedback=feedback, seed=seed)
    return lambda gradients: average(bound, gradients, replicas, segments, shapes)


def fitted(compressor: Compressor, task: Task) -> Compressor:
    """Return the compressor with a threshold of five times the initial gradient's root mean square, if it has one."""
    if not any(parameter.name == "value" for parameter in compressor.facts.parameters):
        return compressor
    scale = exact_mean(task.gradients(task.start, 0)).square().mean().sqrt().item()
    changes: dict[str, Any] = {"value": float(f"{5 * scale:.2g}")}
    return replace(compressor, **changes)  # pyright: ignore[reportArgumentType]


class OwnerResidual(Enum):
    KEPT = "kept"
    DROPPED = "dropped"
    """Mistake: the residual is lost."""
    MISCOUNTED = "added to the owner's own gradient once"
    """Mistake: the mean divides it by the number of workers, so it would have to be added that many times."""


@dataclass(frozen=True)
class Pair:
    """Compressors of two shots. The text parses back: `int4 > int8`."""

    first: Compressor
    second: Compressor

    def __str__(self) -> str:
        return f"{self.first} > {self.second}"

    @property
    def grain(self) -> int:
        """Block size for shard borders: a multiple of both compressors' blocks."""
        return math.lcm(*(int(getattr(compressor, "block", 1)) for compressor in (self.first, self.second)))


def parse_pair(text: str) -> Pair:
    first, second = text.split(">")
    return Pair(parse_compressor(first.strip()), parse_compressor(second.strip()))


def in_two_shots(pair: Pair, task: Task, owner: OwnerResidual = OwnerResidual.KEPT, seed: int = 0) -> Exchange:
    borders = cut_points(task.segments, task.workers, pair.grain)
    shards = shards_of(
        pair.first,
        pair.second,
        task.segments,
        borders,
        owner_feedback=owner is not OwnerResidual.DROPPED,
        seed=seed,
    )

    def exchange(gradients: list[Tensor]) -> Tensor:
        mean = average_in_two_shots(pair.first, pair.second, gradients, shards)
        if owner is OwnerResidual.MISCOUNTED:
            for number, shard in enumerate(shards):
                residual_of(shard.workers[number]).add_(residual_of(shard.owner))
                residual_of(shard.owner).zero_()
        return mean

    return exchange


def residual_of(replica: Replica) -> Tensor:
    assert replica.residual is not None, "asked only under error feedback"
    return replica.residual
