"""A plan is solved for again where its error changes, after many steps, and where errors are first measured."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from helpers.workloads import cluster

from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import ASSUMED, ErrorRow, ErrorTable
from fxcomp.error_tables.table import COLUMNS
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.step.errors.adaptation import INTERVAL, Adaptation, what_changed
from fxcomp.step.errors.look import LAG, lagging

TOPK = parse_compressor("topk(0.1)")


def with_error(row: ErrorRow, error: float) -> ErrorRow:
    """The same row with another error of the plan's compressor."""
    return replace(row, errors=tuple(error if each == TOPK else 0.8 for each in COLUMNS))


HEAVY = with_error(ErrorRow((10, 10), 99.5, (), 4), 0.5)
LIGHT = replace(HEAVY, squares=0.5)
TABLE = ErrorTable({"heavy": HEAVY, "light": LIGHT})
PLAN = Plan((Bucket(("heavy", "light"), (100, 100), Strategy.flat(TOPK)),))


def change(**rows: ErrorRow) -> str:
    now = ErrorTable({**TABLE.rows, **rows})
    return what_changed(TABLE, now, PLAN, cluster(4, 1, "1gbit"))


@pytest.mark.parametrize(
    ("heavy", "said"),
    [
        (with_error(HEAVY, 0.55), ""),
        (with_error(HEAVY, 0.62), "the plan's error was 0.5 and is 0.619"),
        (with_error(HEAVY, 0.3), "the plan's error was 0.5 and is 0.301"),
        (replace(HEAVY, errors=tuple(0.5 if each == TOPK else 0.1 for each in COLUMNS)), ""),
    ],
)
def test_a_fifth_of_the_plans_error_is_a_change(heavy: ErrorRow, said: str):
    assert change(heavy=heavy) == said


def test_light_gradients_count_once_they_are_heavy():
    lossless = with_error(LIGHT, 0.05)
    assert not change(light=lossless)
    assert change(light=replace(lossless, squares=60.0)) == "the plan's error was 0.5 and is 0.331"


def test_errors_of_rounding_are_no_change():
    tiny = {name: with_error(row, 1e-7) for name, row in TABLE.rows.items()}
    larger = {name: with_error(row, 9e-6) for name, row in TABLE.rows.items()}
    tables = (ErrorTable(rows) for rows in (tiny, larger))
    assert not what_changed(*tables, PLAN, cluster(4, 1, "1gbit"))


def solved_at(tables: Callable[[int], ErrorTable], steps: int, plan: Plan = PLAN) -> list[tuple[int, str]]:
    """Let a plan follow a table that changes from step to step; list the steps of solutions, and why."""
    force = SimpleNamespace(plan=plan)
    looks, where = SimpleNamespace(table=ASSUMED), SimpleNamespace(cluster=cluster(4, 1, "1gbit"))
    parts: Any = (force, looks, None, where, None, None)
    found: list[tuple[int, str]] = []

    def adapt(self: Adaptation, step: int, why: str) -> Generator[None]:
        self._solved_by, self._solved_at = looks.table, step
        found.append((step, why))
        yield

    with patch.object(Adaptation, "_adapt", adapt):
        following = Adaptation(*parts)
        for step in range(steps):
            looks.table = tables(step)
            following.act(step)
    return found


def test_a_plan_is_solved_for_where_errors_are_measured_change_and_now_and_then():
    other = ErrorTable({"heavy": with_error(HEAVY, 0.7), "light": LIGHT})

    def table(step: int) -> ErrorTable:
        return ASSUMED if step < 30 else TABLE if step < 100 else other

    found = solved_at(table, 2 * INTERVAL)
    assert found == [
        (30, "errors are measured now"),
        (100, "the plan's error was 0.5 and is 0.699"),
        (100 + INTERVAL, f"{INTERVAL} steps have passed"),
    ]


def test_a_job_that_began_dense_and_one_without_looks_are_left_alone():
    dense = Plan((Bucket(("heavy", "light"), (100, 100), Strategy.parse("all_reduce@world")),))
    assert not solved_at(lambda _: TABLE, 2 * INTERVAL, dense)
    assert not solved_at(lambda _: ASSUMED, 2 * INTERVAL)


def test_powersgd_loses_more_than_the_best_matrix_of_its_rank():
    found = lagging({"w": ErrorRow((10, 10), 1.0, (0.8, 0.5), 1)})
    assert found == {"w": ErrorRow((10, 10), 1.0, (0.8**LAG, 0.5**LAG), 1)}
    assert found["w"].errors > (0.8, 0.5)


def test_a_first_measurement_is_a_change():
    assert what_changed(ASSUMED, TABLE, PLAN, cluster(4, 1, "1gbit")) == "errors are measured now"
