"""A program serves batches of other sizes only where it does what eager would, in whatever order sizes come."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from helpers.followed import count_captures
from helpers.gathered import gathered
from helpers.jobs import JOBS, cross_entropy
from torch import Tensor, nn

import fxcomp

pytestmark = pytest.mark.filterwarnings("ignore:fxcomp. the shape of batch:UserWarning")

FEATURES = 4
SIZES = (0, 1, 2, 3, 5, 8, FEATURES)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, FEATURES))


def squares(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().sum()


def as_eager(
    batches: Iterable[Any], loss: Any = squares, model: nn.Module | None = None, **options: Any
) -> fxcomp.CompiledStep:
    """Train on batches, compiled and eager: the same losses, results and parameters, bit for bit."""
    model = model or small()
    reference, every = copy.deepcopy(model), options.get("accumulate", 1)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference))
    batches = list(batches)
    step = fxcomp.compile_step(model, loss, ours, batches[0], **gathered(verify="never", **options))
    for i, batch in enumerate(batches):
        got, wanted = step(batch), loss(reference, batch)
        for value, expected in zip(_flat(got), _flat(wanted), strict=True):
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected)), f"batch {i}"
        (_flat(wanted)[0] / every).backward()
        if (i + 1) % every == 0:
            theirs.step()
            theirs.zero_grad()
        for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(a, b), f"{name} after batch {i}"
    return step


def _flat(result: Any) -> list[Any]:
    return [result[0], *result[1]] if isinstance(result, tuple) else [result]


def rows(*lengths: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(length, FEATURES) for length in lengths]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("special", "accumulate"), [(0, 1), (1, 2)])
def test_a_batch_of_one_row_or_none_serves_itself_alone(special: int, accumulate: int):
    step = as_eager(rows(5, 6, special, 128, 3, special, 2, 9), accumulate=accumulate)
    assert len(step.in_force.programs) == 4, "three as they are, one for all others"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("special", [0, 1])
def test_a_few_boxes_beside_fixed_images(special: int):
    def both(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return squares(model, batch["images"]) + model(batch["boxes"]).abs().sum()

    images = rows(8, 8, 8, 8, 8, 8, 8)
    boxes = rows(3, 2, special, 5, 8, 7, special)
    step = as_eager([{"images": x, "boxes": y} for x, y in zip(images, boxes, strict=True)], both)
    assert len(step.in_force.programs) == 4


def test_a_sequence_of_one_word():
    job = JOBS["transformer"]
    as_eager([job.batch(i, length=n) for i, n in enumerate((5, 6, 1, 16, 2))], cross_entropy, job.build())


def test_results_beside_the_loss_follow_sizes():
    def told(model: nn.Module, batch: Tensor) -> Any:
        predicted = model(batch)
        return predicted.square().sum(), (batch.shape[0], 2 * batch.shape[0] + 1, predicted.detach(), len(batch))

    step = as_eager(rows(5, 6, 1, 128, 0, 3), told)
    assert len(step.in_force.programs) == 6, "its length is a number"


def test_numbers_beside_the_loss_that_follow_from_sizes_are_results():
    def told(model: nn.Module, batch: Tensor) -> Any:
        return model(batch).square().sum(), (batch.shape[0], 2 * batch.shape[0] + 1, batch.shape[1])

    step = as_eager(rows(5, 6, 7, 128, 3), told)
    assert len(step.in_force.programs) == 3


def test_a_loss_that_asks_for_one_row_takes_its_own_branch():
    def asks(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() if batch.shape[0] == 1 else squares(model, batch)

    as_eager(rows(5, 6, 1, 128, 1, 2), asks)


def test_two_sizes_that_were_equal_once_may_differ():
    def two(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(model, batch[0]) + model(batch[1]).abs().sum()

    first, second = (5, 6, 4, 7, 2, 3), (6, 5, 4, 2, 7, 3)
    step = as_eager(zip(rows(*first), rows(*second), strict=True), two)
    assert len(step.in_force.programs) == 3, "nothing asks whether they are equal"


def test_a_question_about_two_sizes_is_answered_for_each_batch():
    def asks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        factor = 2 if batch[0].shape[0] == batch[1].shape[0] else 1
        return factor * squares(model, batch[0]) + model(batch[1]).abs().sum()

    first, second = (5, 6, 4, 7, 2, 3, 8), (6, 5, 4, 2, 7, 3, 8)
    step = as_eager(zip(rows(*first), rows(*second), strict=True), asks)
    assert len(step.in_force.programs) == 4, "two as they are, one of equal sizes, one of others"


def test_a_size_that_tracing_made_a_number_is_compared():
    def asks(model: nn.Module, batch: Tensor) -> Tensor:
        return (2 if batch.shape[0] == batch.shape[1] else 1) * squares(model, batch)

    step = as_eager(rows(5, 6, FEATURES, 7, 8, FEATURES, 3), asks)
    assert len(step.in_force.programs) == 4, "square batches have their own; the next one is symbolic"


def test_sizes_that_did_not_vary_so_far_are_compared():
    def sums(model: nn.Module, batch: Tensor) -> Tensor:
        return squares(model, batch.flatten(0, 1)) / batch.shape[1]

    torch.manual_seed(1)
    as_eager([torch.randn(n, m, FEATURES) for n, m in ((5, 3), (6, 3), (7, 3), (8, 2), (8, 3), (9, 1), (2, 9))], sums)


VIEWS: dict[str, Callable[[int], Any]] = {
    "columns": lambda n: torch.randn(n, 7)[:, :FEATURES],
    "columns of the longer": lambda n: torch.randn(n, n + FEATURES)[:, :FEATURES],
    "transposed": lambda n: torch.randn(FEATURES, n).t(),
    "expanded": lambda n: torch.randn(1, FEATURES).expand(n, FEATURES),
    "further on": lambda n: torch.randn(n + 7, FEATURES)[7:],
    "every second": lambda n: torch.randn(2 * n, FEATURES)[::2],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("view", VIEWS)
def test_tensors_that_are_not_contiguous(view: str):
    torch.manual_seed(1)
    as_eager([VIEWS[view](n) for n in (5, 6, 3, FEATURES, 8, 1, 2, 7)])


def test_one_tensor_twice_and_two_of_one_memory():
    def both(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return squares(model, batch[0]) + model(batch[1]).abs().sum()

    as_eager([(x, x) for x in rows(5, 6, 1, 7, 8, 2)], both)
    as_eager([(x, x[:]) for x in rows(5, 6, 1, 7, 8, 2)], both)
    as_eager([(x[:4], x[4:]) for x in rows(5, 6, 8, 7, 12, 9)], both)


class Asking(nn.Module):
    """Looks at sizes in several ways, of two tensors, one of which has two dimensions that vary."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(FEATURES, 6), nn.Linear(6, FEATURES)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        words, boxes = batch["words"], batch["boxes"]
        inner = self.inner(words).relu()
        inner = inner + inner.sum(1, keepdim=True) / max(words.shape[1], 1)
        found = self.outer(inner).flatten(0, 1)[1:]
        near = self.outer(self.inner(boxes)[: boxes.shape[0] // 2])
        factor = 2 if words.shape[1] == boxes.shape[0] else 1
        if boxes.shape[0] == FEATURES:
            near = near + boxes[::2]
        total = found.square().sum() * factor + near.abs().sum() * (1 + words.shape[0])
        return total / (1 + words.numel()), (words.shape[0] * words.shape[1], near.detach(), boxes.shape[0] == 1)


def asked(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 8))])
@pytest.mark.one_in(2)
def test_whatever_the_order_of_sizes_and_each_dimension_apart(seed: int):
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    orders = [[*drawn.sample(SIZES, 5), *drawn.choices(SIZES, k=5)] for _ in range(3)]
    fixed = drawn.randrange(4)  # one dimension may stay what it was
    lengths = [[3] * len(order) if i == fixed else order for i, order in enumerate(orders)]
    batches = [
        {"words": torch.randn(n, m, FEATURES), "boxes": torch.randn(k, FEATURES)}
        for n, m, k in zip(*lengths, strict=True)
    ]
    as_eager(batches, asked, Asking())


def by_type(rows: Tensor) -> int:
    return 2 if isinstance(rows.shape[0], int) else 1


def by_text(rows: Tensor) -> int:
    return 2 if str(rows.shape[0]).isdigit() else 1


def by_type_and_length(rows: Tensor) -> int:
    return by_type(rows) * len(rows)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("asks", "programs"), [(by_type, 3), (by_text, 4), (by_type_and_length, 4)])
def test_python_sees_numbers_where_a_symbol_has_another_type_or_text(asks: Callable[[Tensor], int], programs: int):
    step = as_eager(rows(5, 6, 7, 8), lambda model, batch: asks(batch) * squares(model, batch))
    assert len(step.in_force.programs) == programs


def test_what_cannot_be_traced_with_symbols_is_tried_a_few_times_and_then_captured_for_each_size():
    def picks(model: nn.Module, batch: Tensor) -> Tensor:
        return {5: 2, 6: 3}.get(batch.shape[0], 1) * squares(model, batch)  # a symbol has no hash

    model, lengths = small(), (5, 6, 7, 8, 9, 10)
    step = as_eager(rows(*lengths), picks, model)
    assert len(step.in_force.programs) == len(lengths)
    built = count_captures(step)
    for batch in rows(11, 12):
        step(batch)
    assert len(built) == 2
