"""A plan is solved for again where what a plan loses changes, or what a heavy gradient would lose."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from helpers.workloads import cluster

from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import ASSUMED, Columns, ErrorRow, ErrorTable, cut, families, joined
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.step.errors.error_looks import what_changed

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
        ((0.9, 0.5, 0.3, 1e-4), r"what powersgd\(1\) loses of heavy was 0.8 and is 0.3"),
        ((0.9, 0.5, 0.8, 3e-4), "what int8 loses of heavy was 0.0001 and is 0.0003"),
    ],
)
def test_a_heavy_gradients_errors_change(errors: tuple[float, ...], said: str):
    found = change(heavy=replace(HEAVY, errors=errors))
    assert re.match(said + "$", found)


def test_light_gradients_count_once_they_are_heavy():
    assert not change(light=replace(LIGHT, errors=(0.5, 0.1, 0.1, 1e-3)))
    assert not change(light=replace(LIGHT, squares=0.8))
    assert "light had 0.5% of the squares and has 2.0%" in change(light=replace(LIGHT, squares=2.0))


def test_a_first_measurement_is_a_change():
    assert what_changed(ASSUMED, TABLE, PLAN, cluster(4, 1, "1gbit")) == "errors are measured now"
    assert not what_changed(ASSUMED, ASSUMED, PLAN, cluster(4, 1, "1gbit"))


def test_families_are_cut_and_joined_to_the_same_table():
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
