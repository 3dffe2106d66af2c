"""Train small models with every compressor, with and without error feedback, and compare the loss with dense training.

    python benchmarks/convergence.py --json convergence.json --report docs/benchmarks/convergence.md

Four workers live in one process: each has its own batches, residual and state, and a round of `fxcomp.testing` stands
for the network. Optimizers see the mean. Every compressor runs both ways, also where it refuses or needs error
feedback: that is the measurement of why. The negative controls are compressors with a planted mistake, and must fail.

*Excess* is the final loss over the dense one, minus 1. Bands say what to expect of a class of compressors on a task; a
trial without a band is measured and not judged. Everything follows from the seed. Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from tasks import TASKS, WORKERS, Task, make_task
from torch import Tensor

from fxcomp.compressors import Compressor, Feedback, parse_compressor
from fxcomp.testing import Replica, average, replicas_of
from fxcomp.testing.describe_compressors import SAMPLE, SAMPLE_SHAPE, bits_per_value, examples
from fxcomp.testing.samples import gaussian

OPTIMIZERS = ("sgd", "adamw")
DENSE = "dense"
MOMENTUM = 0.9

Exchange = Callable[[list[Tensor]], Tensor]
"""Makes one gradient of all workers', and remembers what it must."""


@dataclass(frozen=True)
class Trial:
    task: str
    optimizer: str
    method: str
    """A compressor's text form, the name of a control, or `dense`."""
    feedback: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Band:
    """The excess to expect."""

    low: float
    high: float

    def __contains__(self, excess: float) -> bool:
        return self.low <= excess <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {_percent(self.low)}"
        return f"within ±{self.high:.1%}"


@dataclass(frozen=True)
class Record:
    """What a trial came to. A diverged one has no loss."""

    task: str
    optimizer: str
    method: str
    feedback: bool
    seed: int
    loss: float | None
    dense_loss: float
    excess: float | None
    low: float | None
    high: float | None
    within_band: bool | None
    bits_per_value: float | None
    seconds: float


# Training


def train(task: Task, optimizer: str, exchange: Exchange, momentum: float = MOMENTUM) -> float:
    """The final loss; infinity where it diverges. The learning rate falls to zero along a cosine."""
    weights = torch.nn.Parameter(task.start.clone())
    rate = task.rates[optimizer]
    update: torch.optim.Optimizer
    if optimizer == "sgd":
        update = torch.optim.SGD([weights], lr=rate, momentum=momentum)
    else:
        update = torch.optim.AdamW([weights], lr=rate)
    for step in range(task.steps):
        for group in update.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / task.steps))
        mean = exchange(task.gradients(weights.detach(), step))
        if not mean.isfinite().all():
            return math.inf
        weights.grad = mean
        update.step()
    loss = task.loss(weights.detach())
    return loss if math.isfinite(loss) else math.inf


def exact_mean(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(gradients)).mean(dim=0)


def compressed(compressor: Compressor, shapes: Sequence[Sequence[int]], *, feedback: bool, seed: int = 0) -> Exchange:
    """All workers compress with this; nobody sees more of the others than the network would bring."""
    bound, segments = compressor.bound_to(shapes, WORKERS), tuple(map(math.prod, shapes))
    replicas = replicas_of(bound, segments, WORKERS, feedback=feedback, seed=seed)
    return lambda gradients: average(bound, gradients, replicas, segments, shapes)


def corrected(compressor: Compressor, shapes: Sequence[Sequence[int]]) -> Exchange:
    """The same with error feedback and momentum correction: train with momentum=0, for each worker has its own."""
    bound, segments = compressor.bound_to(shapes, WORKERS), tuple(map(math.prod, shapes))
    replicas = replicas_of(bound, segments, WORKERS, feedback=True)
    velocities = [torch.zeros(sum(segments)) for _ in range(WORKERS)]

    def exchange(gradients: list[Tensor]) -> Tensor:
        for velocity, gradient in zip(velocities, gradients, strict=True):
            velocity.mul_(MOMENTUM).add_(gradient)
        mean = average(bound, [velocity.clone() for velocity in velocities], replicas, segments, shapes)
        if bound.sends_values:
            for velocity, replica in zip(velocities, replicas, strict=True):
                velocity[_residual(replica) == 0] = 0
        return mean

    return exchange


def fitted(compressor: Compressor, task: Task) -> Compressor:
    """The compressor, with a fixed threshold of five times the gradient's root mean square at the start."""
    if not any(parameter.name == "value" for parameter in compressor.facts.parameters):
        return compressor
    scale = exact_mean(task.gradients(task.start, 0)).square().mean().sqrt().item()
    changes: dict[str, Any] = {"value": float(f"{5 * scale:.2g}")}
    return replace(compressor, **changes)  # pyright: ignore[reportArgumentType]


# Negative controls: each has one mistake, and must be seen


def with_wrong_residual(spoil: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Task], Exchange]:
    """topk(0.01), whose residual becomes spoil(gradient, residual before, right residual)."""

    def make(task: Task) -> Exchange:
        compressor, segments = parse_compressor("topk(0.01)"), task.segments
        replicas: list[Replica] = replicas_of(compressor, segments, WORKERS, feedback=True)

        def exchange(gradients: list[Tensor]) -> Tensor:
            before = [_residual(replica).clone() for replica in replicas]
            mean = average(compressor, gradients, replicas, segments)
            for replica, gradient, old in zip(replicas, gradients, before, strict=True):
                replica.residual = spoil(gradient, old, _residual(replica))
            return mean

        return exchange

    return make


def floored(*, feedback: bool) -> Callable[[Task], Exchange]:
    """Four bits on a scale a block, rounded down instead of to the nearest."""

    def make(task: Task) -> Exchange:
        residuals = [torch.zeros(sum(task.segments)) for _ in range(WORKERS)]

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
    """1 % of the places at random, the same on all workers, with error feedback; unbiased where `scaled`."""

    def make(task: Task) -> Exchange:
        size, random = sum(task.segments), torch.Generator().manual_seed(0)
        residuals = [torch.zeros(size) for _ in range(WORKERS)]

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
    """topk(0.01) over the whole gradient as one segment, whose places arrive without their upper bits."""
    whole = ((sum(task.segments),),)
    decode = compressed(parse_compressor("topk(0.01)"), whole, feedback=True)
    place = torch.arange(sum(task.segments)) & 0xFFFF

    def exchange(gradients: list[Tensor]) -> Tensor:
        right = decode(gradients)
        return torch.zeros_like(right).index_add_(0, place, right)

    return exchange


def _residual(replica: Replica) -> Tensor:
    assert replica.residual is not None, "asked only under error feedback"
    return replica.residual


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
        {"charlm": AT_LEAST_A_QUARTER, "images": AT_LEAST_A_QUARTER},  # the others have no places above 65,535
    ),
    "four bits rounded down": (floored(feedback=False), dict.fromkeys(TASKS, Band(1.0, math.inf))),
    "four bits rounded down, with error feedback": (
        floored(feedback=True),
        {"logreg": Band(-0.005, 0.005), "charlm": Band(-0.02, 0.02)},  # hidden: why it is tested without feedback
    ),
    "1 % at random, scaled up, with error feedback": (
        random_places(scaled=True),
        dict.fromkeys(TASKS, Band(10.0, math.inf)),
    ),
}
"""By name: what is wrong, and the excess on each task under stochastic gradient descent."""


# What to expect

LOSSLESS, SMALL = 1e-3, 0.1  # the largest ω of these classes, on Gaussian values
TOO_LATE = 0.98  # a value waits about 1 / (1 - ω) steps: from 50 on these rates are too large, and it must show
TOLERANCES = {  # by task: of lossless compressors, of small errors, and under error feedback
    "logreg": (0.002, 0.01, 0.005),
    "charlm": (0.015, 0.02, 0.13),
    "images": (0.15, 0.2, 0.8),
}
WITHOUT_FEEDBACK = {"topk(0.01)": Band(0.25, math.inf), "sign": Band(0.2, math.inf)}  # on logreg and charlm


def expected(trial: Trial) -> Band | None:
    """The band of a trial; None where nothing is promised."""
    if trial.method in CONTROLS:
        return CONTROLS[trial.method][1].get(trial.task)
    compressor = parse_compressor(trial.method)
    lossless, small, fed_back = TOLERANCES[trial.task]
    omega = measured_error(compressor)
    if omega < LOSSLESS:
        return Band(-lossless, lossless)
    if trial.optimizer != "sgd":
        return None  # what is fed back arrives late, and Adam divides by a variance that it inflates
    if omega < SMALL:
        return Band(-small, small)
    if not trial.feedback:
        return WITHOUT_FEEDBACK.get(trial.method) if trial.task != "images" else None
    if compressor.feedback is not Feedback.REQUIRED:
        return None
    return Band(-fed_back, fed_back) if omega < TOO_LATE else Band(0.25, math.inf)


@cache
def measured_error(compressor: Compressor) -> float:
    """ω of the mean over the workers, where all have the same Gaussian values."""
    bound, segments, values = compressor.bound_to([SAMPLE_SHAPE], WORKERS), (SAMPLE,), gaussian(SAMPLE)
    replicas = replicas_of(bound, segments, WORKERS, feedback=False)
    lost = values - average(bound, [values] * WORKERS, replicas, segments, [SAMPLE_SHAPE])
    return (lost.double().square().sum() / values.double().square().sum()).item()


# Running trials


def trials(tasks: Sequence[str], compressors: Sequence[str], seeds: int) -> list[Trial]:
    found: list[Trial] = []
    for seed in range(seeds):
        for task in tasks:
            for optimizer in OPTIMIZERS:
                found.append(Trial(task, optimizer, DENSE, seed=seed))
                for method in compressors:
                    found += [Trial(task, optimizer, method, feedback, seed) for feedback in (False, True)]
            found += [Trial(task, "sgd", name, seed=seed) for name, (_, bands) in CONTROLS.items() if task in bands]
    return found


def run_trial(trial: Trial) -> tuple[Trial, float, float]:
    """The trial, its final loss and its seconds."""
    task = make_task(trial.task, trial.seed)
    start = time.perf_counter()
    if trial.method == DENSE:
        exchange: Exchange = exact_mean
    elif trial.method in CONTROLS:
        exchange = CONTROLS[trial.method][0](task)
    else:
        compressor = fitted(parse_compressor(trial.method), task)
        exchange = compressed(compressor, task.shapes, feedback=trial.feedback, seed=trial.seed)
    return trial, train(task, trial.optimizer, exchange), time.perf_counter() - start


def run_trials(planned: Sequence[Trial], jobs: int) -> Iterable[tuple[Trial, float, float]]:
    """Run trials in so many processes of one thread, and yield them as they end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(run_trial, trial) for trial in planned]):
            yield future.result()


def record(trial: Trial, loss: float, dense_loss: float, seconds: float) -> Record:
    excess, band = loss / dense_loss - 1, expected(trial)
    is_control = trial.method in CONTROLS
    return Record(
        **asdict(trial),
        loss=_finite(loss),
        dense_loss=dense_loss,
        excess=_finite(excess),
        low=band.low if band else None,
        high=_finite(band.high) if band else None,
        within_band=excess in band if band else None,
        bits_per_value=None if is_control else bits_per_value(parse_compressor(trial.method)),
        seconds=round(seconds, 2),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# What the numbers say


def report(records: Sequence[Record]) -> str:
    """Tables and the trials outside their bands, as Markdown."""
    sections = ["# Loss under compression", "", INTRODUCTION]
    for task in TASKS:
        of_task = [record for record in records if record.task == task]
        if of_task:
            sections += [f"## {task}", "", *_table(of_task), "", *_controls(of_task)]
    judged = [record for record in records if record.within_band is not None]
    outside = [record for record in judged if not record.within_band]
    sections += ["## Outside their bands", "", f"{len(outside)} of {len(judged)} trials that have a band."]
    sections += ["", *(f"- {_describe(record)}" for record in outside)]
    return "\n".join(sections).rstrip() + "\n"


INTRODUCTION = f"""\
{WORKERS} workers in one process, each with batches of its own; SGD with momentum {MOMENTUM} and AdamW on the mean; made
with `python benchmarks/convergence.py`. Numbers are final losses over the dense one, minus 1. *EF* is error feedback
around every compressor, also around those that refuse it. ✓ is within the band for its class, ✗ outside; a number
without a mark has no band: it is measured, not judged.
"""


def _table(records: Sequence[Record]) -> list[str]:
    dense = {record.optimizer: record.dense_loss for record in records}
    columns = [(optimizer, feedback) for optimizer in OPTIMIZERS for feedback in (False, True)]
    lines = ["Dense loss: " + ", ".join(f"{loss:.4f} with {name}" for name, loss in dense.items()) + ".", ""]
    heads = [f"{optimizer}{' + EF' if feedback else ''}" for optimizer, feedback in columns]
    lines += ["| compressor | bits a value | " + " | ".join(heads) + " |", "|---|--:|" + "--:|" * len(columns)]
    cells: dict[str, dict[tuple[str, bool], list[Record]]] = {}
    for record in records:
        if record.bits_per_value is not None:
            cell = cells.setdefault(record.method, {}).setdefault((record.optimizer, record.feedback), [])
            cell.append(record)
    for method, found in cells.items():
        bits = next(iter(found.values()))[0].bits_per_value
        row = [_cell(found.get(column, [])) for column in columns]
        lines.append(f"| {method} | {bits:.3g} | " + " | ".join(row) + " |")
    return lines


def _controls(records: Sequence[Record]) -> list[str]:
    controls = [record for record in records if record.method in CONTROLS]
    if not controls:
        return []
    lines = ["| negative control (SGD) | expected | excess |", "|---|--:|--:|"]
    for name in dict.fromkeys(record.method for record in controls):
        found = [record for record in controls if record.method == name]
        lines.append(f"| {name} | {_band(found[0])} | {_cell(found)} |")
    return [*lines, ""]


def _cell(records: Sequence[Record]) -> str:
    if not records:
        return "–"
    verdicts = [record.within_band for record in records if record.within_band is not None]
    mark = "" if not verdicts else " ✓" if all(verdicts) else " ✗"
    excesses = [record.excess for record in records if record.excess is not None]
    if len(excesses) < len(records):
        return "diverges" + mark
    return _percent(sum(excesses) / len(excesses)) + mark


def _percent(excess: float) -> str:
    return f"{excess:+.2%}" if abs(excess) < 0.1 else f"{excess:+.0%}" if excess < 10 else f"× {excess + 1:.3g}"


def _band(record: Record) -> str:
    assert record.low is not None, "asked only where there is a band"
    return str(Band(record.low, math.inf if record.high is None else record.high))


def _describe(record: Record) -> str:
    feedback = " with error feedback" if record.feedback else ""
    came = "diverges" if record.excess is None else _percent(record.excess)
    return f"{record.task}, {record.optimizer}: {record.method}{feedback} {came}, expected {_band(record)}"


def main() -> None:
    arguments = parse_arguments()
    if arguments.render:
        found = [Record(**entry) for entry in json.loads(arguments.render.read_text())]
    else:
        planned = trials(arguments.task, [str(compressor) for compressor in arguments.compressors], arguments.seeds)
        found = collect(planned, arguments.jobs)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(record) for record in found], indent=1) + "\n")
    text = report(found)
    if arguments.report:
        arguments.report.write_text(text)
    Console().print(Markdown(text))


def collect(planned: Sequence[Trial], jobs: int) -> list[Record]:
    """Run the trials and judge them, in the order planned."""
    ended: dict[Trial, tuple[float, float]] = {}
    for trial, loss, seconds in run_trials(planned, jobs):
        ended[trial] = loss, seconds
        show_progress(f"{len(ended)} of {len(planned)}: {trial.task} {trial.optimizer} {trial.method}: {loss:.4f}")
    show_progress("")
    dense = {(t.task, t.optimizer, t.seed): loss for t, (loss, _) in ended.items() if t.method == DENSE}
    return [
        record(trial, ended[trial][0], dense[trial.task, trial.optimizer, trial.seed], ended[trial][1])
        for trial in planned
        if trial.method != DENSE
    ]


def show_progress(note: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{note}", end="", file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train small models with every compressor and compare the loss.")
    parser.add_argument("--task", action="append", choices=TASKS, help="only this one; may be given again")
    parser.add_argument("--compressors", metavar="TEXT", help="only these, separated by semicolons: 'int8;topk(0.01)'")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes of one thread (default all cores)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the page here, as Markdown")
    parser.add_argument("--render", type=Path, metavar="FILE", help="train nothing, take the records of this file")
    arguments = parser.parse_args()
    arguments.task = arguments.task or list(TASKS)
    given = arguments.compressors
    arguments.compressors = [parse_compressor(text) for text in given.split(";")] if given else examples()
    return arguments


if __name__ == "__main__":
    main()
