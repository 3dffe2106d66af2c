"""Jobs with a scaler, run beside eager PyTorch, in which single gradients are not finite at drawn steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxcomp
from helpers.gathered import gathered
from helpers.scaled import Beside, Eager, Summing, faults_of, half_loss, network, scaler, with_faults

KINDS = ("inf", "-inf", "nan")
LEAST_SCALE = 4.0
"""Below it faults are finite."""


@dataclass(frozen=True)
class Work:
    """A model, its loss and its batches."""

    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[int, int, int], Any]
    """Of a step, a rank, and the number of the micro-batch."""
    names: Callable[[Any], Sequence[str]]
    """The parameters that a batch gives a gradient."""


def small_batch(step: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randn(6, 12, generator=draw), torch.randint(5, (6,), generator=draw)


SMALL = Work(network, half_loss, small_batch, lambda _: ("0.weight", "0.bias", "2.weight", "2.bias"))


@dataclass
class Faults:
    """The steps at which one element of one rank's gradient is not finite; the first step is among them."""

    work: Work
    seed: int
    often: float
    micro_batches: int
    known: dict[int, Any] = field(default_factory=dict[int, Any])
    """By step: the parameter, the element, what it becomes, the rank and the micro-batch."""

    def batches(self, model: nn.Module, step: int, rank: int) -> list[Any]:
        """The micro-batches of a step on a rank."""
        draw, work = random.Random(f"{self.seed} {step}"), self.work
        who, when = None, 0
        name, place, kind = "", 0, ""
        if step == 0 or draw.random() < self.often:
            who, when = draw.randrange(dist.get_world_size()), draw.randrange(self.micro_batches)
            name, kind = draw.choice(work.names(work.batch(step, who, when))), draw.choice(KINDS)
            place = draw.randrange(dict(model.named_parameters())[name].numel())
            self.known[step] = name, place, kind, who, when
        found: list[Any] = []
        for number in range(self.micro_batches):
            inputs = work.batch(step, rank, number)
            fault = (name, place, kind) if (who, when) == (rank, number) else None
            found.append((inputs, faults_of(model, work.names(inputs), fault)))
        return found


@dataclass
class Found:
    """The findings of a job on a rank."""

    wrong: list[str]
    """Differences from eager PyTorch."""
    off: float
    """Of all gradients: the most that was missing in the sum of what was applied and what is owed."""
    skipped: int
    scales: int
    loss: float
    plans: list[str]
    notes: list[str]

    def check(self, seed: int, off: float = 1e-6) -> None:
        assert not self.wrong, f"seed {seed}: {self.wrong[:5]}"
        assert self.off <= off, f"seed {seed}"
        assert self.skipped >= 1
        assert self.scales > 1


class Job:
    """A compiled step of some work, beside eager PyTorch."""

    def __init__(
        self,
        seed: int,
        work: Work = SMALL,
        optimizers: Callable[[Sequence[nn.Parameter]], Any] = lambda p: Summing(p, lr=0.1),
        micro_batches: int = 1,
        often: float = 0.1,
        **options: Any,
    ):
        self.rank, self.model, self._work = dist.get_rank(), work.build(), work
        self.faults = Faults(work, seed, often, micro_batches)
        backoff_factor = 0.5 if often <= 0.1 else 0.95  # the scale stays above LEAST_SCALE
        self.scaler, loss = scaler(backoff_factor=backoff_factor), with_faults(work.loss)
        given: dict[str, Any] = {"verify": "never", "race": "off", "accumulate": micro_batches, **options}
        made = optimizers(list(self.model.parameters()))
        groups = len(made) if isinstance(made, list) else 1
        unused = {"find_unused_parameters": True} if options.get("find_unused_parameters") else {}
        eager = Eager(self.model, loss, groups, backoff_factor, **unused)
        example = self.faults.batches(self.model, 1, self.rank)[0]
        self.step = fxcomp.compile_step(self.model, loss, made, example, scaler=self.scaler, **gathered(**given))
        self.beside = Beside(self.step, self.scaler, eager)
        self.plans = [self.step.plan.digest]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            number = self.step.steps
            batches = self.faults.batches(self.model, number, self.rank)
            assert self.scaler.get_scale() >= LEAST_SCALE
            self.beside.run(batches, self.faults.known.get(number))
            if self.step.plan.digest != self.plans[-1]:
                self.plans.append(self.step.plan.digest)

    def found(self) -> Found:
        beside, step, loss = self.beside, self.step, self._work.loss
        losses = [loss(self.model, self._work.batch(10_000 + k, self.rank, 0)).item() for k in range(4)]
        scales = len(beside.scales)
        return Found(beside.wrong, beside.off, step.skipped_steps, scales, sum(losses) / 4, self.plans, step.notes)
