"""Train small models with a share of all elements compressed: what delayed error costs each kind of update.

    python benchmarks/shares.py --json shares.json
    python benchmarks/convergence.py --render convergence.json --shares shares.json --report convergence.md

A share takes so many rows of every matrix and so many values of every vector, chosen by the seed; a larger share
contains the smaller ones. Rows stay rows, so that low rank has matrices to work on. Compressors that need error
feedback have it. The rest is averaged exactly. Four kinds of updates: SGD, SGD with momentum, AdamW, and LAMB, which
scales every matrix's update to the matrix's norm.

*Excess* is the final loss over that of dense training with the same seed, minus 1. bf16 on everything shows the noise:
its rounding is too small to cost anything. Every record has the means over some steps of the compressed part's share of
the mean gradient's squares, and of its error. One process; eleven minutes on an idle core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from exchanges import MOMENTUM, exact_mean
from shares_page import DENSE, MOST_DELAYED, NOISE, SHARES, Record, section
from tasks import TASKS, Task, make_task
from torch import Tensor

from fxcomp.compressors import Feedback, parse_compressor
from fxcomp.testing import average, replicas_of

LOOK_EVERY = 10
"""Steps between two measurements of the error."""

PLAIN_RATE = 10.0
"""SGD's rate over that with momentum 0.9: momentum multiplies what a gradient moves by 1 / (1 - 0.9)."""

LAMB_RATES = {"logreg": 0.05, "charlm": 0.02, "images": 0.02}
"""The best dense losses of a few rates."""


@dataclass(frozen=True)
class Trial:
    task: str
    optimizer: str
    method: str
    share: float
    seed: int
    length: int = 1
    """So many times the task's steps."""


def trials(tasks: Sequence[str], seeds: int) -> Iterator[Trial]:
    """Every trial of each task: first where most waits, of all seeds, then the other compressors, of one."""
    for task in tasks:
        for seed, (optimizer, shares) in itertools.product(range(seeds), WAITING.items()):
            yield Trial(task, optimizer, DENSE, 0.0, seed)
            yield Trial(task, optimizer, NOISE, 1.0, seed)
            yield from (Trial(task, optimizer, MOST_DELAYED, share, seed) for share in shares)
        for optimizer, measured in OTHERS.items():
            for method, shares in measured.items():
                yield from (Trial(task, optimizer, method, share, 0) for share in shares)
        for optimizer in LONGER if task in LONGER_TASKS else ():
            yield Trial(task, optimizer, DENSE, 0.0, 0, LENGTH)
            yield from (Trial(task, optimizer, MOST_DELAYED, share, 0, LENGTH) for share in (0.15, 1.0))


LONGER, LENGTH, LONGER_TASKS = ("momentum", "adamw", "lamb"), 4, ("logreg", "charlm")
"""What trains for so many times the steps as well, on the same batches again."""
FEW = (0.15, 0.5, 1.0)
WAITING = {"momentum": SHARES, "adamw": SHARES, "lamb": SHARES, "sgd": FEW}
"""Shares by optimizer, of the compressor that lets values wait longest."""
OTHERS: dict[str, dict[str, tuple[float, ...]]] = {
    "adamw": {"topk(0.1)": FEW, "sign": FEW, "powersgd(4)": FEW, "int2(stochastic=true)": FEW},
    "momentum": {"topk(0.1)": (1.0,), "sign": (1.0,), "powersgd(4)": (1.0,), "int2(stochastic=true)": (1.0,)},
    "lamb": {"sign": (1.0,)},
}
"""Shares by optimizer and compressor, of the rest."""


# Updates


Update = Callable[[Tensor, float], None]
"""Takes one step with a gradient at a learning rate."""


def update_of(optimizer: str, task: Task, weights: torch.nn.Parameter) -> tuple[Update, float]:
    """Make an optimizer's update, and its learning rate."""
    if optimizer == "lamb":
        return Lamb(weights, task).step, LAMB_RATES[task.name]
    made: torch.optim.Optimizer
    if optimizer == "adamw":
        made, rate = torch.optim.AdamW([weights]), task.rates["adamw"]
    elif optimizer == "momentum":
        made, rate = torch.optim.SGD([weights], momentum=MOMENTUM), task.rates["sgd"]
    else:
        made, rate = torch.optim.SGD([weights]), task.rates["sgd"] * PLAIN_RATE

    def update(gradient: Tensor, rate: float) -> None:
        made.param_groups[0]["lr"] = rate
        weights.grad = gradient
        made.step()

    return update, rate


class Lamb:
    """Adam whose update of a matrix is scaled to the matrix's norm (You et al. 2020). Vectors are not scaled."""

    BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-6, 0.01

    def __init__(self, weights: Tensor, task: Task):
        self._weights, self._task, self._steps = weights, task, 0
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float) -> None:
        self._steps += 1
        self._first.lerp_(gradient, 1 - self.BETAS[0])
        self._second.mul_(self.BETAS[1]).addcmul_(gradient, gradient, value=1 - self.BETAS[1])
        first, second = (
            moment / (1 - beta**self._steps)
            for moment, beta in zip((self._first, self._second), self.BETAS, strict=True)
        )
        direction = first / (second.sqrt() + self.EPSILON) + self.DECAY * self._weights
        layers = zip(*(flat.split(self._task.segments) for flat in (self._weights, direction)), strict=True)
        for (values, move), shape in zip(layers, self._task.shapes, strict=True):
            norms = values.norm().item(), move.norm().item()
            trust = norms[0] / norms[1] if len(shape) > 1 and min(norms) > 0 else 1.0
            values.sub_(move, alpha=rate * trust)


# The compressed part


class Part:
    """Averages all workers' gradients: a share of the elements compressed, the rest exactly."""

    def __init__(self, trial: Trial, task: Task):
        compressor = parse_compressor(trial.method)
        self.index, self._shapes = chosen_rows(task.shapes, trial.share, trial.seed)
        self._bound = compressor.bound_to(self._shapes, task.workers)
        self._segments = tuple(map(math.prod, self._shapes))
        feedback = compressor.feedback is Feedback.REQUIRED
        self._replicas = replicas_of(self._bound, self._segments, task.workers, feedback=feedback, seed=trial.seed)
        self._calls = 0
        self.squares: list[float] = []
        """At each look, the part's share of the mean gradient's squares."""
        self.errors: list[float] = []
        """At each look, the relative squared error of what is applied, of gradients and what had been left out."""

    def exchange(self, gradients: list[Tensor]) -> Tensor:
        mean = exact_mean(gradients)
        parts = [gradient[self.index] for gradient in gradients]
        given = self._given(parts) if self._calls % LOOK_EVERY == 0 else None
        applied = average(self._bound, parts, self._replicas, self._segments, self._shapes)
        if given is not None:
            self.squares.append(_squares(mean[self.index]) / max(_squares(mean), 1e-30))
            self.errors.append(_squares(applied - given) / max(_squares(given), 1e-30))
        self._calls += 1
        return mean.index_copy_(0, self.index, applied)

    def _given(self, parts: Sequence[Tensor]) -> Tensor:
        """Average what workers compress. What is summed on the way is divided before, and so is what was left out."""
        unit = len(parts) if self._bound.is_linear else 1
        waiting = [replica.residual for replica in self._replicas]
        return exact_mean([p if r is None else p + unit * r for p, r in zip(parts, waiting, strict=True)])


def chosen_rows(shapes: Sequence[tuple[int, ...]], share: float, seed: int) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Choose a share of the rows of every parameter: their elements' places in the flat tensor, and their shapes."""
    random = torch.Generator().manual_seed(seed)
    places, cut, start = [torch.empty(0, dtype=torch.int64)], list[tuple[int, ...]](), 0
    for shape in shapes:
        rows, row = shape[0], math.prod(shape[1:])
        chosen = torch.randperm(rows, generator=random)[: round(share * rows)].sort().values
        if len(chosen):
            places.append((start + chosen[:, None] * row + torch.arange(row)).flatten())
            cut.append((len(chosen), *shape[1:]))
        start += rows * row
    return torch.cat(places), cut


def _squares(values: Tensor) -> float:
    return values.double().square().sum().item()


# Running


class Runs:
    """Runs trials, and judges them by the dense one of the same task, optimizer and seed."""

    def __init__(self, known: Sequence[Record]):
        self._known = {_trial_of(each): each for each in known}
        self._dense: dict[tuple[str, str, int, int], float] = {}

    def record(self, trial: Trial) -> Record:
        """Run a trial that is not known."""
        record = self._known.get(trial) or self._run(trial)
        if trial.method == DENSE:
            self._dense[trial.task, trial.optimizer, trial.seed, trial.length] = record.dense_loss
        return record

    def _run(self, trial: Trial) -> Record:
        task, start = _longer(make_task(trial.task, trial.seed), trial.length), time.process_time()
        part = Part(trial, task) if trial.method != DENSE else None
        loss = train(task, trial.optimizer, part.exchange if part else exact_mean)
        dense = self._dense[trial.task, trial.optimizer, trial.seed, trial.length] if part else loss
        finite = math.isfinite(loss)
        return Record(
            **asdict(trial),
            elements=len(part.index) / task.start.numel() if part else 0.0,
            squares=_mean(part.squares) if part else 0.0,
            error=_mean(part.errors) if part else 0.0,
            loss=loss if finite else None,
            dense_loss=dense,
            excess=loss / dense - 1 if finite else None,
            seconds=round(time.process_time() - start, 2),
        )


def _trial_of(record: Record) -> Trial:
    return Trial(record.task, record.optimizer, record.method, record.share, record.seed, record.length)


def _longer(task: Task, length: int) -> Task:
    """Repeat a task's batches."""
    return replace(task, steps=length * task.steps, gradients=lambda w, step: task.gradients(w, step % task.steps))


def train(task: Task, optimizer: str, exchange: Callable[[list[Tensor]], Tensor]) -> float:
    """Return the final loss; infinity where it diverges. The learning rate falls to zero along a cosine."""
    weights = torch.nn.Parameter(task.start.clone())
    update, rate = update_of(optimizer, task, weights)
    for step in range(task.steps):
        mean = exchange(task.gradients(weights.detach(), step))
        if not mean.isfinite().all():
            return math.inf
        update(mean, rate * 0.5 * (1 + math.cos(math.pi * step / task.steps)))
    loss = task.loss(weights.detach())
    return loss if math.isfinite(loss) else math.inf


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compress a share of all elements and compare the loss.")
    parser.add_argument("--task", action="append", choices=TASKS, help="only this one; may be given again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here, as they come")
    parser.add_argument(
        "--known", type=Path, metavar="FILE", help="run only what is not among the records of this file"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(arguments.known.read_text()) if arguments.known else []
    runs, records = Runs([Record(**entry) for entry in known]), list[Record]()
    for trial in trials(arguments.task or list(TASKS), arguments.seeds):
        record = runs.record(trial)
        records.append(record)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(each) for each in records], indent=1) + "\n")
        print(trial, record.loss, file=sys.stderr)
    print("\n".join(section(records)))


if __name__ == "__main__":
    main()
