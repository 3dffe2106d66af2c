"""After a kind of batch was captured on some rank for the first time, all ranks verify the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.drifting import table
from helpers.gathered import gathered
from helpers.jobs import cross_entropy, rows
from helpers.ranks import run_ranks
from helpers.small_step import batch
from torch import nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.step.alike import SELDOM, VERIFIED_AFTER
from fxcomp.step.observer import StepUnderWay
from fxcomp.step.verify.verifier import Verifier

BY_LEVEL = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
STEPS = 75


def sized(elements: int) -> Any:
    return rows(torch.Generator().manual_seed(dist.get_rank()), elements)


Captures = dict[tuple[int, int], int]
"""The number of rows that a rank's batch has in a step, where it is not six."""


def verified(captures: Captures, **options: Any) -> tuple[list[int], list[float]]:
    """Train, and list the verified steps other than the sample's, and the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Linear(20, 10)
    seen: list[int] = []
    before: Callable[[Verifier, StepUnderWay], None] = Verifier.before
    given = {"plan": "dense", "verify": "sampled", "costs": table(2.0), **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def noting(self: Verifier, step: StepUnderWay) -> None:
        seen.append(step.number)
        before(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "before", noting)
        with fxcomp.compile_step(model, cross_entropy, optimizer, batch(), **gathered(**given)) as step:
            for number in range(STEPS):
                step(sized(captures.get((dist.get_rank(), number), 6)))
    extra = [number for number in seen if number not in fxcomp.Checks().verified]
    return extra, nn.utils.parameters_to_vector(model.parameters()).tolist()


def in_cases(cases: dict[str, tuple[Captures, dict[str, Any]]]) -> dict[str, Any]:
    return {name: verified(captures, **options) for name, (captures, options) in cases.items()}


AT = 11
VERIFIED = AT + VERIFIED_AFTER

TWO_RANKS: dict[str, tuple[Captures, dict[str, Any]]] = {
    "none": ({}, {}),
    "one rank": ({(1, AT): 4}, {}),
    "both": ({(0, AT): 4, (1, AT): 4}, {}),
    "one after the other": ({(0, AT): 4, (1, AT + 1): 5}, {}),
    "soon again": ({(0, AT): 4, (1, AT + 20): 5}, {}),
    "later again": ({(0, AT): 4, (1, AT + SELDOM): 5}, {}),
    "a kind that was verified": ({(0, AT): 4, (0, AT + SELDOM): 4}, {}),
    "int8": ({(1, AT): 4}, {"pins": {"*": "int8"}, "plan": None}),
    "never": ({(1, AT): 4}, {"verify": "never"}),
    "every seventh": ({(1, AT): 4}, {"verify": 7}),
}

EXPECTED = {
    "none": [],
    "later again": [VERIFIED, VERIFIED + SELDOM],
    "never": [],
    "every seventh": [step for step in range(0, STEPS, 7) if step not in fxcomp.Checks().verified],
}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, in_cases, TWO_RANKS)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_both_ranks_verify_the_same_step_after_a_new_capture(two_ranks: list[dict[str, Any]], case: str):
    (first, parameters), (second, theirs) = (rank[case] for rank in two_ranks)
    assert first == second == EXPECTED.get(case, [VERIFIED])
    assert parameters == theirs


def between_hosts(captures: Captures) -> list[int]:
    here = {"cluster": Cluster(2, 2, intra=Link(20.0, 10.0), inter=Link(50.0, 1.0)), "pins": {"*": BY_LEVEL}}
    return verified(captures, plan=None, **here)[0]


@pytest.mark.parametrize("rank", [0, 3])
def test_all_ranks_of_two_hosts_verify_the_same_step(rank: int):
    assert run_ranks(4, between_hosts, {(rank, AT): 4}) == [[VERIFIED]] * 4


def test_a_rank_that_is_alone_verifies_the_next_step(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(Verifier, "after", lambda self, step, aux: None)  # noqa: ARG005
    monkeypatch.setattr(Verifier, "before", lambda self, step: seen.append(step.number))  # noqa: ARG005
    model = nn.Linear(20, 10)
    step = fxcomp.compile_step(
        model, lambda m, b: m(b).square().sum(), torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(6, 20)
    )
    for number in range(STEPS):
        step(torch.ones(4 if number in (AT, AT + 20, AT + SELDOM) else 6, 20))
    assert [number for number in seen if number not in fxcomp.Checks().verified] == [AT + 1]
