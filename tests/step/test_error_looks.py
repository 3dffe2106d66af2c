"""A running step takes looks at its gradients, at the same steps on all ranks, and trains as it would without them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import table as costs
from helpers.gathered import gathered
from helpers.jobs import JOBS, OPTIMIZERS, Job, cross_entropy
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor, nn

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import ASSUMED
from fxcomp.error_tables.table import COLUMNS
from fxcomp.step import calendar
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.errors import error_looks
from fxcomp.step.errors.look import ErrorLook
from fxcomp.step.race import LONGEST

EVERY = 5


@contextmanager
def often() -> Generator[None]:
    """Let looks take what they like: one is due every five steps, the first one in step 5."""
    limits = {"LOOKS_SHARE": 1e9, "LOOKS": EVERY, "FIRST": EVERY}
    with patch.multiple(error_looks, **limits), patch.object(calendar, "SETTLED", EVERY):
        yield


def compiled(job: Job, *, looks: bool = True, loss: Any = cross_entropy, **options: Any) -> CompiledStep:
    torch.manual_seed(dist.get_rank())
    model = job.build()
    given: dict[str, Any] = {"verify": "never", "race": "off", "plan": "topk(0.1)", **options}
    batch = job.batch(0, dist.get_rank())
    step = fxcomp.compile_step(model, loss, OPTIMIZERS["sgd"](model.parameters()), batch, **gathered(**given))
    if looks:
        step.watch_errors()
    return step


def measured_at(step: CompiledStep, steps: int, batch: Callable[[int], Any]) -> list[int]:
    """Train, and list the steps in which looks were measured."""
    at: list[int] = []
    with often():
        for number in range(steps):
            before = step.errors.looks if step.errors is not None else 0
            step(batch(number))
            if step.errors is not None and step.errors.looks > before:
                at.append(number)
    return at


def both_ways() -> dict[str, Any]:
    job = JOBS["dropout"]
    found: dict[str, Any] = {}
    for looks in (True, False):
        with often():
            step = compiled(job, looks=looks)
        found[f"at, {looks}"] = measured_at(step, 50, lambda number: job.batch(number, dist.get_rank()))
        found[f"parameters, {looks}"] = replica_fingerprint(step.training.model)
        found[f"table, {looks}"] = step.error_table
        found[f"timed, {looks}"] = len(step.times.step_ms)
    return found


def test_looks_are_taken_together_and_change_nothing_in_training():
    one, other = run_ranks(2, both_ways)
    assert one == other
    assert one["at, True"] == list(range(EVERY, 50, EVERY))
    assert not one["at, False"]
    assert one["parameters, True"] == one["parameters, False"]
    assert one["timed, True"] == 50 - len(one["at, True"]), "no step with a look is timed"
    assert one["table, False"] == ASSUMED
    table = one["table, True"]
    for name, row in table.rows.items():
        assert row.samples == 3, "nine looks are at three families in turn"
        assert len(row.errors) == len(COLUMNS)
        assert 0 < table.error_of(name, parse_compressor("topk(0.01)")) < 1


def dropped() -> dict[str, Any]:
    found: dict[str, Any] = {}
    job, rank = JOBS["transformer"], dist.get_rank()
    with often():
        step = compiled(job)
    short = 10 if rank == 1 else -1
    found["other batches on one rank"] = measured_at(
        step, 22, lambda number: job.batch(number, rank, 7 if number == short else None)
    )
    with often():
        step = compiled(JOBS["mlp"], verify=10)
    found["verified"] = measured_at(step, 22, lambda number: JOBS["mlp"].batch(number, rank))
    return found


def test_looks_are_dropped_at_other_batches_and_put_off_where_steps_are_verified():
    one, other = run_ranks(2, dropped)
    assert one == other
    assert one == {
        "other batches on one rank": [5, 17],
        "verified": [5, 11, 16, 21],
    }  # a refused one shifts those after it


def racing() -> tuple[list[int], tuple[int, int]]:
    job = JOBS["mlp"]
    with often():
        step = compiled(job, race="auto", plan=None, costs=costs(0.8))
    at = measured_at(step, LONGEST + 20, lambda number: job.batch(number, dist.get_rank()))
    assert step.raced is not None
    return at, (step.raced.first_step, step.raced.last_step)


def test_no_look_is_taken_while_plans_race():
    (at, (first, last)), other = run_ranks(2, racing)
    assert other[0] == at
    assert at
    assert first < last
    assert min(at) >= last + EVERY


class Beside(nn.Sequential):
    """An mlp, and a parameter whose gradient is the sum of the batch: infinite where that is."""

    def __init__(self) -> None:
        super().__init__(*JOBS["mlp"].build())
        self.register_parameter("beside", nn.Parameter(torch.zeros(8)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.children()):
            x = layer(x)
        return x


def left_out(rank: int | None) -> tuple[int, dict[str, float], int, bool]:
    """Gradients are infinite in the steps of the first looks: all of them, or one of one rank alone.

    Gradients are followed, too, to where they are freed.
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = batch
        finite = inputs if rank is None else inputs.nan_to_num(posinf=1.0, neginf=-1.0)
        return cross_entropy(model, (finite, target)) + (model.beside * inputs.sum()).sum()

    job, kept = replace(JOBS["mlp"], model=Beside), list[weakref.ref[Tensor]]()
    see = ErrorLook.see

    def followed(look: ErrorLook, name: str, gradient: Tensor, start: int = 0) -> None:
        kept.append(weakref.ref(gradient))
        see(look, name, gradient, start)

    def batch(number: int) -> Any:
        inputs, target = job.batch(number, dist.get_rank())
        is_infinite = number in {10, 15, 20} and rank in (None, dist.get_rank())
        return (inputs * float("inf") if is_infinite else inputs), target

    with often():
        step = compiled(job, skip_nonfinite=True, loss=loss)
    with patch.object(ErrorLook, "see", followed):
        at = measured_at(step, 24, batch)
        skipped = step.skipped_steps
        before = step.error_table.is_measured
        measured_at(step, 20, lambda number: job.batch(number, dist.get_rank()))
    squares = {name: row.squares for name, row in step.error_table.rows.items()}
    assert at
    assert not before
    assert all(each() is None for each in kept)
    return skipped, squares, len(kept), step.error_table.is_measured


@pytest.mark.parametrize("rank", [None, 0])
def test_a_step_that_is_left_out_is_none_to_look_at_and_memory_is_given_back(rank: int | None):
    one, other = run_ranks(2, left_out, rank)
    assert one == other
    skipped, squares, kept, is_measured = one
    assert skipped == 3
    assert is_measured
    assert kept >= 7 * len(squares) > 0
    assert sum(squares.values()) == pytest.approx(1)


def resumed() -> dict[str, Any]:
    """A job is saved when everything is measured, and another one goes on from that."""
    job, rank = JOBS["mlp"], dist.get_rank()
    with often():
        step = compiled(job)
        at = measured_at(step, 20, lambda number: job.batch(number, rank))
        again = compiled(job)
        again.load_state_dict(step.state_dict())
        loaded = again.error_table.is_measured
    later = measured_at(again, 17, lambda number: job.batch(20 + number, rank))
    return {
        "at": at,
        "loaded": loaded,
        "later": later,
        "measured": again.error_table.is_measured,
        "said": [each.counted_notes[-1] for each in (step, again)],
    }


def test_a_job_that_goes_on_from_a_state_looks_again_at_the_same_steps_on_all_ranks():
    one, other = run_ranks(2, resumed)
    assert one == other
    assert (one["loaded"], one["measured"]) == (False, True)
    assert one["later"] == [EVERY, 2 * EVERY, 3 * EVERY]
    for said, looks in zip(one["said"], (one["at"], one["later"]), strict=True):
        assert said.startswith(f"errors are measured: {len(looks)} looks at gradients took")
