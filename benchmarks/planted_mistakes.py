"""Negative controls of convergence.py; each has one mistake that must be detected."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from exchanges import Exchange, compressed, exact_mean, residual_of
from tasks import TASKS, Task
from torch import Tensor
from trials import Band

from fxcomp.compressors import parse_compressor
from fxcomp.testing import Replica, average, replicas_of


def with_wrong_residual(spoil: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Task], Exchange]:
    """topk(0.01) whose residual becomes spoil(gradient, previous residual, correct residual)."""

    def make(task: Task) -> Exchange:
        compressor, segments = parse_compressor("topk(0.01)"), task.segments
        replicas: list[Replica] = replicas_of(compressor, segments, task.workers, feedback=True)

        def exchange(gradients: list[Tensor]) -> Tensor:
            before = [residual_of(replica).clone() for replica in replicas]
            mean = average(compressor, gradients, replicas, segments)
            for replica, gradient, old in zip(replicas, gradients, before, strict=True):
                replica.residual = spoil(gradient, old, residual_of(replica))
            return mean

        return exchange

    return make


def floored(*, feedback: bool) -> Callable[[Task], Exchange]:
    """Four bits with a scale per block, rounded down instead of to nearest."""

    def make(task: Task) -> Exchange:
        residuals = [torch.zeros(sum(task.segments)) for _ in range(task.workers)]

        def one(gradient: Tensor, residual: Tensor) -> Tensor:
            value = gradient + residual if feedback else gradient
            parts: list[Tensor] = []
            for part in value.split(list(task.segments)):
                blocks = torch.nn.functional.pad(part, (0, -len(part) % 128)).view(-1, 128)
                scale = blocks.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 7
                parts.append(((blocks / scale).floor().clamp(-7, 7) * scale).flatten()[: len(part)])
            decoded = torch.cat(parts)
            residual.copy_(value - decoded)
            return decoded

        return lambda gradients: exact_mean([one(g, r) for g, r in zip(gradients, residuals, strict=True)])

    return make


def random_places(*, scaled: bool) -> Callable[[Task], Exchange]:
    """Random 1 % of the values, the same on all workers, with error feedback; unbiased if `scaled`."""

    def make(task: Task) -> Exchange:
        size, random = sum(task.segments), torch.Generator().manual_seed(0)
        residuals = [torch.zeros(size) for _ in range(task.workers)]

        def exchange(gradients: list[Tensor]) -> Tensor:
            kept = torch.rand(size, generator=random) < 0.01
            decoded: list[Tensor] = []
            for gradient, residual in zip(gradients, residuals, strict=True):
                value = gradient + residual
                decoded.append(value * kept * (100 if scaled else 1))
                residual.copy_(value - decoded[-1])
            return exact_mean(decoded)

        return exchange

    return make


def short_places(task: Task) -> Exchange:
    """topk(0.01) over the gradient as one segment, with indices cut to 16 bits."""
    whole = ((sum(task.segments),),)
    decode = compressed(parse_compressor("topk(0.01)"), whole, task.workers, feedback=True)
    place = torch.arange(sum(task.segments)) & 0xFFFF

    def exchange(gradients: list[Tensor]) -> Tensor:
        right = decode(gradients)
        return torch.zeros_like(right).index_add_(0, place, right)

    return exchange


AT_LEAST_A_QUARTER = Band(0.25, math.inf)
CONTROLS: dict[str, tuple[Callable[[Task], Exchange], dict[str, Band]]] = {
    "topk(0.01), residual with the wrong sign": (
        with_wrong_residual(lambda gradient, old, new: -new),  # noqa: ARG005
        dict.fromkeys(TASKS, AT_LEAST_A_QUARTER),
    ),
    "topk(0.01), what was sent stays in the residual": (
        with_wrong_residual(lambda gradient, old, new: gradient + old),  # noqa: ARG005
        dict.fromkeys(TASKS, AT_LEAST_A_QUARTER),
    ),
    "topk(0.01), the old residual is dropped": (
        with_wrong_residual(lambda gradient, old, new: torch.where(new == 0, 0, gradient)),  # noqa: ARG005
        dict.fromkeys(TASKS, AT_LEAST_A_QUARTER),
    ),
    "topk(0.01), the old residual counts twice": (
        with_wrong_residual(lambda gradient, old, new: new + old),  # noqa: ARG005
        dict.fromkeys(TASKS, AT_LEAST_A_QUARTER),
    ),
    "topk(0.01), places cut to 16 bits": (
        short_places,
        {"charlm": AT_LEAST_A_QUARTER, "images": AT_LEAST_A_QUARTER},  # the others have fewer values than 65,536
    ),
    "four bits rounded down": (floored(feedback=False), dict.fromkeys(TASKS, Band(1.0, math.inf))),
    "four bits rounded down, with error feedback": (
        floored(feedback=True),
        {"logreg": Band(-0.005, 0.005), "charlm": Band(-0.02, 0.02)},  # hidden, so it also runs without feedback
    ),
    "1 % at random, scaled up, with error feedback": (
        random_places(scaled=True),
        dict.fromkeys(TASKS, Band(10.0, math.inf)),
    ),
}
"""Exchange with a mistake, and its excess per task under SGD, by name."""
