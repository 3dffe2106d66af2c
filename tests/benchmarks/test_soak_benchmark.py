"""The soak's verdict names what grew, became slower or diverged, and a short soak of real ranks is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from records import read
from soak import RATES, SIZES, Held, Period, page, verdict

from fxcomp.commands.demo.shaped_hosts import why_not

CHECKOUT = Path(__file__).parents[2]
HELD = Held(resident_mb=400.0, own_mb=350.0, allocated_mb=150.0, descriptors=30, threads=12, tensors=1000)


def periods(**last: object) -> Sequence[Period]:
    """Eight equal periods, but for the first, which is slow, and for what is given of the last."""
    found = [
        Period(500 * (k + 1), RATES[k % 4], {"4x32": 20.0, "2x32": 10.0}, (HELD, HELD), True, "", ()) for k in range(8)
    ]
    return [replace(found[0], ms={"4x32": 90.0, "2x32": 90.0}), *found[1:-1], replace(found[-1], **last)]  # pyright: ignore


def missed(found: Sequence[Period]) -> list[str]:
    return [name for name, ok, _ in verdict(found) if not ok]


def test_equal_periods_hold():
    assert missed(periods()) == []


@pytest.mark.parametrize("ms", [10.6, 9.4])
def test_one_size_of_one_rate_that_takes_another_time_is_a_miss(ms: float):
    found = periods(ms={"4x32": 20.0, "2x32": ms})
    assert missed(found) == ["median step times"]
    assert f"| 300mbit | 2x32 | 10.00 | {ms:.2f} | {ms / 10:.3f} |" in page(found)


@pytest.mark.parametrize(
    ("name", "grown", "within"),
    [
        ("resident_mb", 408.1, 407.9),
        ("own_mb", 357.1, 356.9),
        ("allocated_mb", 153.1, 152.9),
        ("descriptors", 31, 29),
        ("threads", 13, 11),
        ("tensors", 1021, 1019),
    ],
)
def test_a_resource_that_grows_on_one_rank_is_a_miss(name: str, grown: float, within: float):
    assert missed(periods(held=(HELD, replace(HELD, **{name: grown})))) == [name]
    assert missed(periods(held=(HELD, replace(HELD, **{name: within})))) == []


def test_replicas_that_differ_in_any_period_are_a_miss():
    found = list(periods())
    found[3] = replace(found[3], equal=False)
    assert missed(found) == ["replicas"]


def test_periods_that_cannot_be_compared_are_a_miss():
    assert missed(periods()[:3]) == ["median step times"]


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason="hosts cannot be shaped here")
def test_a_short_soak_counts_every_step_and_rank(tmp_path: Path):
    written, log = tmp_path / "soak.json", tmp_path / "soak.jsonl"
    command = [sys.executable, str(CHECKOUT / "benchmarks/soak.py"), "--json", str(written), "--log", str(log)]
    subprocess.run([*command, "--steps", "30", "--period", "10"], timeout=300, capture_output=True, check=False)
    found, checks = read(written)[:3], read(written)[3:]
    assert [(each["ends"], each["rate"]) for each in found] == [(10, RATES[0]), (20, RATES[1]), (30, RATES[2])]
    assert all(len(each["held"]) == 4 and each["equal"] and len(each["ms"]) == len(SIZES) for each in found)
    assert (checks[0]["check"], checks[0]["ok"]) == ("median step times", False), "each rate comes once"
    assert [each["ok"] for each in checks if each["check"] in ("descriptors", "threads", "replicas")] == [True] * 3
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 31))
