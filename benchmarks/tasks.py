"""Small training tasks with generated data, for workers in one process.

    quadratic  each worker pulls to a place of its own, under noise; the loss is the distance from the places' mean
    logreg     logistic regression, 4,096 features of very different scales, workers with data of their own
    charlm     the next symbol of Python's help() topics from the sixteen before: an embedding and two hidden layers
    images     ten smooth patterns, shifted and under noise: two convolutions and two linear layers

Learning rates are far inside the stable range of dense training. Training stops before all methods have converged, so
that compression losses show. All data follow from the seed.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

WORKERS = 4

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Training task. Parameters and each worker's gradient are flat tensors."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    start: Tensor
    steps: int
    rates: dict[str, float]  # by optimizer
    gradients: Callable[[Tensor, int], list[Tensor]]
    """Each worker's gradient at given parameters and step."""
    loss: Callable[[Tensor], float]
    """Loss over all data at given parameters."""
    workers: int = WORKERS

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.shapes))


@cache
def make_task(name: str, seed: int = 0, workers: int = WORKERS) -> Task:
    """Make a task; cached per process."""
    return ALL_TASKS[name](seed, workers)


def logistic_regression(seed: int, workers: int = WORKERS, steps: int = 600) -> Task:
    """Sparse features with scales from 1 to e^-4; workers have different data distributions."""
    features, rows, batch, decay = 4096, 1000, 32, 5e-4
    random = torch.Generator().manual_seed(seed)
    scale = (-4 * torch.rand(features, generator=random)).exp()
    truth = torch.randn(features, generator=random) / scale.sqrt()
    shards: list[tuple[Tensor, Tensor]] = []
    for _ in range(workers):
        lean = 1 + 0.5 * torch.randn(features, generator=random)
        x = torch.randn(rows, features, generator=random) * scale * lean
        x *= torch.rand(rows, features, generator=random) < 0.1
        noise = 2 * torch.randn(rows, generator=random)
        shards.append((x, (x @ truth + noise > 0).float()))
    picks = torch.randint(rows, (steps, workers, batch), generator=random)

    def gradients(weights: Tensor, step: int) -> list[Tensor]:
        found: list[Tensor] = []
        for (x, y), pick in zip(shards, picks[step], strict=True):
            some = x[pick]
            error = torch.sigmoid(some @ weights) - y[pick]
            found.append(some.T @ error / batch + 2 * decay * weights)
        return found

    def loss(weights: Tensor) -> float:
        parts = [functional.binary_cross_entropy_with_logits(x @ weights, y) for x, y in shards]
        return (torch.stack(parts).mean() + decay * weights.square().sum()).item()

    rates = {"sgd": 0.3, "adamw": 0.02}
    return Task("logreg", ((64, 64),), torch.zeros(features), steps, rates, gradients, loss, workers)


def character_model(seed: int, workers: int = WORKERS) -> Task:
    """116,835 parameters, 73,728 of them in one matrix: more than 16-bit indices can address."""
    context, embedding, width, batch, steps = 16, 24, 192, 64, 500
    random = torch.Generator().manual_seed(seed)
    tokens, letters = _text(), 27
    shapes = (
        *((letters, embedding), (width, context * embedding), (width,)),
        *((width, width), (width,), (letters, width), (letters,)),
    )
    starts = torch.randint(len(tokens) - context, (steps, workers, batch), generator=random)
    judged = torch.randint(len(tokens) - context, (8192,), generator=random)
    start = torch.cat([torch.randn(letters * embedding, generator=random), _first_values(shapes[1:], random)])

    def passages(at: Tensor) -> Batch:
        found = tokens[at[:, None] + torch.arange(context + 1)].long()
        return found[:, :-1], found[:, -1]

    def outputs(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        table, w1, b1, w2, b2, w3, b3 = parameters
        hidden = functional.embedding(x, table).flatten(1)
        hidden = functional.relu(functional.linear(hidden, w1, b1))
        hidden = functional.relu(functional.linear(hidden, w2, b2))
        return functional.linear(hidden, w3, b3)

    return _classifier(
        "charlm", shapes, steps, {"sgd": 0.15, "adamw": 4e-3}, outputs, lambda step, w: passages(starts[step, w]),
        passages(judged), start, workers,
    )  # fmt: skip


def small_images(seed: int, workers: int = WORKERS) -> Task:
    """Three channels of 16 x 16 pixels; 72,042 parameters."""
    pixels, batch, steps, noise = 16, 16, 250, 2.0
    shapes = ((16, 3, 3, 3), (16,), (32, 16, 3, 3), (32,), (128, 512), (128,), (10, 128), (10,))
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randn(10, 3, 6, 6, generator=random)
    patterns = functional.interpolate(coarse, size=(pixels + 6, pixels + 6), mode="bicubic", align_corners=True)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (count,), generator=random)
        down, right = torch.randint(7, (2, count), generator=random).tolist()
        cut = [
            patterns[label, :, i : i + pixels, j : j + pixels]
            for label, i, j in zip(labels.tolist(), down, right, strict=True)
        ]
        return torch.stack(cut) + noise * torch.randn(count, 3, pixels, pixels, generator=random), labels

    start = _first_values(shapes, random)
    x, y = draw(steps * workers * batch)
    x, y = x.view(steps, workers, batch, 3, pixels, pixels), y.view(steps, workers, batch)

    def outputs(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        w1, b1, w2, b2, w3, b3, w4, b4 = parameters
        hidden = functional.max_pool2d(functional.relu(functional.conv2d(x, w1, b1, padding=1)), 2)
        hidden = functional.max_pool2d(functional.relu(functional.conv2d(hidden, w2, b2, padding=1)), 2)
        return functional.linear(functional.relu(functional.linear(hidden.flatten(1), w3, b3)), w4, b4)

    return _classifier(
        "images", shapes, steps, {"sgd": 0.02, "adamw": 3e-3}, outputs, lambda step, w: (x[step, w], y[step, w]),
        draw(2048), start, workers,
    )  # fmt: skip


def quadratic(seed: int, workers: int = WORKERS) -> Task:
    """Equal curvature for all values, so that values an encoder never sends are never corrected."""
    size, steps, spread, noise = 4096, 2000, 0.3, 0.15
    random = torch.Generator().manual_seed(seed)
    places = spread * torch.randn(workers, size, generator=random)
    goal = places.mean(dim=0)

    def gradients(weights: Tensor, step: int) -> list[Tensor]:
        drawn = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        pulls = weights - places + noise * torch.randn(workers, size, generator=drawn)
        return list(pulls.unbind())

    def loss(weights: Tensor) -> float:
        return (weights - goal).square().mean().sqrt().item()

    start, rates = torch.zeros(size), {"sgd": 0.002}
    return Task("quadratic", ((size,),), start, steps, rates, gradients, loss, workers)


TASKS: dict[str, Callable[[int, int], Task]] = {
    "logreg": logistic_regression,
    "charlm": character_model,
    "images": small_images,
}
ALL_TASKS = {"quadratic": quadratic, **TASKS}
"""With the task that only tests two shots."""


def _text() -> Tensor:
    """Return Python's help() topics as 27 symbols: letters without case, and a space for other text."""
    topics: dict[str, str] = pydoc_data.topics.topics
    pages = "\n".join(topics[name] for name in sorted(topics)).lower()
    letters = re.sub("[^a-z]+", " ", pages).encode()
    return (torch.frombuffer(bytearray(letters), dtype=torch.uint8).long() - (ord("a") - 1)).clamp_min(0)


def _classifier(
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    steps: int,
    rates: dict[str, float],
    outputs: Callable[[Sequence[Tensor], Tensor], Tensor],
    batch_at: Callable[[int, int], Batch],
    judged: Batch,
    start: Tensor,
    workers: int,
) -> Task:
    sizes = list(map(math.prod, shapes))

    def parts(flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def objective(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs(parts(flat), x), y)

    def gradients(flat: Tensor, step: int) -> list[Tensor]:
        found: list[Tensor] = []
        for worker in range(workers):
            leaf = flat.detach().requires_grad_()
            found += torch.autograd.grad(objective(leaf, *batch_at(step, worker)), leaf)
        return found

    @torch.no_grad()
    def loss(flat: Tensor) -> float:
        return objective(flat, *judged).item()

    return Task(name, shapes, start, steps, rates, gradients, loss, workers)


def _first_values(shapes: Sequence[tuple[int, ...]], random: torch.Generator) -> Tensor:
    """Return zeros for biases and random matrices that preserve the size of activations, as in torch's layers."""
    parts = [
        torch.randn(shape, generator=random) * ((3 * math.prod(shape[1:])) ** -0.5 if len(shape) > 1 else 0.0)
        for shape in shapes
    ]
    return torch.cat([part.flatten() for part in parts])
