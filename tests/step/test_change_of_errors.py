"""A plan is solved for again where its error changes, after many steps, and where errors are first measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from helpers.workloads import cluster

from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import ASSUMED, Columns, ErrorRow, ErrorTable, families, joined
from fxcomp.error_tables.table import LAG
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.step.errors.adaptation import INTERVAL, Adaptation, what_changed

COLUMNS = Columns((0.01, 0.1), (1,), (parse_compressor("int8"),))
HEAVY = ErrorRow((10, 10), 99.5, (0.9, 0.5, 0.8, 1e-4), 4)
LIGHT = ErrorRow((10, 10), 0.5, (0.9, 0.5, 0.8, 1e-4), 4)
TABLE = ErrorTable(COLUMNS, {"heavy": HEAVY, "light": LIGHT})
PLAN = Plan((Bucket(("heavy", "light"), (100, 100), Strategy.flat(parse_compressor("topk(0.1)"))),))


def change(**rows: ErrorRow) -> str:
    now = ErrorTable(COLUMNS, {**TABLE.rows, **rows})
    return what_changed(TABLE, now, PLAN, cluster(4, 1, "1gbit"))


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ((0.9, 0.55, 0.8, 1e-4), ""),
        ((0.9, 0.62, 0.8, 1e-4), "the plan's error was 0.5 and is 0.619"),
        ((0.9, 0.3, 0.8, 1e-4), "the plan's error was 0.5 and is 0.301"),
        ((0.9, 0.5, 0.3, 3e-4), ""),
    ],
)
def test_a_fifth_of_the_plans_error_is_a_change(errors: tuple[float, ...], said: str):
    found = change(heavy=replace(HEAVY, errors=errors))
    assert re.match(said + "$", found)


def test_light_gradients_count_once_they_are_heavy():
    lossless = replace(LIGHT, errors=(0.1, 0.05, 0.1, 1e-4))
    assert not change(light=lossless)
    assert change(light=replace(lossless, squares=60.0)) == "the plan's error was 0.5 and is 0.331"


def test_errors_of_rounding_are_no_change():
    tiny = {name: replace(row, errors=(0.9, 1e-7, 0.8, 1e-4)) for name, row in TABLE.rows.items()}
    larger = {name: replace(row, errors=(0.9, 9e-6, 0.8, 1e-4)) for name, row in TABLE.rows.items()}
    tables = (ErrorTable(COLUMNS, rows) for rows in (tiny, larger))
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
    other = ErrorTable(COLUMNS, {"heavy": replace(HEAVY, errors=(0.9, 0.7, 0.8, 1e-4)), "light": LIGHT})

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
    found = TABLE.lagging().error_of("heavy", parse_compressor("powersgd(1)")).value
    assert found == pytest.approx(0.8**LAG)
    assert TABLE.lagging().error_of("heavy", parse_compressor("int8")) == TABLE.error_of(
        "heavy", parse_compressor("int8")
    )


def test_a_first_measurement_is_a_change():
    assert what_changed(ASSUMED, TABLE, PLAN, cluster(4, 1, "1gbit")) == "errors are measured now"


def cut(table: ErrorTable, columns: Columns) -> ErrorTable:
    """Return some of a table's columns, as looks at one family have them."""
    places = [table.columns.names.index(name) for name in columns.names]
    rows = {name: replace(row, errors=tuple(row.errors[k] for k in places)) for name, row in table.rows.items()}
    return ErrorTable(columns, rows)


def test_families_are_joined_to_a_whole_table():
    parts = families(COLUMNS)
    assert [each.names for each in parts] == [("topk(0.01)", "topk(0.1)"), ("powersgd(1)",), ("int8",)]
    tables = [cut(TABLE, each) for each in parts]
    assert joined(tables).to_json() == replace(TABLE, notes=joined(tables).notes).to_json()
    assert joined([tables[2], tables[0]]).columns == Columns((0.01, 0.1), (), COLUMNS.codecs)


def test_what_one_family_has_not_measured_is_not_measured():
    first, second, third = (cut(TABLE, each) for each in families(COLUMNS))
    rows = {**second.rows, "light": replace(second.rows["light"], samples=0, errors=(0.0,))}
    found = joined([first, ErrorTable(second.columns, rows), third])
    assert [row.samples for row in found.rows.values()] == [4, 0]
    assert found.rows["light"].squares == pytest.approx(LIGHT.squares)
