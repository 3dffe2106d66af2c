"""The benchmark of predictions: which plans it takes, and how it judges records made here."""

import sys
from typing import Any

import prediction
import pytest
from prediction_report import quantiles, rank_correlation, summary


def one(plan: str, measured: float, predicted: float, repeat: float, **more: Any) -> dict[str, Any]:
    return {
        "hosts": 2,
        "inter": "100mbit",
        "model": "mlp",
        "plan": plan,
        "free_ms": 50.0,
        "measured_ms": measured,
        "repeat_ms": repeat,
        "predicted_ms": predicted,
        "error": predicted / measured - 1,
        "raw_error": predicted / measured - 1,
        "whole_error": 0.0,
        **more,
    }


def three(off: float, repeated: float, **more: Any) -> list[dict[str, Any]]:
    return [one(plan, ms, ms * (1 + off), ms * (1 + repeated), **more) for plan, ms in zip("abc", (100, 200, 300))]  # noqa: B905


def judged(records: list[dict[str, Any]], kind: str, hosts: str = "2 hosts") -> str:
    row = next(line for line in summary(records).splitlines() if line.startswith(f"| {hosts} |") and kind in line)
    return row.split("|")[-2].strip()


def test_errors_within_the_bars_are_met_and_larger_ones_missed():
    assert judged(three(0.02, 0.0), "compute scaled") == "met"
    assert judged(three(0.04, 0.0), "compute scaled") == "missed"
    assert judged(three(0.04, 0.0), "as predicted") == "met"


def test_noise_lifts_the_bar():
    assert judged(three(0.045, 0.04), "compute scaled") == "met"
    assert judged(three(0.055, 0.04), "compute scaled") == "missed"


def test_numbers_of_hosts_are_judged_apart_and_together():
    records = three(0.01, 0.0) + three(0.2, 0.0, hosts=8)
    assert judged(records, "compute scaled") == "met"
    assert judged(records, "compute scaled", "8 hosts") == "missed"
    assert judged(records, "compute scaled", "all") == "missed"


def test_the_order_of_plans_counts_where_it_repeats():
    wrong = [one("a", 100, 300, 100), one("b", 200, 200, 200), one("c", 300, 100, 300)]
    unclear = [one("a", 100, 100, 300), one("b", 200, 200, 200), one("c", 300, 300, 100)]
    records = wrong + [{**r, "model": "gpt"} for r in unclear] + [{**r, "model": "many"} for r in three(0.0, 0.0)]
    assert "0.9 or better in 1 of the 2 configurations" in summary(records)
    assert "(3 in all)" in summary(records)


def test_predictions_are_held_against_the_error_printed_with_them():
    records = three(0.04, 0.0, printed_error=0.05) + three(0.06, 0.0, printed_error=0.05)
    assert "3 of 6 predictions are within it" in summary(records)
    assert "Printed error" not in summary(three(0.0, 0.0))


def test_ties_share_their_ranks():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)


def test_quantiles_are_of_sizes():
    assert quantiles([-0.5, 0.1, 0.2, 0.3, -0.4]) == (0.3, 0.5)


def test_a_plan_that_this_version_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch):
    known = "compress(int8)@gpu > all_gather@world > decompress@gpu"
    monkeypatch.setattr(sys, "argv", ["prediction.py", "--hosts", "2,8", "--plans", f"bf16; {known}; carry@pigeon"])
    arguments = prediction.parse_arguments()
    assert arguments.plans == ["bf16", known]
    assert arguments.hosts == [2, 8]


def test_a_quick_run_is_one_model_at_one_bandwidth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["prediction.py", "--quick"])
    arguments = prediction.parse_arguments()
    assert (arguments.models, arguments.inter, arguments.hosts) == (["mlp"], ["100mbit"], [2])
