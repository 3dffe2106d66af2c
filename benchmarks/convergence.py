"""Train small models with every compressor, with and without error feedback, and compare the loss with dense training.

    python benchmarks/convergence.py --json convergence.json --report report.md

Workers live in one process. Each has its own batches, residual and state; rounds of `fxcomp.testing` replace the
network, and optimizers receive the mean. Every compressor runs with and without error feedback, even if it refuses or
requires it, to measure why. Pairs of compressors run in two shots with four and with eight workers. Negative controls
have a planted mistake and must fail.

*Excess* is final loss / dense loss - 1. Bands are the expected excess of a class of compressors on a task; trials
without a band are not judged. All results follow from the seed. Takes 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from convergence_page import report
from exchanges import (
    MOMENTUM,
    Exchange,
    OwnerResidual,
    compressed,
    exact_mean,
    fitted,
    in_two_shots,
    parse_pair,
)
from planted_mistakes import CONTROLS
from records import Records, options, read, show_progress
from rich.console import Console
from rich.markdown import Markdown
from tasks import ALL_TASKS, TASKS, WORKERS, Task, make_task
from trials import DENSE, OPTIMIZERS, Band, Record, Trial

from fxcomp.compressors import Compressor, Feedback, parse_compressor
from fxcomp.compressors.examples import bits_per_value, examples
from fxcomp.testing import average, replicas_of
from fxcomp.testing.samples import gaussian

PAIRS = ("int8 > int8", "int4 > int4", "int4 > int8", "sign > sign", "topk(0.01) > topk(0.01)", "topk(0.01) > int8")
PAIRED_WORKERS = (4, 8)
OWNERS = dict.fromkeys(TASKS, (OwnerResidual.KEPT, OwnerResidual.DROPPED)) | {"quadratic": tuple(OwnerResidual)}
"""Treatments of the owner's residual in two shots, by task."""


def train(task: Task, optimizer: str, exchange: Exchange) -> float:
    """Return the final loss, infinite if training diverges. The learning rate follows a cosine to zero."""
    weights = torch.nn.Parameter(task.start.clone())
    rate = task.rates[optimizer]
    update: torch.optim.Optimizer
    if optimizer == "sgd":
        update = torch.optim.SGD([weights], lr=rate, momentum=MOMENTUM)
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


# Expected results

SHAPE = 1024, 1024
"""Shape of the parameter for counting payload bits."""
SAMPLE_SHAPE = 512, 256
SAMPLE = math.prod(SAMPLE_SHAPE)
"""Values for measuring errors."""

LOSSLESS, SMALL = 1e-3, 0.1  # largest ω of these classes, on Gaussian values
TOO_LATE = 0.98  # a value waits about 1 / (1 - ω) steps; from 50 steps on the loss must rise
TOLERANCES = {  # by task: lossless, small errors, error feedback
    "quadratic": (0.005, 0.005, 1.0),
    "logreg": (0.002, 0.01, 0.005),
    "charlm": (0.015, 0.02, 0.13),
    "images": (0.15, 0.2, 0.8),
}
LOST_BY_OWNER = {  # by task and second compressor; losses of int4 and int8 are too small to show
    ("quadratic", "sign"): Band(9.0, math.inf),
    ("quadratic", "topk(0.01)"): Band(9.0, math.inf),
}
WITHOUT_FEEDBACK = {"topk(0.01)": Band(0.25, math.inf), "sign": Band(0.2, math.inf)}  # on logreg and charlm


def expected(trial: Trial) -> Band | None:
    if trial.method in CONTROLS:
        return CONTROLS[trial.method][1].get(trial.task)
    if trial.owner is not None:
        return _expected_in_two_shots(trial)
    compressor = parse_compressor(trial.method)
    lossless, small, fed_back = TOLERANCES[trial.task]
    omega = measured_error(compressor)
    if omega < LOSSLESS:
        return Band(-lossless, lossless)
    if trial.optimizer != "sgd":
        return None  # feedback arrives late and inflates Adam's variance
    if omega < SMALL:
        return Band(-small, small)
    if not trial.feedback:
        return WITHOUT_FEEDBACK.get(trial.method) if trial.task != "images" else None
    if compressor.feedback is not Feedback.REQUIRED:
        return None
    return Band(-fed_back, fed_back) if omega < TOO_LATE else Band(0.25, math.inf)


def _expected_in_two_shots(trial: Trial) -> Band | None:
    """Return the coarser compressor's band if the residual is kept; otherwise the band of a mistake."""
    pair = parse_pair(trial.method)
    if trial.owner != OwnerResidual.KEPT.value:
        return LOST_BY_OWNER.get((trial.task, str(pair.second)))
    lossless, small, fed_back = TOLERANCES[trial.task]
    omega = max(measured_error(pair.first), measured_error(pair.second))
    if omega < LOSSLESS:
        return Band(-lossless, lossless)
    if trial.optimizer != "sgd":
        return None
    return Band(-small, small) if omega < SMALL else Band(-fed_back, fed_back)


@cache
def measured_error(compressor: Compressor) -> float:
    """Return ω of the workers' mean if all have the same Gaussian values."""
    bound, segments, values = compressor.bound_to([SAMPLE_SHAPE], WORKERS), (SAMPLE,), gaussian(SAMPLE)
    replicas = replicas_of(bound, segments, WORKERS, feedback=False)
    lost = values - average(bound, [values] * WORKERS, replicas, segments, [SAMPLE_SHAPE])
    return (lost.double().square().sum() / values.double().square().sum()).item()


# Running trials


def trials(tasks: Sequence[str], compressors: Sequence[str], pairs: Sequence[str], seeds: int) -> list[Trial]:
    found: list[Trial] = []
    for seed in range(seeds):
        for task in tasks:
            if task in TASKS:
                found += _in_one_shot(task, compressors, seed)
            if pairs:
                found += _in_two_shots(task, pairs, seed)
    return list(dict.fromkeys(found))


def _in_one_shot(task: str, compressors: Sequence[str], seed: int) -> Iterable[Trial]:
    for optimizer in OPTIMIZERS:
        yield Trial(task, optimizer, DENSE, seed=seed)
        for method in compressors:
            yield from (Trial(task, optimizer, method, feedback, seed) for feedback in (False, True))
    yield from (Trial(task, "sgd", name, seed=seed) for name, (_, bands) in CONTROLS.items() if task in bands)


def _in_two_shots(task: str, pairs: Sequence[str], seed: int) -> Iterable[Trial]:
    for workers in PAIRED_WORKERS:
        yield Trial(task, "sgd", DENSE, seed=seed, workers=workers)
        for pair in pairs:
            for owner in OWNERS[task]:
                yield Trial(task, "sgd", pair, True, seed, workers, owner.value)
    if task in TASKS:
        yield Trial(task, "adamw", DENSE, seed=seed)
        yield from (Trial(task, "adamw", pair, True, seed, WORKERS, OwnerResidual.KEPT.value) for pair in pairs)


def run_trial(trial: Trial) -> tuple[Trial, float, float]:
    task = make_task(trial.task, trial.seed, trial.workers)
    start = time.perf_counter()
    return trial, train(task, trial.optimizer, _exchange_of(trial, task)), time.perf_counter() - start


def _exchange_of(trial: Trial, task: Task) -> Exchange:
    if trial.method == DENSE:
        return exact_mean
    if trial.method in CONTROLS:
        return CONTROLS[trial.method][0](task)
    if trial.owner is not None:
        return in_two_shots(parse_pair(trial.method), task, OwnerResidual(trial.owner), trial.seed)
    compressor = fitted(parse_compressor(trial.method), task)
    return compressed(compressor, task.shapes, task.workers, feedback=trial.feedback, seed=trial.seed)


def run_trials(planned: Sequence[Trial], jobs: int) -> Iterable[tuple[Trial, float, float]]:
    """Run trials in `jobs` single-threaded processes; yield each result as it ends."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(run_trial, trial) for trial in planned]):
            yield future.result()


def record(trial: Trial, loss: float, dense_loss: float, seconds: float) -> Record:
    excess, band = loss / dense_loss - 1, expected(trial)
    return Record(
        **asdict(trial),
        loss=_finite(loss),
        dense_loss=dense_loss,
        excess=_finite(excess),
        low=band.low if band else None,
        high=_finite(band.high) if band else None,
        within_band=excess in band if band else None,
        bits_per_value=_bits_of(trial),
        seconds=round(seconds, 2),
    )


def _bits_of(trial: Trial) -> float | None:
    """Return payload bits per value, summed over two shots. Ranks send (workers - 1) / workers of the two-shot sum."""
    if trial.method in CONTROLS:
        return None
    if trial.owner is None:
        return bits_per_value(parse_compressor(trial.method), SHAPE)
    pair = parse_pair(trial.method)
    return bits_per_value(pair.first, SHAPE) + bits_per_value(pair.second, SHAPE)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> None:
    arguments = parse_arguments()
    if arguments.render:
        found = [Record(**entry) for entry in read(arguments.render)]
    else:
        methods = [str(compressor) for compressor in arguments.compressors]
        planned = trials(arguments.task, methods, arguments.pairs, arguments.seeds)
        found = collect(planned, arguments)
    text = report(found)
    if arguments.report:
        arguments.report.write_text(text)
    Console().print(Markdown(text))


def collect(planned: Sequence[Trial], arguments: argparse.Namespace) -> list[Record]:
    ended: dict[Trial, tuple[float, float]] = {}
    for trial, loss, seconds in run_trials(planned, arguments.jobs):
        ended[trial] = loss, seconds
        Records(arguments.json).add(*judged(planned, ended))
        show_progress(f"{len(ended)} of {len(planned)}: {trial.task} {trial.optimizer} {trial.method}: {loss:.4f}")
    show_progress("")
    return judged(planned, ended)


def judged(planned: Sequence[Trial], ended: Mapping[Trial, tuple[float, float]]) -> list[Record]:
    dense = {(t.task, t.optimizer, t.seed, t.workers): loss for t, (loss, _) in ended.items() if t.method == DENSE}
    return [
        record(trial, ended[trial][0], dense[key], ended[trial][1])
        for trial in planned
        if trial.method != DENSE
        and trial in ended
        and (key := (trial.task, trial.optimizer, trial.seed, trial.workers)) in dense
    ]


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--task", action="append", choices=ALL_TASKS, help="only this one; may be given again")
    parser.add_argument("--compressors", metavar="TEXT", help="only these, separated by semicolons: 'int8;topk(0.01)'")
    parser.add_argument("--pairs", metavar="TEXT", help="only these in two shots: 'int4 > int8;sign > sign'")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes of one thread (default all cores)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the page here, as Markdown")
    parser.add_argument("--render", type=Path, metavar="FILE", help="train nothing, take the records of this file")
    arguments = parser.parse_args()
    arguments.task = arguments.task or list(ALL_TASKS)
    given, pairs = arguments.compressors, arguments.pairs
    arguments.compressors = examples() if given is None else [parse_compressor(text) for text in _listed(given)]
    arguments.pairs = PAIRS if pairs is None else [str(parse_pair(text)) for text in _listed(pairs)]
    return arguments


def _listed(text: str) -> list[str]:
    return [part for part in text.split(";") if part.strip()]


if __name__ == "__main__":
    main()
