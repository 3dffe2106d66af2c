"""Judge predicted steps against measured ones: errors, the noise floor, and the order of plans, by number of hosts.

    python benchmarks/prediction_report.py docs/benchmarks/prediction_2026-11-22.json

It reads the records that benchmarks/prediction.py writes, of one run or of several.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

KINDS = {"error": "compute scaled", "raw_error": "as predicted", "whole_error": "the whole step scaled"}
NOISE = "the same plans, measured again"
BARS = {"error": (0.03, 0.08), "raw_error": (0.05, None)}  # median, 90th percentile
NOISE_MARGIN = 1.2  # a bar is never below this many times the noise floor
GOOD_ORDER = 0.9


def summary(records: Sequence[Record]) -> str:
    """Write a Markdown page: what is judged, by number of hosts and together; each configuration; each plan."""
    hosts = sorted({r["hosts"] for r in records})
    groups = [(f"{count} hosts", [r for r in records if r["hosts"] == count]) for count in hosts]
    if len(groups) > 1:
        groups.append(("all", list(records)))
    lines = ["| hosts | predictions | error | median | 90th percentile | bar | |", "|---|--:|---|--:|--:|---|---|"]
    for name, group in groups:
        lines += _verdicts(name, group)
    told = [line for name, group in groups for line in (*_orders(name, group), *_printed(name, group))]
    lines += ["", *(f"- {line}" for line in told)]
    lines += ["", *_configurations(records), "", *_plans(records), "", *_all(records)]
    return "\n".join(lines)


def _verdicts(name: str, records: Sequence[Record]) -> list[str]:
    noise = quantiles([again(r) for r in records])
    rows: list[str] = []
    for kind, words in KINDS.items():
        found, bars = quantiles([r[kind] for r in records]), BARS.get(kind, (None, None))
        allowed = [
            None if bar is None else max(bar, NOISE_MARGIN * floor) for bar, floor in zip(bars, noise, strict=True)
        ]
        told = " and ".join(f"{bar:.1%}" for bar in allowed if bar is not None)
        is_met = all(bar is None or error <= bar for error, bar in zip(found, allowed, strict=True))
        verdict = "" if not told else "met" if is_met else "missed"
        rows.append(f"| {name} | {len(records)} | {words} | {found[0]:.1%} | {found[1]:.1%} | {told} | {verdict} |")
    return [*rows, f"| {name} | {len(records)} | {NOISE} | {noise[0]:.1%} | {noise[1]:.1%} | | |"]


def _orders(name: str, records: Sequence[Record]) -> list[str]:
    """Count the configurations whose plans are ordered as measured, among those that repeat their own order."""
    orders = [(order(found, "predicted_ms"), order(found, "repeat_ms")) for found in configurations(records).values()]
    known = [(ours, theirs) for ours, theirs in orders if ours is not None and theirs is not None]
    clear = [ours for ours, theirs in known if theirs >= GOOD_ORDER]
    good = sum(ours >= GOOD_ORDER for ours in clear)
    return [
        f"Order of plans, {name}: {GOOD_ORDER} or better in {good} of the {len(clear)} configurations where the same"
        f" plans measured again reach it ({len(known)} in all)."
    ]


def _printed(name: str, records: Sequence[Record]) -> list[str]:
    """Count the predictions that are off by no more than was printed beside them."""
    told = [r for r in records if "printed_error" in r]
    if not told:
        return []
    within = sum(abs(r["raw_error"]) <= r["printed_error"] for r in told)
    typical = statistics.median(r["printed_error"] for r in told)
    return [f"Printed error, {name}: {typical:.1%} in the median; {within} of {len(told)} predictions are within it."]


def _configurations(records: Sequence[Record]) -> list[str]:
    lines = [
        "| hosts | inter | model | free ms | dense ms | median error | largest | raw | again | order | order, again |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (hosts, inter, model), found in configurations(records).items():
        errors = [abs(r["error"]) for r in found]
        dense = next((f"{r['measured_ms']:.0f}" for r in found if r["plan"] == "dense"), "")
        orders = [order(found, kind) for kind in ("predicted_ms", "repeat_ms")]
        told = " | ".join("" if one is None else f"{one:.2f}" for one in orders)
        lines.append(
            f"| {hosts} | {inter} | {model} | {found[0]['free_ms']:.0f} | {dense} | {statistics.median(errors):.1%} |"
            f" {max(errors):.1%} | {quantiles([r['raw_error'] for r in found])[0]:.1%} |"
            f" {quantiles([again(r) for r in found])[0]:.1%} | {told} |"
        )
    return lines


def _plans(records: Sequence[Record]) -> list[str]:
    lines = ["| plan | median error | 90th percentile | median, signed |", "|---|--:|--:|--:|"]
    for plan in dict.fromkeys(r["plan"] for r in records):
        errors = [r["error"] for r in records if r["plan"] == plan]
        median, most = quantiles(errors)
        lines.append(f"| {plan} | {median:.1%} | {most:.1%} | {statistics.median(errors):+.1%} |")
    return lines


def _all(records: Sequence[Record]) -> list[str]:
    lines = [
        "| hosts | inter | model | plan | measured | again | predicted | error | whole | raw |",
        "|--:|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    return lines + [
        f"| {r['hosts']} | {r['inter']} | {r['model']} | {r['plan']} | {r['measured_ms']:.1f} | {r['repeat_ms']:.1f} |"
        f" {r['predicted_ms']:.1f} | {r['error']:+.1%} | {r['whole_error']:+.1%} | {r['raw_error']:+.1%} |"
        for r in records
    ]


# Arithmetic


def configurations(records: Sequence[Record]) -> dict[tuple[int, str, str], list[Record]]:
    found: dict[tuple[int, str, str], list[Record]] = {}
    for r in records:
        found.setdefault((r["hosts"], r["inter"], r["model"]), []).append(r)
    return found


def again(r: Record) -> float:
    """Return the relative difference between two measurements of one plan."""
    return r["repeat_ms"] / r["measured_ms"] - 1


def order(records: Sequence[Record], kind: str) -> float | None:
    """Spearman's correlation of some numbers with the measured steps; None of fewer than three plans."""
    if len(records) < 3:
        return None
    return rank_correlation([r[kind] for r in records], [r["measured_ms"] for r in records])


def quantiles(errors: Sequence[float]) -> tuple[float, float]:
    """The median and the 90th percentile of what errors are in size."""
    sizes = sorted(map(abs, errors))
    return statistics.median(sizes), sizes[round(0.9 * (len(sizes) - 1))]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    return statistics.correlation(ranks(a), ranks(b))


def main() -> None:
    print(summary([r for name in sys.argv[1:] for r in json.loads(Path(name).read_text())]))


if __name__ == "__main__":
    main()
