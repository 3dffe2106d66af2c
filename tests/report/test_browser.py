"""The page in a browser: no script error, nothing asked for, nothing over anything else, wide and narrow."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import CHROMIUM, laid_out, visit
from helpers.explained import CASES

from fxcomp.report.html import run_plots
from fxcomp.report.html.page import to_html
from fxcomp.report.runs import LoggedRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine: apt-get install chromium"),
]

ZOOM = """
found.widths = [...document.querySelectorAll(".lanes")].map(each => box(each).width);
const figure = document.querySelector("figure.timelines"), svg = figure.querySelector("svg");
const task = svg.querySelector(".task");
const before = box(svg).width;
for (let k = 0; k < 3; k++) figure.querySelector("button").click();
found.zoom = box(svg).width / before;
found.fine = getComputedStyle(figure.querySelector(".fine")).display;
task.dispatchEvent(new MouseEvent("mousemove", {clientX: 200, clientY: 200, bubbles: true}));
found.tip = document.getElementById("tip").textContent;
found.tipShown = getComputedStyle(document.getElementById("tip")).display;
task.dispatchEvent(new MouseEvent("mouseleave"));
found.tipHidden = getComputedStyle(document.getElementById("tip")).display;
"""
"""Zooms the timelines and points at a task."""


def looked(page: str, folder: Path, *options: str, width: int) -> dict[str, Any]:
    return laid_out(page, folder, *options, width=width, more=ZOOM)


@pytest.mark.parametrize("width", [1200, 800, 500])
@pytest.mark.parametrize("case", ["raced and profiled", "under a budget", "given"])
def test_nothing_lies_over_anything_else_or_outside_of_the_page(case: str, width: int, tmp_path: Path):
    found = looked(to_html(CASES[case]()), tmp_path, width=width)
    assert found["wide"] <= 0
    assert found["outside"] == []
    assert found["over"] == []
    assert all(each > 0.8 * min(width, 1184) - 60 for each in found["widths"]), "drawings fill the page"


def test_what_lies_over_something_is_noticed(tmp_path: Path):
    text = "<text x='{}' y='{}'>{}</text>"
    words = [text.format(0, 12, "first words"), text.format(4, 12, "other words"), text.format("99%", 30, "far out")]
    drawing = f"<svg width='100%' height='40'>{''.join(words)}</svg></body>"
    found = looked(to_html(CASES["by hand"]()).replace("</body>", drawing), tmp_path, width=800)
    assert found["over"] == [["first words", "other words"]]
    assert found["outside"] == ["far out"]


def test_the_script_zooms_and_shows_what_lies_under_the_pointer(tmp_path: Path):
    found = looked(to_html(CASES["raced and profiled"]()), tmp_path, width=1200)
    assert found["zoom"] == pytest.approx(8.0)
    assert found["fine"] == "inline"
    assert found["tip"].startswith("region 0\n")
    assert (found["tipShown"], found["tipHidden"]) == ("block", "none")


def test_a_page_that_asks_for_something_is_noticed(tmp_path: Path):
    page = to_html(CASES["by hand"]())
    assert visit(page.replace("</body>", "<script>undefined_name()</script></body>"), tmp_path).console != []
    assert visit(page.replace("</body>", '<img src="/other.png"></body>'), tmp_path).console != []
    allowed = re.sub(r"<meta http-equiv=[^>]*>", "", page).replace("</body>", '<img src="/other.png"></body>')
    assert visit(allowed, tmp_path).asked == ["/report.html", "/other.png"]


def test_without_its_script_the_page_has_the_same_words(tmp_path: Path):
    page = to_html(CASES["raced and profiled"]())
    without = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    seen = visit(without, tmp_path)
    assert seen.console == []
    for word in ("Timeline", "Prediction against measurement", "Every task, with its price"):
        assert word in seen.dom


# Plots of runs

POINT = """
const spot = document.querySelectorAll(".spot")[10];
spot.dispatchEvent(new MouseEvent("mousemove", {clientX: 200, clientY: 200, bubbles: true}));
found.tip = document.getElementById("tip").textContent;
found.plots = [...document.querySelectorAll(".pair svg[role=img]")].map(each => box(each).width);
"""


def plots() -> str:
    def run(name: str, rate: float) -> LoggedRun:
        steps = [float(k) for k in range(1, 2001) if not 900 < k < 1100]
        loss = [math.nan if k in (500, 501) else 1.5 + 4 * math.exp(-k * rate) for k in steps]
        series = {
            "loss": dict(enumerate(loss)),
            "sent_mb": dict.fromkeys(range(len(steps)), 5e3 * rate),
            "residual_norm": {place: steps[place] * rate for place in range(0, len(steps), 10)},
        }
        return LoggedRun(name, steps, [0.2 * k for k in steps], series, [(1, "0" * 16)], ["a note"])

    return run_plots.to_html([run("dense", 0.002), run("int4", 0.004)])


@pytest.mark.parametrize("width", [1200, 800, 500])
def test_nothing_lies_over_anything_else_in_plots_and_places_across_them_tell_their_values(width: int, tmp_path: Path):
    found = laid_out(plots(), tmp_path, width=width, more=POINT)
    assert found["wide"] <= 0
    assert found["outside"] == []
    assert [pair for pair in found["over"] if pair != ["×", "×"]] == []
    assert found["tip"].startswith("dense: ")
    assert "\nint4: " in found["tip"]
    side = min(width, 1184)
    assert all(each > (0.4 if width == 1200 else 0.8) * side - 60 for each in found["plots"]), "plots fill the page"
