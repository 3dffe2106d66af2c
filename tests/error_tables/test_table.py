"""A table is plain numbers that go to a file and back, and is legal whatever numbers the file holds."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers.measured import measured

from fxcomp.compressors import PowerSGD, TopK, parse_compressor
from fxcomp.compressors.gaussian_error import gaussian_error
from fxcomp.error_tables import ASSUMED, ErrorRow, ErrorTable, Rows, averaged, joined
from fxcomp.error_tables.table import COLUMNS, FAMILIES, VERSION
from fxcomp.errors import BadOption

INT4 = parse_compressor("int4")
ERRORS = (0.99, 0.97, 0.95, 0.93, 0.9, 0.7, 0.5, 0.2, 0.8, 0.7, 0.3, 0.2, 0.1, 2e-6, 0.0, 5e-5, 0.014, 0.2, 0.36)
ROW = ErrorRow((100, 100), 4.0, ERRORS, 1)


def changed(errors: Mapping[str, float], row: ErrorRow = ROW) -> ErrorRow:
    given = {parse_compressor(column): error for column, error in errors.items()}
    return replace(row, errors=tuple(given.get(*each) for each in zip(COLUMNS, row.errors, strict=True)))


def rows_of(*rows: ErrorRow) -> Rows:
    return {f"g{number}": row for number, row in enumerate(rows)}


def read_back(folder: Path, *rows: ErrorRow) -> ErrorTable:
    ErrorTable(rows_of(*rows)).save(folder / "errors.json")
    return ErrorTable.load(folder / "errors.json")


def test_a_table_goes_to_a_file_and_back(tmp_path: Path):
    table = measured({"a": torch.randn(40, 30), "b": torch.zeros(3), "c": torch.full((2, 2), math.nan)})
    table.save(tmp_path / "errors.json")
    assert ErrorTable.load(tmp_path / "errors.json") == table


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file or directory"),
        ("no table", "it is not JSON: Expecting value"),
        ("[" * 100_000, "it is not JSON: maximum recursion depth"),
        ("[1]", "TypeError"),
        ("{}", "KeyError: 'version'"),
        (
            {"version": VERSION - 1, "rows": {}},
            f"it has version {VERSION - 1}, and this fxcomp reads version {VERSION}",
        ),
        ({"version": VERSION, "rows": [1]}, "AttributeError"),
        ({"version": VERSION, "rows": {"w": 3}}, "TypeError"),
        ({"version": VERSION, "rows": {"w": {**asdict(ROW), "samples": math.inf}}}, "OverflowError"),
        ({"version": VERSION, "rows": {"w": {**asdict(ROW), "squares": "much"}}}, "could not convert"),
        (
            {"version": VERSION, "rows": {"w": {**asdict(ROW), "errors": [0.1, 0.2]}}},
            f"the row of 'w' has 2 errors, not one for each of {len(COLUMNS)} columns",
        ),
        ({"version": VERSION, "rows": {"w": {**asdict(ROW), "samples": -1}}}, "the row of 'w' has the shape"),
        ({"version": VERSION, "rows": {"w": {**asdict(ROW), "shape": [-3]}}}, "the row of 'w' has the shape"),
    ],
)
def test_what_is_no_table_is_refused_with_its_files_name(text: object, why: str, tmp_path: Path):
    path = tmp_path / "errors.json"
    if text is not None:
        path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(BadOption) as found:
        ErrorTable.load(path)
    first, advice = str(found.value).split("\n")
    assert first.startswith(f"cannot read the error table {path}: {why}")
    assert advice == "  Write it again with step.error_table.save(...), in this version of fxcomp."


def test_each_gradient_has_errors_of_its_own_and_others_are_those_of_gaussian_values():
    table = ErrorTable(rows_of(ROW, changed({"int4": 0.2})))
    assert table.errors_of(["g0", "g1", "g2"], INT4) == [0.014, 0.2, gaussian_error(INT4)]
    small_blocks = parse_compressor("int4(block=64)")
    assert table.error_of("g1", small_blocks) == gaussian_error(small_blocks)
    for text in ("int4", "topk(0.01)", "powersgd(4)"):
        assert ASSUMED.error_of("anything", parse_compressor(text)) == gaussian_error(parse_compressor(text))


@pytest.mark.parametrize(
    ("text", "shape", "error"),
    [
        ("topk(0.00005)", (1000, 1000), 0.995),
        ("topk(0.01)", (100, 100), 0.9),
        ("sidco(0.01)", (100, 100), 0.9),
        ("topk(0.02)", (100, 100), 0.8),
        ("sidco(0.02)", (100, 100), 0.8),
        ("topk(0.25)", (100, 100), 0.2),
        ("topk(0.625)", (100, 100), 0.1),
        ("topk(1.0)", (100, 100), 0.0),
        ("topk(0.4)", (10,), 0.2 - 0.2 / 7),  # several densities keep one value
        ("powersgd(1)", (100, 100), 0.8),
        ("powersgd(3)", (100, 100), 0.5),
        ("powersgd(40)", (1000, 1000), 0.1),
        ("powersgd(1)", (10_000,), 0.0),
        ("powersgd(4)", (5, 2000), 0.0),
        ("powersgd(3)", (5, 2000), 0.0),
    ],
)
def test_between_columns_errors_lie_on_lines_and_what_is_sent_whole_loses_nothing(
    text: str, shape: tuple[int, ...], error: float
):
    table = ErrorTable(rows_of(replace(ROW, shape=shape)))
    assert table.error_of("g0", parse_compressor(text)) == pytest.approx(error)


# Whatever numbers a file holds


def test_an_empty_gradient_counts_as_not_measured_whatever_its_row_holds(tmp_path: Path):
    table = read_back(tmp_path, replace(ROW, shape=(0,)), ROW)
    assert [row.samples for row in table.rows.values()] == [0, 1]
    assert table.squares_of("g0", 0) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1, 1e300])
def test_numbers_that_cannot_be_count_as_not_measured(bad: float, tmp_path: Path):
    table = read_back(tmp_path, changed({"int4": bad}), replace(ROW, squares=bad), ROW)
    assert [row.samples for row in table.rows.values()] == [0, 1]
    assert table.errors_of(["g0", "g1", "g2"], TopK(0.01)) == [gaussian_error(TopK(0.01))] * 2 + [0.9]
    assert table.squares_of("g1", ROW.size) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("column", "error", "finer"), [("topk(0.01)", 0.4, "topk(0.03)"), ("powersgd(1)", 0.1, "powersgd(2)")]
)
def test_an_error_that_rises_with_what_is_kept_is_raised_before_it(
    column: str, error: float, finer: str, tmp_path: Path
):
    table = read_back(tmp_path, changed({column: error}))
    assert table.rows["g0"] == changed({column: ERRORS[COLUMNS.index(parse_compressor(finer))]})


def test_larger_blocks_may_lose_more_at_more_bits():
    """One large value beside small ones: they are lost in a block of 512, and most of them kept in blocks of 128."""
    values = torch.full((512,), 1e-3)
    values[0] = 1.0
    table = measured({"g": values})
    assert table.error_of("g", parse_compressor("int8")) > 2 * table.error_of("g", INT4)


# The mean over looks


def mean_of(*looks: Rows) -> ErrorTable:
    mean: Rows = {}
    for look in looks:
        mean = averaged(mean, look)
    return ErrorTable(mean)


@pytest.mark.parametrize(
    ("errors", "mean"),
    [
        pytest.param([0.01, 0.02, 0.06], 0.03, id="the first looks weigh alike"),
        pytest.param([0.1] * 20 + [0.2] * 8, 0.19, id="a change is followed to nine tenths within eight looks"),
    ],
)
def test_looks_are_averaged(errors: list[float], mean: float):
    table = mean_of(*(rows_of(changed({"int4": error})) for error in errors))
    assert table.error_of("g0", INT4) == pytest.approx(mean, abs=0.001)
    assert table.looks == len(errors)


def test_a_step_with_long_gradients_counts_once():
    """Of shares: a look whose squares are a million times as large changes no error more than another does."""
    looks = [rows_of(replace(ROW, squares=each), replace(ROW, squares=3 * each)) for each in (1.0, 1.0, 1.0, 1.0, 1e6)]
    table = mean_of(*looks)
    assert table.rows["g0"].squares / table.rows["g1"].squares == pytest.approx(1 / 3)


def test_a_look_that_measured_nothing_of_a_gradient_leaves_its_errors():
    lost = measured({"g0": torch.full((100, 100), math.nan), "g1": torch.zeros(100, 100)}).rows
    after = mean_of(rows_of(ROW, ROW), lost)
    assert after.rows["g0"] == replace(ROW, squares=0.5)
    assert after.rows["g1"].errors == ERRORS
    assert after.rows["g1"].samples == 1


def test_a_gradient_that_is_frozen_loses_its_weight_and_gets_it_back():
    both, first = (rows_of(ROW, replace(ROW, squares=squares)) for squares in (4.0, 0.0))
    mean = mean_of(*[both] * 4, *[first] * 20)
    assert mean.rows["g1"].squares < 0.01 * mean.rows["g0"].squares
    mean = mean_of(*[both] * 4, *[first] * 20, *[both] * 20)
    assert mean.rows["g1"].squares == pytest.approx(mean.rows["g0"].squares, rel=0.01)


def families_of(table: ErrorTable) -> list[dict[str, ErrorRow]]:
    """Cut a table into rows of each family, as looks at one have them."""
    places = [[COLUMNS.index(column) for column in family] for family in FAMILIES]
    return [
        {name: replace(row, errors=tuple(row.errors[k] for k in each)) for name, row in table.rows.items()}
        for each in places
    ]


def test_families_are_joined_to_a_whole_table():
    table = ErrorTable(rows_of(ROW, replace(ROW, squares=1.0)))
    assert joined(families_of(table)) == table


def test_what_one_family_has_not_measured_is_not_measured():
    first, second, third = families_of(ErrorTable(rows_of(ROW, ROW, ROW)))
    second["g1"] = replace(second["g1"], samples=0, errors=())
    del third["g2"]
    found = joined([first, second, third])
    assert found.rows == rows_of(ROW, replace(ROW, errors=(), samples=0))
    assert found.error_of("g1", PowerSGD(4)) == gaussian_error(PowerSGD(4))
