"""A plan under an error budget: near the fastest there is, never above the limit, legal whatever the table holds."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from helpers.budget_cases import drawn
from helpers.optimum.oracle import optimum
from helpers.workloads import COSTS, cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import ErrorRow, ErrorTable
from fxcomp.error_tables.table import COLUMNS, LARGEST, LOW_RANK
from fxcomp.plan.budget import Budget, ErrorBudget, plan_error
from fxcomp.plan.modes import Mode
from fxcomp.search.choose import choose, predict_us
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload

WHERE = cluster(4, 1, "1gbit")
SHAPES = {"embedding": (2000, 64), "bias": (64,), "hidden": (256, 300), "out": (64, 900)}
WORKLOAD = Workload(
    tuple(Gradient(name, shape, 400.0 * k, 5.0) for k, (name, shape) in enumerate(SHAPES.items())), 2000.0
)
ASKED = ("topk(0.01)", "int4", "int4 > int4", "powersgd(4)", "0.05", "0", "balanced")


def check(table: ErrorTable, asked: str) -> Terms:
    """Choose a plan by this table: it covers the gradients, is priced as simulated, and keeps the limit."""
    terms = Terms(Mode.BALANCED, budget=Budget(ErrorBudget.parse(asked), table))
    limit = terms.limit(WORKLOAD, WHERE)
    assert 0 <= limit < math.inf
    choice = choose(WORKLOAD, COSTS, WHERE, terms)
    for plan, us in ((choice.plan, choice.step_us), (choice.fastest, choice.fastest_us)):
        plan.check_covers(WORKLOAD.sizes)
        assert us == predict_us(WORKLOAD, plan, COSTS, WHERE) < math.inf
        assert plan_error(plan, WHERE, table) <= limit * (1 + 1e-6)
    return terms


def read_back(rows: dict[str, ErrorRow], folder: Path) -> ErrorTable:
    """Save rows and load them: only a file can hold anything."""
    ErrorTable(rows).save(folder / "errors.json")
    return ErrorTable.load(folder / "errors.json")


HOSTILE = st.one_of(
    st.sampled_from([0.0, math.nan, math.inf, -math.inf, -1.0, 1e300, 1e150, 5e-324, 1.0, 2.0]),
    st.floats(0.0, 1.0),
)
ROWS = st.tuples(HOSTILE, st.lists(HOSTILE, min_size=len(COLUMNS), max_size=len(COLUMNS)), st.integers(0, 2))
TABLES = st.fixed_dictionaries({}, optional=dict.fromkeys((*SHAPES, "unknown"), ROWS))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(rows=TABLES, asked=st.sampled_from(ASKED))
def test_no_table_leads_to_a_plan_above_the_limit(
    rows: dict[str, tuple[float, list[float], int]], asked: str, tmp_path_factory: pytest.TempPathFactory
):
    shapes = {**SHAPES, "unknown": (10, 10)}
    made = {
        name: ErrorRow(shapes[name], squares, tuple(errors), samples)
        for name, (squares, errors, samples) in rows.items()
    }
    check(read_back(made, tmp_path_factory.mktemp("errors")), asked)


def falling(name: str, **changes: float) -> ErrorRow:
    """A row as gradients have them."""
    errors = [*(1 - topk.ratio for topk in LARGEST), *(1 / (1 + powersgd.rank) for powersgd in LOW_RANK)]
    errors += [2.7e-6, 4e-8, 5e-5, 0.014, 0.2, 0.4]
    for column, error in changes.items():
        errors[COLUMNS.index(parse_compressor(column))] = error
    return ErrorRow(SHAPES[name], float(math.prod(SHAPES[name])), tuple(errors), 4)


ZEROS = ErrorRow(SHAPES["hidden"], 0.0, (0.0,) * len(COLUMNS), 4)
NO_NUMBERS = ErrorRow(SHAPES["hidden"], math.nan, (math.nan,) * len(COLUMNS), 4)
INFINITE = ErrorRow(SHAPES["hidden"], math.inf, (math.inf,) * len(COLUMNS), 4)
HUGE = ErrorRow(SHAPES["embedding"], 1e30, falling("embedding").errors, 4)


ALL = {name: falling(name) for name in SHAPES}


@pytest.mark.parametrize(
    "rows",
    [
        {**ALL, "hidden": NO_NUMBERS},
        {**ALL, "hidden": INFINITE},
        {**ALL, "embedding": HUGE},
        {**ALL, "out": falling("out", int4=0.05, int8=0.2)},
        {**ALL, "out": falling("out", int2=0.01, int4=0.2)},
        {**ALL, "out": falling("out", **{"powersgd(1)": 0.1, "powersgd(16)": 0.9})},
        {**ALL, "out": falling("out", **{"topk(0.01)": 3.0})},
        {**ALL, "hidden": ZEROS},
        dict.fromkeys(SHAPES, ZEROS),
        {"elsewhere": falling("out")},
        {"out": falling("out")},
    ],
)
def test_a_hostile_table_gives_a_legal_plan(rows: dict[str, ErrorRow], tmp_path: Path):
    check(read_back(rows, tmp_path), "topk(0.01)")


def test_a_plan_under_a_budget_is_near_the_fastest_there_is():
    """The mean over 300 larger cases is in docs/benchmarks/budget_optimality.md."""
    gaps: list[float] = []
    for number in range(20, 32):
        case = drawn(number, most=6)
        found = choose(case.workload, case.costs, case.cluster, case.terms)
        best = optimum(case.workload, case.costs, case.cluster, case.terms, known=found.fastest)
        gaps.append(found.fastest_us / best.step_us - 1)
    assert min(gaps) >= -1e-9
    assert statistics.fmean(gaps) <= 0.01
