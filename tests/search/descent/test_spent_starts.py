"""Starts that spend an error limit: within it, and better than what single changes find."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
from helpers.budget_cases import drawn

from fxcomp.search.descent.cells import Limits
from fxcomp.search.descent.plan_search import PlanSearch, searches_of
from fxcomp.search.descent.spent_starts import spent_starts
from fxcomp.search.plan_tasks import StepPrices


def search_of(seed: int, *, one_wire: bool = True) -> PlanSearch:
    case = drawn(seed, one_wire=one_wire)
    return searches_of(StepPrices(case.workload, case.costs, case.cluster), case.terms)[0]


@pytest.mark.parametrize("seed", [5, 18])
def test_starts_cover_every_cell_and_keep_the_limit(seed: int):
    search = search_of(seed, one_wire=seed % 2 == 0)
    begun = search.starts(range(1))[0].parts
    for parts in spent_starts(search.problem, begun):
        cells = sorted(cell for part in parts for cell in range(part.start, part.stop))
        assert cells == list(range(search.strands[0].cells))
        assert math.isfinite(search.engine.values([parts])[0].us)


@pytest.mark.parametrize("seed", [37, 171, 239, 286])
def test_a_start_is_faster_than_what_single_changes_find(seed: int):
    search = search_of(seed)
    improved = search.improved(search.starts(range(len(search.options[0])))[0].parts, Limits(pairs=False))
    starts = list(spent_starts(search.problem, improved.parts))
    assert min(search.engine.values(starts)).us < 0.9 * improved.value.us


def test_without_a_limit_there_is_nothing_to_spend():
    search = search_of(1)
    for lossable in (0.0, math.inf):
        assert not list(spent_starts(replace(search.problem, lossable=lossable), ()))


def test_losses_that_fall_from_cell_to_cell_start_nothing_wrong():
    search = search_of(18)
    losses = array("d", [-loss for loss in search.problem.losses])
    begun = search.starts(range(1))[0].parts
    for parts in spent_starts(replace(search.problem, losses=losses), begun):
        assert sum(part.stop - part.start for part in parts) == search.strands[0].cells


def test_options_that_come_in_bursts_are_left_out_where_these_are_limited():
    search = search_of(18)
    bounded = replace(search.problem, bursty=0.0)
    begun = search.starts(range(1))[0].parts
    for parts in spent_starts(bounded, begun):
        assert not any(search.options[0][part.option].is_bursty for part in parts)
