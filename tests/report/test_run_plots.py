"""Plots of runs: no peak is lost by thinning, gaps stay open, and a page stays small and asks nobody for anything."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import pytest

from fxcomp.report.html.line_plot import Axis, axis_of, line_of, line_plot, thinned
from fxcomp.report.html.run_plots import to_html
from fxcomp.report.runs import LoggedRun

NAN = float("nan")


def run_of(name: str, lines: int, loss: Callable[[int], float], *, is_timed: bool = True) -> LoggedRun:
    steps, values = [float(k) for k in range(lines)], [loss(k) for k in range(lines)]
    series = {"loss": dict(enumerate(values)), "residual_norm": {k: 0.1 * k for k in range(0, lines, 10)}}
    seconds = [0.1 * step for step in steps] if is_timed else None
    return LoggedRun(name, steps, seconds, series, [(0, "a" * 16)], [])


def line_over(ys: Sequence[float], steps: Sequence[int] | None = None):
    at = [float(step) for step in steps or range(len(ys))]
    return line_of("one", 0, at, at, ys)


def test_a_line_is_not_joined_over_what_is_not_finite():
    line = line_over([1.0, 2.0, NAN, 3.0, math.inf, 4.0, 5.0])
    assert [[y for _, y in part] for part in line.parts] == [[1.0, 2.0], [3.0], [4.0, 5.0]]
    assert [x for x, _ in line.crosses] == [2.0, 4.0]


def test_a_line_is_not_joined_where_steps_are_missing_or_fall_back():
    line = line_over([1.0] * 8, [0, 1, 2, 3, 9, 10, 8, 9])
    assert [[x for x, _ in part] for part in line.parts] == [[0, 1, 2, 3], [9, 10], [8, 9]]
    every_tenth = line_over([1.0] * 5, [0, 10, 20, 30, 80])
    assert len(every_tenth.parts) == 1


def test_values_beside_which_nothing_could_be_seen_are_crosses():
    line = line_over([1.0, 1e300, 2.0])
    assert line.crosses == [(1.0, 1e300)]
    assert "one: 1e+300 at 1" in line_plot([line], "{:g}".format)
    assert "or beyond 1e+100." in to_html([run_of("one", 20, lambda k: 1e300 if k == 5 else 1.0)])


def test_thinning_keeps_every_peak_and_both_ends():
    ys = [math.sin(k / 50) for k in range(10_000)]
    ys[4321], ys[7777] = 9.0, -9.0
    across = Axis(0.0, 9999.0)
    (part,) = thinned(line_over(ys).parts, across, 100)
    assert len(part) <= 202
    assert {(4321.0, 9.0), (7777.0, -9.0), (0.0, ys[0]), (9999.0, ys[-1])} <= set(part)
    assert [x for x, _ in part] == sorted(x for x, _ in part)
    of_column = [y for x, y in enumerate(ys) if 100 <= x < 200]
    kept = [y for x, y in part if 100 <= x < 200]
    assert (min(kept), max(kept)) == (min(of_column), max(of_column))


def test_a_line_of_many_gaps_is_thinned_to_dots():
    ys = [NAN if k % 2 else float(k) for k in range(10_000)]
    parts = thinned(line_over(ys).parts, Axis(0.0, 9999.0), 100)
    assert len(parts) <= 200
    assert {len(part) for part in parts} == {1}
    assert len(line_plot([line_over(ys)], str)) < 60_000


def test_a_short_line_is_drawn_as_it_is():
    line = line_over([3.0, 1.0, 2.0])
    assert thinned(line.parts, Axis(0.0, 2.0), 100) == line.parts


def test_smoothing_stays_within_a_part():
    line = line_over([1.0, 3.0, 5.0, NAN, 10.0, 20.0]).smoothed(2)
    assert [[y for _, y in part] for part in line.parts] == [[1.0, 2.0, 4.0], [10.0, 15.0]]


@pytest.mark.parametrize(
    ("ys", "from_zero", "is_log", "low", "high"),
    [
        ([1.0, 1000.0], False, True, 1 / 1.1, 1100.0),
        ([1.0, 2.0], False, False, 0.92, 2.08),
        ([1.0, 2.0], True, False, 0.0, 2.16),
        ([-1.0, 1000.0], True, False, -81.08, 1080.08),
        ([0.0, 0.0], True, False, 0.0, 1.0),
        ([3.0], False, False, 1.5, 4.5),
    ],
)
def test_an_axis_holds_its_values(ys: list[float], from_zero: bool, is_log: bool, low: float, high: float):
    axis = axis_of(ys, from_zero=from_zero)
    assert axis.is_log == is_log
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))


def test_a_plot_of_nothing_finite_says_so():
    page = to_html([run_of("one", 20, lambda _: NAN)])
    assert "No value of loss over steps can be drawn: none is a finite number" in page
    assert "nan%" not in page


@pytest.mark.parametrize("loss", [lambda _: 1.0, lambda k: 1e-300 * k, lambda k: 1e99 * (-1) ** k, lambda k: 0.0 * k])
def test_strange_values_are_placed_inside(loss: Callable[[int], float]):
    page = to_html([run_of("one", 50, loss)])
    drawn = re.findall(r' d="([^"]*)"', page)
    places = [
        float(number) for along in drawn for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", along.replace("h0", ""))
    ]
    assert places
    assert all(-0.01 <= place <= 100.01 for place in places)


@pytest.mark.slow
def test_a_page_of_long_runs_is_small_and_asks_nobody_for_anything():
    runs = [run_of(f"run {k}", 30_000, lambda step, k=k: 3 + math.sin(step * (k + 1))) for k in range(12)]
    page = to_html(runs, smooth=50)
    assert len(page) < 1_000_000
    assert not re.search(r"https?:|//[a-z]|@import|url\(|src=", page)
    assert "means over 50 points" in page
    assert "run 11, dashed" in page


def test_smoothing_is_not_there_unless_asked_for():
    page = to_html([run_of("one", 50, float)])
    assert "means over" not in page
    assert "stroke-opacity" not in page


def test_sections_of_numbers_that_are_named_alike_stand_beside_each_other():
    steps = [1.0, 2.0]
    series = {name: dict(enumerate(steps)) for name in ("loss", "Loss", "Notes")}
    page = to_html([LoggedRun("one", steps, None, series, [], [])])
    assert re.findall(r"<h2>(.*)</h2>", page) == ["Loss", "Loss (2)", "Notes (2)", "Notes"]
    assert re.findall(r'<section id="(.*)">', page) == ["step", "loss", "loss-2-", "notes-2-", "notes"]


@pytest.mark.parametrize(
    ("steps", "sent", "said"),
    [
        (range(1, 20), [1000.0] * 19, "19"),
        (range(1, 20), [1000.0] * 18 + [NAN], "at least 18"),
        ([k for k in range(1, 20) if k != 7], [1000.0] * 18, "at least 18"),
        (range(0, 190, 10), [1000.0] * 19, ""),
        ([5, 6, 7, 1, 2], [1000.0] * 5, "at least 5"),
        ([50, 60, 70, 1, 2], [1000.0] * 5, ""),
        ([1, 2, 3, 3, 4], [1000.0] * 5, "5"),
        ([1, 2], [NAN, NAN], ""),
    ],
)
def test_bytes_are_summed_up_where_all_but_a_few_steps_were_logged(steps: Sequence[int], sent: list[float], said: str):
    series = {"sent_mb": dict(enumerate(sent)), "loss": dict(enumerate(sent))}
    page = to_html([LoggedRun("one", [float(step) for step in steps], None, series, [], [])])
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    names = re.findall(r"<th[^>]*>(.*?)</th>", page)
    assert cells[names.index("GB sent")] == said


def test_names_are_no_markup():
    assert "<b>" not in to_html([run_of("<b>bold</b>", 5, float)])


def test_a_run_without_a_clock_is_drawn_over_steps_alone():
    page = to_html([run_of("one", 20, float, is_timed=False)])
    assert "over steps" in page
    assert "over seconds" not in page
    both = to_html([run_of("one", 20, float, is_timed=False), run_of("two", 20, float)])
    assert both.count("<figcaption>over seconds") == 2
