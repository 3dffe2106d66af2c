"""Replicas stay alike: what one rank alone loads, changes or schedules is shared, or refused by name on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.drifting import table
from helpers.gathered import gathered
from helpers.jobs import cross_entropy
from helpers.ranks import run_ranks
from helpers.small_step import batch
from torch import nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

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
    step = fxcomp.compile_step(
        model, cross_entropy, optimizer, batch(), compress="dense", checks=fxcomp.Checks(verify=1)
    )
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
    assert "it differed on rank 1" in first[on_first][2][0]


# Numbers, in every step


def changes(
    change: Callable[[torch.optim.Optimizer], None], ranks: Sequence[int] = (1,), **options: Any
) -> tuple[str, list[str], bool, bool]:
    """Change something on some ranks after two steps.

    Returns the error's class, its text, whether it came at once, and whether ranks have the same parameters.
    """
    torch.manual_seed(0)
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    given = {"plan": "dense", "verify": "never", **options}
    with fxcomp.compile_step(model, cross_entropy, optimizer, batch(), **gathered(**given)) as step:
        for number in range(2):
            step(batch(number))
        before = step.steps
        if dist.get_rank() in ranks:
            change(optimizer)
        try:
            for number in range(3):
                step(batch(number))
        except fxcomp.errors.FxcompError as error:
            mine = nn.utils.parameters_to_vector(model.parameters()).detach()
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            same = all(torch.equal(everyone[0], other) for other in everyone)
            return type(error).__name__, str(error).split("\n"), step.steps == before, same
    return "none", [], False, False


def sets(**options: Any) -> Callable[[torch.optim.Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[0].update(options)


CHANGES: dict[str, tuple[Any, str]] = {
    "lr": (sets(lr=0.05), "rank 1 has lr 0.05 in parameter group 0, rank 0 has 0.1"),
    "decay": (sets(weight_decay=0.1), "rank 1 has weight_decay 0.1 in parameter group 0, rank 0 has 0.01"),
    "momentum": (sets(momentum=0.5), "rank 1 has momentum 0.5 in parameter group 0, rank 0 has 0.9"),
    "an option of the capture": (
        sets(maximize=True),
        "rank 1 has maximize True in parameter group 0, rank 0 has False",
    ),
    "a number that goes": (sets(weight_decay=0.0), "rank 1 has weight_decay 0.0 in parameter group 0, rank 0 has 0.01"),
}

PLANS: dict[str, dict[str, Any]] = {
    "int8": {"plan": "int8"},
    "gathers alone": {"pins": {"*": "int8"}, "plan": None},
    "powersgd": {"plan": "powersgd(2)"},
    "micro-batches": {"accumulate": 2},
}


def all_changes() -> dict[str, Any]:
    found: dict[str, Any] = {name: changes(change) for name, (change, _) in CHANGES.items()}
    return found | {name: changes(CHANGES["lr"][0], **options) for name, options in PLANS.items()}


@pytest.fixture(scope="module")
def changed() -> list[dict[str, Any]]:
    return run_ranks(2, all_changes)


@pytest.mark.parametrize("name", [*CHANGES, *PLANS])
def test_a_number_that_one_rank_changes_alone_is_named_on_all_ranks_before_any_update(changed: Any, name: str):
    text = CHANGES.get(name, CHANGES["lr"])[1]
    for rank in changed:
        error, lines, is_at_once, is_same = rank[name]
        assert error == "ReplicasDiffer", lines
        assert lines[0] == f"{text}: replicas would drift apart."
        assert "averaged over" in lines[1]
        assert is_at_once
        assert is_same


def reordered(optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    for name in list(group):
        group[name] = group.pop(name) if name != "lr" else group["lr"]


EQUAL: dict[str, Any] = {
    "an integer": sets(weight_decay=0, dampening=0),
    "a truth": sets(maximize=0, nesterov=0),
    "NumPy's": sets(dampening=np.float32(0), lr=np.float64(0.1), maximize=np.bool_(False)),
    "minus zero": sets(weight_decay=-0.0),
    "a tensor": sets(lr=torch.tensor(0.1, dtype=torch.float64)),
    "another order": reordered,
}


def begins(change: Callable[[torch.optim.Optimizer], None]) -> None:
    """Change something on rank 1 before the step is compiled, and again after a step."""
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 1:
        change(optimizer)
    with fxcomp.compile_step(model, cross_entropy, optimizer, batch(), **gathered(plan="dense")) as step:
        step(batch())
        if dist.get_rank() == 1:
            change(optimizer)
        step(batch())


def all_equal() -> None:
    for change in EQUAL.values():
        begins(change)


def test_equal_numbers_in_another_form_or_order_are_equal_on_ranks():
    run_ranks(2, all_equal)


def switches_amsgrad_on() -> str:
    model = nn.Linear(20, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with fxcomp.compile_step(model, cross_entropy, optimizer, batch(), **gathered(plan="dense")) as step:
        step(batch())
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(fxcomp.errors.FxcompError) as caught:
            step(batch())
    return str(caught.value)


def test_an_option_without_its_state_is_named_on_all_ranks():
    first, second = run_ranks(2, switches_amsgrad_on)
    assert "rank 1 failed in step 1" in first
    for text in (first, second):
        assert "'max_exp_avg_sq'" in text
    assert "build the optimizer with it" in second


# Values, in the steps that are verified


def adds(name: str, places: tuple[int, ...]) -> Callable[[torch.optim.Optimizer], None]:
    """Change one element of the weight or of its momentum."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        found = weight if name == "weight" else optimizer.state[weight]["momentum_buffer"]
        with torch.no_grad():
            found[places] += 1.0

    return change


def loads_other_state(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    state["state"][1]["momentum_buffer"] = torch.zeros(10)
    optimizer.load_state_dict(state)


VALUES: dict[str, tuple[Any, str]] = {
    "a parameter": (
        adds("weight", (3, 7)),
        r"rank 1 has (\S+) in weight\[3, 7\], rank 0 has (\S+): replicas",
    ),
    "a state": (adds("state", (9, 19)), r"rank 1 has (\S+) in momentum_buffer of weight\[9, 19\], rank 0 has (\S+):"),
    "another state": (loads_other_state, r"rank 1 has (\S+) in momentum_buffer of bias\[0\], rank 0 has (\S+):"),
}


def all_values() -> dict[str, Any]:
    return {name: changes(change, verify=1) for name, (change, _) in VALUES.items()}


@pytest.fixture(scope="module")
def valued() -> list[dict[str, Any]]:
    return run_ranks(2, all_values)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_one_rank_changes_alone_is_named_where_steps_are_verified(valued: Any, name: str):
    for rank in valued:
        error, lines, is_at_once, _ = rank[name]
        assert error == "ReplicasDiffer", lines
        found = re.match(VALUES[name][1], lines[0])
        assert found, lines[0]
        assert found[1] != found[2]
        assert is_at_once


# Over levels


def by_level(*strategies: str) -> Plan:
    buckets = zip({"bias": 10, "weight": 200}.items(), strategies, strict=True)
    return Plan(tuple(Bucket((name,), (size,), Strategy.parse(text)) for (name, size), text in buckets))


BY_LEVEL = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
ON_THE_POOL = "reduce_scatter@intra > compress(int8)@cpu > all_gather@inter > decompress@cpu > all_gather@intra"


def all_changes_by_level() -> dict[str, Any]:
    here = {"cluster": Cluster(2, 2, intra=Link(20.0, 10.0), inter=Link(50.0, 1.0)), "costs": table(2.0)}
    return {
        f"{name}, {ranks}": changes(CHANGES["lr"][0], ranks, plan=by_level(*strategies), **here)
        for name, strategies in {"dense": (BY_LEVEL, BY_LEVEL), "on the pool": (ON_THE_POOL, ON_THE_POOL)}.items()
        for ranks in ((1,), (1, 3), (2, 3))
    }


@pytest.mark.slow
def test_ranks_that_are_joined_by_levels_alone_all_hear_of_it():
    for rank in run_ranks(4, all_changes_by_level):
        for name, (error, lines, is_at_once, is_same) in rank.items():
            assert error == "ReplicasDiffer", (name, lines)
            both = r"rank \d has lr (0.05|0.1) in parameter group 0, rank \d has (0.05|0.1):"
            assert re.match(both, lines[0]), (name, lines)
            assert is_at_once, name
            assert is_same, name
