"""Lines that follow a price, kinks and jumps included."""

from __future__ import annotations

import random

import pytest

from fxcomp.cost.piecewise import TOLERANCE, trace


def test_a_curve_follows_kinks_and_jumps():
    def price(size: float) -> float:
        return max(5.0, size / 100) + (50.0 if size > 100_000 else 0.0)

    curve = trace(price, 1e6)
    chance = random.Random(0)
    for size in [10 ** chance.uniform(0, 6) for _ in range(200)]:
        if not 99_800 < size < 100_200:  # across a jump a line is steep
            assert curve.at(size) == pytest.approx(price(size), rel=4 * TOLERANCE)
    assert curve.at(4e6) == pytest.approx(price(4e6), rel=0.01)
