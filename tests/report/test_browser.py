"""The page in a browser: no script error, nothing asked for, nothing over anything else, light, dark and narrow."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.browser import CHROMIUM, DARK, laid_out, screenshot, visit
from helpers.explained import CASES

from fxcomp.report.html.page import to_html

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


@pytest.mark.parametrize(
    ("name", "options", "width", "paper"),
    [("light", (), 1000, (255, 255, 255)), ("dark", (DARK,), 1000, (20, 24, 29)), ("narrow", (), 500, (255, 255, 255))],
)
def test_a_picture_has_the_readers_paper_and_the_drawings_colors(
    name: str, options: tuple[str, ...], width: int, paper: tuple[int, int, int], tmp_path: Path
):
    picture = screenshot(
        to_html(CASES["raced and profiled"]()), tmp_path / f"{name}.png", *options, width=width, height=1600
    )
    assert picture.shape == (1600, width, 3)
    assert tuple(picture[2, 2]) == paper
    inked = (abs(picture.astype(int) - np.array(paper)).sum(axis=2) > 60).mean(axis=1)
    assert inked.mean() > 0.02
    empty = np.split(inked < 1e-9, np.flatnonzero(np.diff(inked < 1e-9)) + 1)
    assert max(len(run) for run in empty if run[0]) < 120, "no gap is higher than a few lines"
    colors = {tuple(color) for color in picture.reshape(-1, 3)[::7].tolist()}
    wire = (47, 179, 163) if name == "dark" else (42, 157, 143)
    assert wire in colors


def test_without_its_script_the_page_has_the_same_words(tmp_path: Path):
    page = to_html(CASES["raced and profiled"]())
    without = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    seen = visit(without, tmp_path)
    assert seen.console == []
    for word in ("Timeline", "Prediction against measurement", "Every task, with its price"):
        assert word in seen.dom
