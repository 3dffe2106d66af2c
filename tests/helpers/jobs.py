"""Small real models with their losses, optimizers and batches; every rank draws its own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.graph.captured import Captured

WORDS = 20


class Transformer(nn.Module):
    """An embedding tied to the output, one encoder layer between."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embed(tokens))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 10))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, target = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), target.flatten())


def rows(generator: torch.Generator, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(length, 20, generator=generator), torch.randint(0, 10, (length,), generator=generator)


def images(generator: torch.Generator, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(length, 3, 8, 8, generator=generator), torch.randint(0, 10, (length,), generator=generator)


def tokens(generator: torch.Generator, length: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(0, WORDS, (2, length), generator=generator)
    return inputs, torch.randint(0, WORDS, (2, length), generator=generator)


@dataclass(frozen=True)
class Job:
    """A model and what its batches look like."""

    model: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], Any]
    length: int

    def build(self) -> nn.Module:
        torch.manual_seed(5)
        return self.model()

    def batch(self, step: int, rank: int = 0, length: int | None = None) -> Any:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return self.draw(generator, length or self.length)


JOBS = {
    "mlp": Job(mlp, rows, 4),
    "conv": Job(conv, images, 4),
    "transformer": Job(Transformer, tokens, 5),
    "dropout": Job(lambda: Transformer(0.1), tokens, 5),
}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "adamw_default": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def captured_step(job_name: str, max_grad_norm: float | None = None) -> Captured:
    """Capture the step of a job under AdamW."""
    job = JOBS[job_name]
    model = job.build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return capture(Training.of(model, cross_entropy, optimizer, max_grad_norm), job.batch(0))
