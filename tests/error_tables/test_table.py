"""A table is plain numbers that go to JSON and back, and is legal whatever numbers it is given."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fxcomp.compressors import PowerSGD, TopK, parse_compressor
from fxcomp.compressors.gaussian_error import gaussian_error
from fxcomp.error_tables import ASSUMED, Columns, ErrorRow, ErrorSource, ErrorTable, legal, measure, smoothed
from fxcomp.error_tables.columns import on_lines
from fxcomp.errors import BadOption

COLUMNS = Columns((0.01, 0.1), (1, 4), tuple(map(parse_compressor, ("int8(block=128)", "int4", "sign"))))
ERRORS = (0.9, 0.5, 0.8, 0.3, 5e-5, 0.014, 0.36)
ROW = ErrorRow((100, 100), 4.0, ERRORS, 1)


def table_with(*rows: ErrorRow) -> ErrorTable:
    return legal(COLUMNS, {f"g{number}": row for number, row in enumerate(rows)})


def changed(column: str, error: float) -> ErrorRow:
    errors = list(ERRORS)
    errors[COLUMNS.names.index(column)] = error
    return replace(ROW, errors=tuple(errors))


def test_a_table_goes_to_json_and_back():
    table = measure({"a": torch.randn(40, 30), "b": torch.zeros(3), "c": torch.full((2, 2), math.nan)})
    assert ErrorTable.from_json(json.loads(json.dumps(table.to_json()))) == table


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"version": 2},
        {**ASSUMED.to_json(), "codecs": ["int5"]},
        {**ASSUMED.to_json(), "densities": [0.1, 0.01]},
        {**ASSUMED.to_json(), "codecs": ["topk(0.1)"]},
        {**ASSUMED.to_json(), "ranks": [0, 1]},
        {**ASSUMED.to_json(), "rows": {"a": 3}},
        {**ASSUMED.to_json(), "rows": [1]},
        {**ASSUMED.to_json(), "rows": {"a": {"shape": [-1, 2], "squares": 1.0, "errors": [], "samples": 0}}},
        {**ASSUMED.to_json(), "rows": {"a": {"shape": [], "squares": 1.0, "errors": [], "samples": -1}}},
    ],
)
def test_what_is_no_table_is_refused(data: dict[str, object]):
    with pytest.raises(BadOption, match="this is not an error table: "):
        ErrorTable.from_json(data)


def test_without_data_errors_are_those_of_gaussian_values():
    for text in ("int4", "topk(0.01)", "powersgd(4)"):
        found = ASSUMED.error_of("anything", parse_compressor(text))
        assert found == (gaussian_error(parse_compressor(text)), ErrorSource.ASSUMED)


def test_each_gradient_has_errors_of_its_own():
    table = table_with(ROW, changed("int4", 0.2))
    assert [table.error_of(name, parse_compressor("int4")).value for name in ("g0", "g1")] == [0.014, 0.2]
    assert table.error_of("g1", parse_compressor("int4(block=64)")).source is ErrorSource.ASSUMED
    assert table.error_of("g2", parse_compressor("int4")).source is ErrorSource.ASSUMED


@pytest.mark.parametrize(
    ("at", "error"), [(0.005, 0.95), (0.01, 0.9), (0.055, 0.7), (0.1, 0.5), (0.55, 0.25), (1.0, 0.0)]
)
def test_between_densities_errors_lie_on_lines_that_begin_at_all_and_end_at_none(at: float, error: float):
    assert table_with(ROW).error_of("g0", TopK(at)).value == pytest.approx(error)


@pytest.mark.parametrize(("rank", "error"), [(1, 0.8), (2, 0.8 - 0.5 / 3), (4, 0.3), (8, 0.3)])
def test_beyond_the_last_rank_nothing_more_is_gained(rank: int, error: float):
    assert table_with(ROW).error_of("g0", PowerSGD(rank)).value == pytest.approx(error)


def test_what_powersgd_sends_as_it_is_loses_nothing():
    table = table_with(replace(ROW, shape=(10_000,)), replace(ROW, shape=(5, 2000)))
    assert table.error_of("g0", PowerSGD(1)).value == table.error_of("g1", PowerSGD(4)).value == 0.0


def test_two_points_at_one_place_are_no_line():
    assert on_lines([(0, 1.0), (1, 0.9), (1, 0.9), (3, 0.2)], 2) == pytest.approx(0.55)


# Whatever numbers come in


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
def test_a_gradient_with_an_error_that_is_no_size_counts_as_not_measured(bad: float):
    table = table_with(changed("int4", bad), ROW)
    assert table.error_of("g0", TopK(0.01)).source is ErrorSource.ASSUMED
    assert table.error_of("g1", TopK(0.01)).source is ErrorSource.MEASURED
    assert [note for note in table.notes if note.startswith("g0: ")]


@pytest.mark.parametrize(
    ("column", "error", "finer"),
    [("topk(0.01)", 0.4, "topk(0.1)"), ("powersgd(1)", 0.1, "powersgd(4)"), ("int4", 1e-6, "int8(block=128)")],
)
def test_an_error_that_rises_with_what_is_kept_is_raised_before_it(column: str, error: float, finer: str):
    table = table_with(changed(column, error))
    row = table.rows["g0"].errors
    assert row[COLUMNS.names.index(column)] == row[COLUMNS.names.index(finer)] == ERRORS[COLUMNS.names.index(finer)]
    [note] = table.notes
    assert column in note
    assert finer in note


def test_a_selection_cannot_lose_more_than_all():
    table = table_with(changed("topk(0.01)", 1.5))
    assert table.error_of("g0", TopK(0.01)).value == 1.0
    assert len(table.notes) == 1


def test_larger_blocks_may_lose_more_at_more_bits():
    """One large value beside small ones: they are lost in a block of 512, and most of them kept in blocks of 128."""
    values = torch.full((512,), 1e-3)
    values[0] = 1.0
    table = measure({"g": values})
    assert table.error_of("g", parse_compressor("int8")).value > 2 * table.error_of("g", parse_compressor("int4")).value
    assert table.notes == ("g: int8 lost more than int4, as larger blocks may",)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300])
def test_squares_that_are_no_size_become_those_of_the_others(bad: float):
    table = table_with(replace(ROW, squares=bad), replace(ROW, shape=(50, 100)))
    assert table.rows["g0"].squares == pytest.approx(8.0)
    assert len(table.notes) == 1
    assert table_with(replace(ROW, squares=bad)).rows["g0"].squares > 0


def test_an_empty_gradient_has_no_squares():
    table = legal(Columns(), {"w": ErrorRow((0, 4), 5.0, (0.1,) * Columns().count, 1)})
    assert table.squares_of("w", 0) == 0.0


def test_one_huge_gradient_is_noted():
    assert not table_with(ROW, ROW).notes
    [note] = table_with(ROW, replace(ROW, squares=1e100)).notes
    assert note.startswith("g1: ")


# The mean over looks


def test_the_first_looks_weigh_alike():
    looks = [table_with(changed("int4", error)) for error in (0.01, 0.02, 0.06)]
    mean = smoothed(smoothed(smoothed(ASSUMED, looks[0]), looks[1]), looks[2])
    assert mean.error_of("g0", parse_compressor("int4")).value == pytest.approx(0.03)
    assert mean.rows["g0"].samples == 3


def test_a_change_is_followed_to_nine_tenths_within_eight_looks():
    mean = ASSUMED
    for error in [0.1] * 20 + [0.2] * 8:
        mean = smoothed(mean, table_with(changed("int4", error)))
    assert mean.error_of("g0", parse_compressor("int4")).value == pytest.approx(0.19, abs=0.001)


def test_a_step_with_long_gradients_counts_once():
    """Of shares: a look whose squares are a million times as large changes no error more than another does."""
    mean = ASSUMED
    for squares in (1.0, 1.0, 1.0, 1.0, 1e6):
        mean = smoothed(mean, table_with(replace(ROW, squares=squares), replace(ROW, squares=3 * squares)))
    assert mean.rows["g0"].squares / mean.rows["g1"].squares == pytest.approx(1 / 3)


def test_a_look_that_measured_nothing_of_a_gradient_leaves_its_errors():
    before = table_with(ROW, ROW)
    lost = measure({"g0": torch.full((100, 100), math.nan), "g1": torch.zeros(100, 100)}, columns=COLUMNS)
    after = smoothed(before, lost)
    assert after.rows["g0"].errors == after.rows["g1"].errors == ERRORS
    assert after.error_of("g0", TopK(0.01)).source is ErrorSource.MEASURED


def test_a_gradient_that_is_frozen_loses_its_weight_and_gets_it_back():
    both, first = [measure({"g0": torch.ones(100, 100), "g1": torch.full((100, 100), two)}) for two in (1.0, 0.0)]
    mean = ASSUMED
    for look in [both] * 4 + [first] * 20:
        mean = smoothed(mean, look)
    assert mean.rows["g1"].squares < 0.01 * mean.rows["g0"].squares
    for look in [both] * 20:
        mean = smoothed(mean, look)
    assert mean.rows["g1"].squares == pytest.approx(mean.rows["g0"].squares, rel=0.01)


def test_tables_of_other_gradients_have_no_mean():
    with pytest.raises(BadOption, match="other gradients"):
        smoothed(table_with(ROW), table_with(ROW, ROW))
