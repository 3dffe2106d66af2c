"""The real error of a step's plan, from sketches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.step.errors.applied import AppliedError, needed_bytes

SIZES = {"large": 40_000, "small": 700, "one": 1, "none": 0}


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=draw) for name, size in SIZES.items()}


def errors_of(owed: list[dict[str, Tensor]], given: list[dict[str, Tensor]], left: list[dict[str, Tensor]], seed: int):
    """Every rank's sketches, added up as an all_reduce would."""
    ranks = [AppliedError(SIZES, torch.device("cpu"), seed) for _ in given]
    sums: list[Tensor] = []
    for rank, before, gradients in zip(ranks, owed, given, strict=True):
        rank.owes(before)
        for name, value in gradients.items():
            middle = len(value) // 3  # a gradient that is cut
            rank.see(name, value[middle:], middle)
            rank.see(name, value[:middle])
    for rank, after in zip(ranks, left, strict=True):
        rank.applied(after, sums.append)

    def all_reduce(total: Tensor) -> None:
        total.copy_(torch.stack(sums).sum(0))

    summed: Callable[[Tensor], object] = all_reduce
    return [
        {name: each.error for name, each in rank.applied(after, summed).items()}
        for rank, after in zip(ranks, left, strict=True)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_that_of_the_mean_over_ranks(seed: int):
    owed, given = [drawn(10 + r) for r in range(3)], [drawn(20 + r) for r in range(3)]
    left = [{name: 0.5 * value for name, value in drawn(30 + r).items()} for r in range(3)]
    one, *others = errors_of(owed, given, left, seed)
    assert all(other == one for other in others)
    for name in ("large", "small"):
        whole = sum(before[name] + gradient[name] for before, gradient in zip(owed, given, strict=True))
        lost = sum(after[name] for after in left)
        assert isinstance(whole, Tensor)
        assert isinstance(lost, Tensor)
        assert one[name] == pytest.approx(float(lost.square().sum() / whole.square().sum()), rel=0.4)
    assert one["none"] == 0.0


def test_what_is_owed_by_nobody_was_not_lost():
    (found,) = errors_of([{}], [drawn(1)], [{}], 0)
    assert found == dict.fromkeys(SIZES, 0.0)


def test_ranks_that_cancel_each_other_lose_nothing():
    value = drawn(4)
    opposite = {name: -each for name, each in value.items()}
    found, _ = errors_of([{}, {}], [drawn(5), drawn(6)], [value, opposite], 1)
    assert max(found.values()) < 1e-9


def test_a_rank_without_room_tells_the_others_and_no_rank_counts_the_step(monkeypatch: pytest.MonkeyPatch):
    def spare(_: torch.device) -> int:
        return needed_bytes(SIZES) - 1

    with monkeypatch.context() as patched:
        patched.setattr(compat, "spare_bytes", spare)
        short = AppliedError(SIZES, torch.device("cpu"), 0)
    ample = AppliedError(SIZES, torch.device("cpu"), 0)
    assert (short.work.lacks_room, ample.work.lacks_room) == (True, False)
    sums: list[Tensor] = []

    def all_reduce(total: Tensor) -> None:
        total.copy_(sums[0] + sums[1])

    for rank in (short, ample):
        for name, value in drawn(1).items():
            rank.see(name, value)
        rank.applied(drawn(2), sums.append)
        assert rank.is_void == rank.work.lacks_room
    for rank in (short, ample):
        rank.applied(drawn(2), all_reduce)
        assert rank.is_void
