"""Compressors train a small model to the loss that their class promises, and planted mistakes are seen.

The rest of `benchmarks/convergence.py`: larger models, Adam, and error feedback where it is not wanted.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from convergence import (
    OWNERS,
    PAIRED_WORKERS,
    PAIRS,
    expected,
    measured_error,
    record,
    run_trial,
    train,
    trials,
)
from convergence_page import report
from exchanges import Exchange, OwnerResidual, Pair, compressed, exact_mean, parse_pair
from planted_mistakes import CONTROLS, short_places
from tasks import ALL_TASKS, TASKS, WORKERS, Task
from torch import Tensor
from trials import DENSE, Record, Trial

from fxcomp.compressors import Compressor, Int4, Int8, Sign, TopK
from fxcomp.compressors.examples import examples


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def dense_loss() -> float:
    return run_trial(Trial("logreg", "sgd", DENSE))[1]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("compressor", examples(), ids=str)
def test_a_compressor_used_as_it_asks_trains_to_its_band(compressor: Compressor, dense_loss: float) -> None:
    trial = Trial("logreg", "sgd", str(compressor), feedback=compressor.needs_error_feedback)
    _, loss, _ = run_trial(trial)
    band = expected(trial)
    assert math.isfinite(loss)
    assert band is None or loss / dense_loss - 1 in band


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["sign", "topk(0.01)"])
def test_what_needs_error_feedback_is_lost_without(method: str, dense_loss: float) -> None:
    trial = Trial("logreg", "sgd", method, feedback=False)
    band = expected(trial)
    assert band is not None
    assert band.low >= 0.2
    assert run_trial(trial)[1] / dense_loss - 1 in band


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [name for name, (_, bands) in CONTROLS.items() if "logreg" in bands])
def test_a_planted_mistake_shows_in_the_loss(name: str, dense_loss: float) -> None:
    trial = Trial("logreg", "sgd", name)
    band = expected(trial)
    assert band is not None
    assert run_trial(trial)[1] / dense_loss - 1 in band


def bowl(size: int) -> Task:
    """Each worker is pulled to a place of its own; all together to their mean, where the loss is 0."""
    random = torch.Generator().manual_seed(0)
    targets = torch.randn(WORKERS, size, generator=random)
    goal = targets.mean(dim=0)

    def gradients(weights: Tensor, step: int) -> list[Tensor]:  # noqa: ARG001
        return [weights - target for target in targets]

    def loss(weights: Tensor) -> float:
        return (weights - goal).square().mean().item()

    return Task("bowl", ((size,),), torch.zeros(size), 400, {"sgd": 0.01}, gradients, loss)


@pytest.mark.slow
def test_places_cut_to_16_bits_show_above_65536_values_only() -> None:
    right: Callable[[Task], Exchange] = lambda task: compressed(  # noqa: E731
        TopK(0.01), task.shapes, task.workers, feedback=True
    )
    small, large = bowl(60_000), bowl(100_000)
    assert train(small, "sgd", short_places(small)) == train(small, "sgd", right(small)) < 0.02
    assert train(large, "sgd", right(large)) < 0.02
    assert train(large, "sgd", short_places(large)) > 0.15


def test_tasks_are_the_same_every_time_and_start_far_from_their_end() -> None:
    for make in ALL_TASKS.values():
        one, two = make(0), make(0)
        assert torch.equal(one.start, two.start)
        assert one.start.numel() == sum(one.segments)
        for a, b in zip(one.gradients(one.start, 3), two.gradients(two.start, 3), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(one.gradients(one.start, 0)[0], one.gradients(one.start, 0)[1])
        assert not torch.equal(one.start, make(1).start) or one.name in ("logreg", "quadratic")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TASKS)
def test_the_gradients_are_those_of_the_loss(name: str) -> None:
    """One small step against the mean of many batches' gradients lowers the loss by the gradient's squared norm."""
    task = TASKS[name](0)
    mean = exact_mean([exact_mean(task.gradients(task.start, step)) for step in range(60)])
    rate = 1e-2 * task.loss(task.start) / mean.square().sum().item()
    fall = (task.loss(task.start) - task.loss(task.start - rate * mean)) / rate
    assert fall == pytest.approx(mean.square().sum().item(), rel=0.2)


def test_every_compressor_is_tried_both_ways_on_every_task() -> None:
    methods = [str(compressor) for compressor in examples()]
    planned = trials(list(TASKS), methods, (), seeds=1)
    for method in methods:
        own = {(t.task, t.optimizer, t.feedback) for t in planned if t.method == method}
        assert own == {(task, name, fed) for task in TASKS for name in ("sgd", "adamw") for fed in (False, True)}
    assert {trial.method for trial in planned} == {DENSE, *methods, *CONTROLS}


def test_every_pair_is_tried_with_and_without_mistakes_on_four_and_on_eight_workers() -> None:
    planned = trials(list(ALL_TASKS), [], PAIRS, seeds=1)
    assert len(planned) == len(set(planned))
    for pair in PAIRS:
        own = {(t.task, t.workers, t.owner) for t in planned if t.method == pair and t.optimizer == "sgd"}
        assert own == {(task, p, o.value) for task in ALL_TASKS for p in PAIRED_WORKERS for o in OWNERS[task]}
        assert {(t.task, t.workers) for t in planned if t.method == DENSE} >= {(task, p) for task, p, _ in own}


def test_a_pair_parses_back_and_cuts_at_the_blocks_of_both() -> None:
    assert [str(parse_pair(pair)) for pair in PAIRS] == list(PAIRS)
    assert Pair(Int4(block=96), Sign(block=64)).grain == 192


@pytest.fixture(scope="module")
def dense_distance() -> float:
    return run_trial(Trial("quadratic", "sgd", DENSE))[1]


def excess_in_two_shots(pair: str, owner: OwnerResidual, dense: float) -> float:
    """The excess on four workers, after checking its band."""
    trial = Trial("quadratic", "sgd", pair, feedback=True, owner=owner.value)
    band, excess = expected(trial), run_trial(trial)[1] / dense - 1
    assert band is not None
    assert excess in band
    return excess


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("pair", "most"),
    [
        ("int4 > int4", 0.005),
        ("sign > sign", 0.1),
        ("topk(0.01) > topk(0.01)", 1.0),
        *(pytest.param(pair, 1.0, marks=pytest.mark.slow) for pair in PAIRS if "int8" in pair),
    ],
)
def test_two_shots_with_both_residuals_train_to_their_band(pair: str, most: float, dense_distance: float) -> None:
    assert excess_in_two_shots(pair, OwnerResidual.KEPT, dense_distance) < most


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("pair", "owner"),
    [
        ("sign > sign", OwnerResidual.DROPPED),
        ("sign > sign", OwnerResidual.MISCOUNTED),
        ("topk(0.01) > topk(0.01)", OwnerResidual.DROPPED),
        pytest.param("topk(0.01) > topk(0.01)", OwnerResidual.MISCOUNTED, marks=pytest.mark.slow),
    ],
)
def test_a_lost_owners_residual_shows_in_the_loss(pair: str, owner: OwnerResidual, dense_distance: float) -> None:
    assert excess_in_two_shots(pair, owner, dense_distance) >= 8


def test_classes_follow_from_the_measured_error() -> None:
    assert measured_error(Int8()) < 1e-3
    assert measured_error(Sign()) == pytest.approx(1 - 2 / math.pi, rel=0.01)


def test_the_page_marks_what_left_its_band() -> None:
    found: list[Record] = [
        record(Trial("logreg", "sgd", "int8"), 0.25025, 0.25, 1.0),
        record(Trial("logreg", "sgd", "int8", feedback=True), 0.26, 0.25, 1.0),
        record(Trial("logreg", "sgd", "topk(0.01)"), math.inf, 0.25, 1.0),
        record(Trial("logreg", "adamw", "sign"), 0.5, 0.25, 1.0),
    ]
    page = report(found)
    assert "| int8 | 8.06 | +0.10% ✓ | +4.00% ✗ | – | – |" in page
    assert "| sign | 1.06 | – | – | +100% | – |" in page
    assert "diverges ✓" in page
    assert "1 of 3 trials that have a band" in page
    assert "- logreg, sgd: int8 with error feedback +4.00%, expected within ±0.2%" in page


def test_the_page_shows_two_shots_beside_their_mistakes() -> None:
    kept = Trial("logreg", "sgd", "int4 > int8", feedback=True, owner=OwnerResidual.KEPT.value)
    lost = Trial("quadratic", "sgd", "sign > sign", feedback=True, workers=8, owner=OwnerResidual.DROPPED.value)
    page = report([record(kept, 0.2505, 0.25, 1.0), record(lost, 0.5, 0.25, 1.0)])
    assert "| pair | bits a value | kept, 4 |" in page
    assert "| int4 > int8 | 12.3 | +0.20% ✓ |" in page
    assert "- quadratic, sgd: sign > sign on 8, the owner's residual dropped, +100%, expected at least" in page
