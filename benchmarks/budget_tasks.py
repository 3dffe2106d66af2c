"""Small training tasks for error budgets: 1,000 steps of workers that live in one process, a name for each gradient.

    gpt      the example's transformer, two blocks of width 64, on Python's own source; 118,528 parameters
    resnet   three residual blocks with batch norm on ten smooth patterns under noise; 77,834 parameters
    logreg   logistic regression on eight fields of 1,024 sparse features, a tensor each; scales from 1 to e^-4
    logreg1  logistic regression of tasks.py: 4,096 such features in one tensor, so no layer differs from another

Learning rates are inside what dense training is stable at, and fall to zero along a cosine. The GPT and the images stop
where there is still much to learn, so that what a plan delays shows in the loss. Everything follows from the seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from models import Residual
from tasks import WORKERS, Task, logistic_regression, regression_on
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fxcomp.commands.demo.gpt import GPT, GPTConfig, training_text
from fxcomp.commands.demo.training_text import draw_batch

STEPS = 1000
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BudgetTask:
    """Hold a task with the names of its gradients."""

    task: Task
    names: tuple[str, ...]
    forward_share: float
    """Of the time that one gradient takes (assumed); backward makes gradients in the time that is left."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self.names, self.task.shapes, strict=True))

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a flat tensor into gradients."""
        pieces = torch.split_with_sizes(flat, self.task.segments)
        return {name: each.view(shape) for (name, shape), each in zip(self.shapes.items(), pieces, strict=True)}


@cache
def make_budget_task(name: str, seed: int = 0) -> BudgetTask:
    """Make a task of this name; its data once in a process."""
    return BUDGET_TASKS[name](seed)


def small_gpt(seed: int) -> BudgetTask:
    """Passages of 32 bytes; judged by others of the same files."""
    config = GPTConfig(layers=2, heads=4, width=64, context=32)
    batch, judged = 4, 512
    torch.manual_seed(seed)
    model, text = GPT(config), training_text()

    def batch_at(step: int, worker: int) -> Batch:
        return draw_batch(text.train, step=step, rank=worker, size=batch, context=config.context, seed=seed)

    whole = draw_batch(text.train, step=-1, rank=0, size=judged, context=config.context, seed=0)
    return _of_module("gpt", model, {"sgd": 0.1, "adamw": 4e-3}, batch_at, whole)


def small_resnet(seed: int) -> BudgetTask:
    """Three channels of 10 x 10 pixels; batch norm by each worker's own batch, also where it is judged."""
    widths, pixels, batch, noise = (16, 32, 64), 10, 4, 4.0
    torch.manual_seed(seed)
    pairs = itertools.pairwise((16, *widths))
    blocks = [Residual(before, after) for before, after in pairs]
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks)
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
            module.num_batches_tracked = None
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randn(10, 3, 6, 6, generator=random)
    patterns = functional.interpolate(coarse, size=(pixels + 6, pixels + 6), mode="bicubic", align_corners=True)
    shifted = patterns.unfold(2, pixels, 1).unfold(3, pixels, 1)  # label, channel, down, right, pixels

    def draw(count: int, key: int) -> Batch:
        drawn = torch.Generator().manual_seed(key)
        labels = torch.randint(10, (count,), generator=drawn)
        down, right = torch.randint(7, (2, count), generator=drawn)
        return shifted[labels, :, down, right] + noise * torch.randn(count, 3, pixels, pixels, generator=drawn), labels

    def batch_at(step: int, worker: int) -> Batch:
        return draw(batch, 1_000_003 * (seed + 1) + WORKERS * step + worker)

    return _of_module("resnet", model, {"sgd": 0.03, "adamw": 3e-3}, batch_at, draw(2048, seed))


def logreg_of_fields(seed: int) -> BudgetTask:
    """Features of one field are of about one scale, from 1 down to e^-4; the rows of each worker lean another way."""
    fields, shape, rows, batch, decay = 8, (32, 32), 500, 32, 5e-4
    features = fields * math.prod(shape)
    random = torch.Generator().manual_seed(seed)
    scale = (-4 * torch.rand(features, generator=random)).exp().sort(descending=True).values
    truth = torch.randn(features, generator=random) / scale.sqrt()
    shards: list[Batch] = []
    for _ in range(WORKERS):
        lean = 1 + 0.5 * torch.randn(features, generator=random)
        x = torch.randn(rows, features, generator=random) * scale * lean
        x *= torch.rand(rows, features, generator=random) < 0.1
        shards.append((x, (x @ truth + 2 * torch.randn(rows, generator=random) > 0).float()))
    picks = torch.randint(rows, (STEPS, WORKERS, batch), generator=random)
    task = regression_on(shards, picks, decay, (shape,) * fields)
    return BudgetTask(task, tuple(f"field_{number}" for number in range(fields)), 0.5)


def logreg_of_one(seed: int) -> BudgetTask:
    return BudgetTask(logistic_regression(seed, steps=STEPS), ("weight",), 0.5)


BUDGET_TASKS: dict[str, Callable[[int], BudgetTask]] = {
    "gpt": small_gpt,
    "resnet": small_resnet,
    "logreg": logreg_of_fields,
    "logreg1": logreg_of_one,
}


def _of_module(
    name: str,
    model: nn.Module,
    rates: dict[str, float],
    batch_at: Callable[[int, int], Batch],
    judged: Batch,
) -> BudgetTask:
    """Make a classifier's task: gradients are in the order in which backward makes them, about."""
    values = dict(reversed(list(model.named_parameters())))
    shapes = tuple(tuple(value.shape) for value in values.values())
    start = torch.cat([value.detach().flatten() for value in values.values()])
    sizes = list(map(math.prod, shapes))

    def loss_at(parts: Sequence[Tensor], batch: Batch) -> Tensor:
        named = {key: part.view(shape) for key, part, shape in zip(values, parts, shapes, strict=True)}
        logits = functional_call(model, named, (batch[0],), tie_weights=True)
        return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def gradients(flat: Tensor, step: int) -> list[Tensor]:
        parts = [part.detach().requires_grad_() for part in torch.split_with_sizes(flat, sizes)]
        found: list[Tensor] = []
        for worker in range(WORKERS):
            made = torch.autograd.grad(loss_at(parts, batch_at(step, worker)), parts)
            found.append(torch.cat([each.flatten() for each in made]))
        return found

    @torch.no_grad()
    def loss(flat: Tensor) -> float:
        return loss_at(torch.split_with_sizes(flat, sizes), judged).item()

    return BudgetTask(Task(name, shapes, start, STEPS, rates, gradients, loss), tuple(values), 0.33)
