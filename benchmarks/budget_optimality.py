"""Compare plans under an error budget with the fastest ones within it, found exactly.

    PYTHONPATH=tests python benchmarks/budget_optimality.py --json budget_optimality.json
                                         300 cases of up to 12 tensors on one wire, 60 of up to 4 with every strategy
    PYTHONPATH=tests python benchmarks/budget_optimality.py --only 171 --plans        case 171 alone, with both plans

A record is `{case, kind, tensors, step_ms, best_ms, dense_ms, free_ms, error, limit}`. `step_ms` is the chosen plan's
step as the simulator says once more, `best_ms` the fastest of all that lose at most `limit`, None where there are too
many partial plans. `error` is what the chosen plan loses by the table (`plan_error`). `kind` is `one wire`, where the
best is found by `tests/helpers/optimum/one_wire.py`, or `all`, by `tests/helpers/optimum/oracle.py`.
`budget_optimality_workloads.py` says what is drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from budget_optimality_workloads import BudgetCase, drawn
from helpers.optimum.one_wire import fastest_on_one_wire
from helpers.optimum.oracle import Optimum, TooLarge, optimum

from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.plan import Plan
from fxcomp.search.choose import choose, predict_us

CASES, OTHERS = 300, 60
MOST_OF_ALL = 4
"""Tensors of a case with every strategy."""

MOST_LABELS = 20_000
"""Partial plans of one; beyond it the best is not known."""

MEAN_BAR = 0.01
_ROUNDING = 1e-8  # relative: an error may exceed its limit by so much, because sums are rounded


@dataclass(frozen=True)
class Record:
    """One case."""

    case: str
    kind: str
    tensors: int
    step_ms: float
    best_ms: float | None
    dense_ms: float
    free_ms: float
    error: float
    limit: float

    @property
    def gap(self) -> float | None:
        """The relative excess of the step over the best possible; None if that is not known."""
        return None if self.best_ms is None else self.step_ms / self.best_ms - 1

    @property
    def keeps_limit(self) -> bool:
        return self.error <= self.limit * (1 + _ROUNDING)

    @property
    def is_exposed(self) -> bool:
        """Communication lengthens the best step."""
        return (self.best_ms or self.step_ms) > self.free_ms * 1.001


def judge(case: BudgetCase, *, one_wire: bool, shows: bool = False) -> Record:
    """Choose a plan, and find the best one."""
    workload, costs, cluster, terms = case.workload, case.costs, case.cluster, case.terms
    choice = choose(workload, costs, cluster, terms)
    step_us = predict_us(workload, choice.fastest, costs, cluster)
    best: Optimum | None = None
    try:
        if one_wire:
            best = fastest_on_one_wire(workload, costs, cluster, terms)
        else:
            best = optimum(workload, costs, cluster, terms, known=choice.fastest, most=MOST_LABELS)
    except TooLarge as error:
        print(f"{case.name}: {error}", file=sys.stderr)
    if shows:
        _show("chosen", choice.fastest, step_us)
        if best is not None:
            _show("best", best.plan, best.step_us)
    return Record(
        case=case.name,
        kind="one wire" if one_wire else "all",
        tensors=len(workload.gradients),
        step_ms=step_us / 1e3,
        best_ms=None if best is None else best.step_us / 1e3,
        dense_ms=choice.dense_us / 1e3,
        free_ms=workload.free_us / 1e3,
        error=plan_error(choice.fastest, cluster, terms.table),
        limit=terms.limit(workload, cluster),
    )


def _show(title: str, plan: Plan, us: float) -> None:
    print(f"{title}: {us / 1e3:.6g} ms")
    for bucket in plan.buckets:
        print(f"    {', '.join(plan.labels(bucket))}    {bucket.strategy}")


# Printing


def to_markdown(records: Sequence[Record]) -> str:
    """The gaps by kind, and the worst."""
    lines = [
        "| strategies | cases | best known | exposed | mean gap | worst | within 0.1 % | within 1 % | above limit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in dict.fromkeys(record.kind for record in records):
        group = [record for record in records if record.kind == kind]
        gaps = [record.gap for record in group if record.gap is not None]
        exposed = sum(record.is_exposed for record in group)
        above = sum(not record.keeps_limit for record in group)
        mean, worst = (statistics.fmean(gaps), max(gaps)) if gaps else (0.0, 0.0)
        near = [sum(gap <= most for gap in gaps) for most in (1e-3, 1e-2)]
        lines.append(
            f"| {kind} | {len(group)} | {len(gaps)} | {exposed} | {mean:.3%} | {worst:.2%} | {near[0]} | {near[1]}"
            f" | {above} |"
        )
    return "\n".join(lines) + "\n"


def worst(records: Sequence[Record], count: int = 8) -> list[str]:
    """List the cases that are furthest from the best."""
    known = sorted(((record.gap, record) for record in records if record.gap is not None), key=lambda each: -each[0])
    return [
        f"{gap:8.2%}  {record.kind:8}  {record.case}, {record.tensors} tensors,"
        f" {record.error / record.limit if record.limit else 0:.0%} of the limit spent"
        for gap, record in known[:count]
        if gap > 1e-3
    ]


def verdict(records: Sequence[Record]) -> int:
    """Say whether gaps are as small as asked for and every limit is kept."""
    gaps = [record.gap for record in records if record.kind == "one wire" and record.gap is not None]
    mean = statistics.fmean(gaps) if gaps else 0.0
    above = sum(not record.keeps_limit for record in records)
    print(f"mean gap on one wire {mean:.3%}, asked for {MEAN_BAR:.0%} at most; plans above their limit: {above}")
    return 0 if mean <= MEAN_BAR and not above else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here, each as it is made")
    parser.add_argument("--cases", type=int, default=CASES, help="cases on one wire")
    parser.add_argument("--others", type=int, default=OTHERS, help="cases with every strategy")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these cases on one wire alone")
    parser.add_argument("--plans", action="store_true", help="print the plans")
    arguments = parser.parse_args()
    todo = [(number, True) for number in arguments.only or range(arguments.cases)]
    todo += [] if arguments.only else [(number, False) for number in range(arguments.others)]
    records: list[Record] = []
    for number, one_wire in todo:
        case = drawn(number) if one_wire else drawn(number, one_wire=False, most=MOST_OF_ALL)
        records.append(judge(case, one_wire=one_wire, shows=arguments.plans))
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
    print(to_markdown(records))
    for line in worst(records):
        print(line)
    return verdict(records)


if __name__ == "__main__":
    sys.exit(main())
