"""Models for judging predictions; their steps have different bottlenecks.

gpt      3.3 M parameters: matrices of one size, clipping, AdamW
resnet   2.8 M: convolutions and batch norm, whose buffers are broadcast; most parameters come last
mlp      5.6 M in four matrices: many bytes for little compute
many     0.5 M in 482 small tensors: cost per tensor and message

`gpt_bf16` and `resnet_bf16` run the same models under autocast.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxcomp.commands.demo.gpt import GPTConfig, gpt_job
from fxcomp.frontends.job import Job

Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        stride = 1 if channels == wider else 2
        self.first = nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(wider)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(wider)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_1(self.first(x)))
        return F.relu(self.shortcut(x) + self.norm_2(self.second(inner)))


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(self.norm(x)))


def gpt() -> Job:
    return gpt_job(GPTConfig(layers=4, heads=4, width=256), batch_size=4)


def resnet() -> Job:
    widths = (32, 64, 128, 256)
    stages = [[Residual(before, after), Residual(after, after)] for before, after in zip((32, *widths), widths)]  # noqa: B905
    body = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(block for stage in stages for block in stage))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return _classifier(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), (8, 3, 32, 32))


def mlp() -> Job:
    sizes = (512, 1536, 1536, 1536)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    return _classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-4), (128, 512))


def many() -> Job:
    model = nn.Sequential(*(Normed(64) for _ in range(120)), nn.Linear(64, 10))
    return _classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-4), (256, 64))


def _classifier(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...]) -> Job:
    def next_batch(step: int, rank: int) -> Batch:
        random = torch.Generator().manual_seed(1_000_003 * rank + step)
        return torch.randn(shape, generator=random), torch.randint(10, shape[:1], generator=random)

    def loss_fn(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    return Job(model, loss_fn, optimizer, next_batch(0, 0), next_batch=next_batch)


def _under_autocast(job: Job) -> Job:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return job.loss_fn(model, batch)

    return replace(job, loss_fn=loss_fn)


def gpt_bf16() -> Job:
    return _under_autocast(gpt())


def resnet_bf16() -> Job:
    return _under_autocast(resnet())


MODELS: dict[str, Callable[[], Any]] = {"gpt": gpt, "resnet": resnet, "mlp": mlp, "many": many}
