"""Judge predicted steps against measured ones: errors, noise floor and order of plans, by number of hosts.

    python benchmarks/prediction_report.py docs/benchmarks/prediction_2026-11-22.json

Reads records of benchmarks/prediction.py from one or several runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from records import Record, read, table

KINDS = {"error": "compute scaled", "raw_error": "as predicted", "whole_error": "the whole step scaled"}
NOISE = "the same plans, measured again"
BARS = {"error": (0.03, 0.08), "raw_error": (0.05, None)}  # limits for the median and the 90th percentile
NOISE_MARGIN = 1.2  # a limit is at least the noise floor times this factor
GOOD_ORDER = 0.9


def summary(records: Sequence[Record]) -> str:
    """Return a Markdown page: verdicts by number of hosts and in total, configurations, plans."""
    hosts = sorted({r["hosts"] for r in records})
    groups = [(f"{count} hosts", [r for r in records if r["hosts"] == count]) for count in hosts]
    if len(groups) > 1:
        groups.append(("all", list(records)))
    verdicts = [row for name, group in groups for row in _verdicts(name, group)]
    lines = [table("hosts | predictions > | error | median > | 90th percentile > | bar |", verdicts)]
    told = [line for name, group in groups for line in (*_orders(name, group), *_printed(name, group))]
    lines += ["", *(f"- {line}" for line in told)]
    lines += ["", *_configurations(records), "", *_plans(records), "", *_all(records)]
    return "\n".join(lines)


def _verdicts(name: str, records: Sequence[Record]) -> list[tuple[str, ...]]:
    noise = quantiles([again(r) for r in records])
    rows: list[tuple[str, ...]] = []
    count = str(len(records))
    for kind, words in KINDS.items():
        found, bars = quantiles([r[kind] for r in records]), BARS.get(kind, (None, None))
        allowed = [
            None if bar is None else max(bar, NOISE_MARGIN * floor) for bar, floor in zip(bars, noise, strict=True)
        ]
        told = " and ".join(f"{bar:.1%}" for bar in allowed if bar is not None)
        is_met = all(bar is None or error <= bar for error, bar in zip(found, allowed, strict=True))
        verdict = "" if not told else "met" if is_met else "missed"
        rows.append((name, count, words, f"{found[0]:.1%}", f"{found[1]:.1%}", told, verdict))
    return [*rows, (name, count, NOISE, f"{noise[0]:.1%}", f"{noise[1]:.1%}", "", "")]


def _orders(name: str, records: Sequence[Record]) -> list[str]:
    """Count configurations whose plans are ordered as measured, among those with a repeatable order."""
    orders = [(order(found, "predicted_ms"), order(found, "repeat_ms")) for found in configurations(records).values()]
    known = [(ours, theirs) for ours, theirs in orders if ours is not None and theirs is not None]
    clear = [ours for ours, theirs in known if theirs >= GOOD_ORDER]
    good = sum(ours >= GOOD_ORDER for ours in clear)
    return [
        f"Order of plans, {name}: {GOOD_ORDER} or better in {good} of the {len(clear)} configurations where the same"
        f" plans measured again reach it ({len(known)} in all)."
    ]


def _printed(name: str, records: Sequence[Record]) -> list[str]:
    told = [r for r in records if "printed_error" in r]
    if not told:
        return []
    within = sum(abs(r["raw_error"]) <= r["printed_error"] for r in told)
    typical = statistics.median(r["printed_error"] for r in told)
    return [f"Printed error, {name}: {typical:.1%} in the median; {within} of {len(told)} predictions are within it."]


def _configurations(records: Sequence[Record]) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for key, found in configurations(records).items():
        errors = [abs(r["error"]) for r in found]
        dense = next((f"{r['measured_ms']:.0f}" for r in found if r["plan"] == "dense"), "")
        orders = [order(found, kind) for kind in ("predicted_ms", "repeat_ms")]
        shares = (statistics.median(errors), max(errors), *(
            quantiles(each)[0] for each in ([r["raw_error"] for r in found], [again(r) for r in found])
        ))  # fmt: skip
        told = ("" if one is None else f"{one:.2f}" for one in orders)
        rows.append((*key, f"{found[0]['free_ms']:.0f}", dense, *(f"{share:.1%}" for share in shares), *told))
    head = "hosts > | inter | model | free ms > | dense ms > | median error > | largest > | raw > | again > | order > |"
    return [table(head + " order, again >", rows)]


def _plans(records: Sequence[Record]) -> list[str]:
    errors = {plan: [r["error"] for r in records if r["plan"] == plan] for plan in (r["plan"] for r in records)}
    rows = [
        (plan, *(f"{each:.1%}" for each in quantiles(found)), f"{statistics.median(found):+.1%}")
        for plan, found in errors.items()
    ]
    return [table("plan | median error > | 90th percentile > | median, signed >", rows)]


def _all(records: Sequence[Record]) -> list[str]:
    times, errors = ("measured_ms", "repeat_ms", "predicted_ms"), ("error", "whole_error", "raw_error")
    rows = [
        (
            *(r[key] for key in ("hosts", "inter", "model", "plan")),
            *(f"{r[k]:.1f}" for k in times),
            *(f"{r[k]:+.1%}" for k in errors),
        )
        for r in records
    ]
    head = "hosts > | inter | model | plan | measured > | again > | predicted > | error > | whole > | raw >"
    return [table(head, rows)]


# Arithmetic


def configurations(records: Sequence[Record]) -> dict[tuple[int, str, str], list[Record]]:
    found: dict[tuple[int, str, str], list[Record]] = {}
    for r in records:
        found.setdefault((r["hosts"], r["inter"], r["model"]), []).append(r)
    return found


def again(r: Record) -> float:
    """Return the relative difference between both measurements of a plan."""
    return r["repeat_ms"] / r["measured_ms"] - 1


def order(records: Sequence[Record], kind: str) -> float | None:
    """Return Spearman's correlation with the measured steps; None for fewer than three plans."""
    if len(records) < 3:
        return None
    return rank_correlation([r[kind] for r in records], [r["measured_ms"] for r in records])


def quantiles(errors: Sequence[float]) -> tuple[float, float]:
    """Return the median and 90th percentile of absolute errors."""
    sizes = sorted(map(abs, errors))
    return statistics.median(sizes), sizes[round(0.9 * (len(sizes) - 1))]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    return statistics.correlation(ranks(a), ranks(b))


def main() -> None:
    print(summary([record for name in sys.argv[1:] for record in read(Path(name))]))


if __name__ == "__main__":
    main()
