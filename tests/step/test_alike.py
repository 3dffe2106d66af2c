"""Replicas stay alike: what one rank alone loads, changes or schedules is shared, or refused by name on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import cross_entropy
from ranks import run_ranks
from small_step import batch
from torch import nn

import fxcomp

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "dampened SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
}


def kept_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    kept = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in kept]


def trained(name: str, loads: list[int]) -> tuple[list[Any], list[float], list[str]]:
    """Train with state that some ranks have loaded, which is rank 0's; the others have none, or their own."""
    torch.manual_seed(0)
    model = nn.Linear(20, 10)
    optimizer = OPTIMIZERS[name](model.parameters())
    if dist.get_rank() in loads:
        torch.manual_seed(1)
        other = nn.Linear(20, 10)
        before = OPTIMIZERS[name](other.parameters())
        for number in range(2):
            before.zero_grad()
            other(torch.full((6, 20), 0.1 * number)).square().sum().backward()
            before.step()
        optimizer.load_state_dict(before.state_dict())
    step = fxcomp.compile_step(model, cross_entropy, optimizer, batch(), plan="dense", verify_every=1)
    for number in range(3):
        step(batch(number))
    notes = [note for note in step.notes if "optimizer's state" in note]
    return kept_of(optimizer), nn.utils.parameters_to_vector(model.parameters()).tolist(), notes


def all_trained() -> dict[str, list[Any]]:
    return {
        name: [trained(name, loads) for loads in ([0, 1], [0], [1], [])]  # type: ignore[misc]
        for name in OPTIMIZERS
    }


@pytest.fixture(scope="module")
def loaded() -> list[dict[str, list[Any]]]:
    return run_ranks(2, all_trained)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_one_rank_has_loaded_is_rank_0s_on_all(loaded: list[dict[str, list[Any]]], name: str):
    first, second = (rank[name] for rank in loaded)
    on_both, on_first, on_second, on_none = range(4)
    for case in range(4):
        assert first[case] == second[case]
    assert first[on_first][:2] == first[on_both][:2]
    assert first[on_second][:2] == first[on_none][:2]
    assert first[on_both][:2] != first[on_none][:2]
    assert [bool(case[2]) for case in first] == [False, True, True, False]
    assert "it was another one on rank 1" in first[on_first][2][0]
