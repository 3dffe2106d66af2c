"""Plots of runs in a browser: nothing lies over anything else, and places across a plot tell their values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import CHROMIUM, DARK, laid_out, screenshot

from fxcomp.report.html.run_plots import to_html
from fxcomp.report.runs import LoggedRun, Series

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine: apt-get install chromium"),
]

POINT = """
const spot = document.querySelectorAll(".spot")[10];
spot.dispatchEvent(new MouseEvent("mousemove", {clientX: 200, clientY: 200, bubbles: true}));
found.tip = document.getElementById("tip").textContent;
found.plots = [...document.querySelectorAll(".pair svg[role=img]")].map(each => box(each).width);
"""
COLORS = {"one": (42, 111, 187), "two": (217, 130, 43)}


def page(smooth: int = 1) -> str:
    def run(name: str, rate: float) -> LoggedRun:
        steps = [float(k) for k in range(1, 2001) if not 900 < k < 1100]
        loss = [math.nan if k in (500, 501) else 1.5 + 4 * math.exp(-k * rate) for k in steps]
        series = {
            "loss": Series(range(len(steps)), loss),
            "sent_mb": Series(range(len(steps)), [5e3 * rate] * len(steps)),
            "residual_norm": Series(range(0, len(steps), 10), [k * rate for k in steps[::10]]),
        }
        return LoggedRun(name, steps, [0.2 * k for k in steps], series, [(1, "0" * 16)], ["a note"])

    return to_html([run("dense", 0.002), run("int4", 0.004)], smooth)


@pytest.mark.parametrize("width", [1200, 800, 500])
def test_nothing_lies_over_anything_else_or_outside_of_the_page(width: int, tmp_path: Path):
    found = laid_out(page(), tmp_path, width=width, more=POINT)
    assert found["wide"] <= 0
    assert found["outside"] == []
    assert [pair for pair in found["over"] if pair != ["×", "×"]] == []
    assert found["tip"].startswith("dense: ")
    assert "\nint4: " in found["tip"]
    side = min(width, 1184)
    assert all(each > (0.4 if width == 1200 else 0.8) * side - 60 for each in found["plots"]), "plots fill the page"


@pytest.mark.parametrize(("options", "paper"), [((), (255, 255, 255)), ((DARK,), (20, 24, 29))])
def test_a_picture_has_both_runs_and_the_gap(options: tuple[str, ...], paper: tuple[int, int, int], tmp_path: Path):
    picture = screenshot(page(), tmp_path / "plots.png", *options, width=800, height=1400)
    assert tuple(picture[2, 2]) == paper
    colors = {tuple(color) for color in picture.reshape(-1, 3).tolist()}
    if not options:
        assert set(COLORS.values()) <= colors
        lines = np.all(picture == COLORS["two"], axis=2)[:, 20:780]
        flat = lines[lines.sum(axis=1).argmax()]  # the bytes of the second run, which are the same in every step
        assert flat[: int(0.44 * 760)].mean() > 0.95
        assert not flat[int(0.47 * 760) : int(0.53 * 760)].any(), "nothing is drawn where nothing was logged"
