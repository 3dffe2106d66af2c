"""Compare the search's plans with the optimum of an exact search and with a proven lower bound.

    python benchmarks/optimality.py                          600 drawn workloads of 5 to 8 tensors, then 20 larger ones
    python benchmarks/optimality.py --json optimality.json   the same, each record written as it is made
    python benchmarks/optimality.py --only 13 --modes lossy --plans
                                                             workload 13 alone, in one mode, with both plans

Run with `PYTHONPATH=tests` for `helpers.optimum` (exact search) and `helpers.drawn_cases`.

A record is `{workload, tensors, mode, step_ms, oracle_ms, bound_ms, dense_ms, decide_ms}`. `step_ms` is the chosen
plan's simulated step, `bound_ms` a lower bound for all plans, `decide_ms` the processor time of choosing. `oracle_ms`
is the optimum, or None for more than 8 tensors or too many partial plans. Each drawn workload is judged in one mode, in
rotation, unless `--modes` is given.

No margin is added for prediction errors, so the plan with the fastest prediction is always chosen.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from helpers.drawn_cases import COSTS, Case, drawn
from helpers.optimum.oracle import TooLarge, bound_us, optimum
from helpers.workloads import DISTINCT_MODES
from records import Records, options, table

from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Plan
from fxcomp.search.choose import choose, predict_us

SMALL, LARGE = 600, 20
MOST_TENSORS = 8
"""Maximum tensors for the exact search."""

MOST_LABELS = 30_000
"""Maximum partial plans of the exact search; with more, the optimum is unknown."""

LARGE_SIZES = (9, 14)
MEAN_BAR, WORST_BAR = 0.001, 0.02


@dataclass(frozen=True)
class Record:
    workload: str
    tensors: int
    mode: str
    step_ms: float
    oracle_ms: float | None
    bound_ms: float
    dense_ms: float
    decide_ms: float

    @property
    def gap(self) -> float | None:
        """Relative excess over the optimum; None if unknown."""
        return None if self.oracle_ms is None else self.step_ms / self.oracle_ms - 1

    @property
    def bound_gap(self) -> float:
        return self.step_ms / self.bound_ms - 1


def judge(case: Case, mode: Mode, *, is_exact: bool, shows: bool = False) -> Record:
    """Choose a plan, and find the optimum if `is_exact`."""
    workload, costs, cluster = case.workload, case.costs, case.cluster
    begun = time.process_time()
    choice = choose(workload, costs, cluster, mode)
    decide_s = time.process_time() - begun
    step_us = predict_us(workload, choice.fastest, costs, cluster)
    best_us, best = None, None
    if is_exact:
        try:
            found = optimum(workload, costs, cluster, mode, known=choice.fastest, most=MOST_LABELS)
            best_us, best = found.step_us, found.plan
        except TooLarge as error:
            print(f"{case.name}, {mode.value}: {error}", file=sys.stderr)
    if shows:
        _show("chosen", choice.fastest, step_us)
        if best is not None and best_us is not None:
            _show("best", best, best_us)
    return Record(
        workload=case.name,
        tensors=len(workload.gradients),
        mode=mode.value,
        step_ms=step_us / 1e3,
        oracle_ms=None if best_us is None else best_us / 1e3,
        bound_ms=bound_us(workload, costs, cluster, mode) / 1e3,
        dense_ms=choice.dense_us / 1e3,
        decide_ms=decide_s * 1e3,
    )


def _show(title: str, plan: Plan, us: float) -> None:
    print(f"{title}: {us / 1e3:.6g} ms")
    for bucket in plan.buckets:
        print(f"    {', '.join(plan.labels(bucket))}    {bucket.strategy}")


def drawn_cases(numbers: Iterable[int], modes: Sequence[Mode], costs: str | None) -> Iterator[tuple[Case, Mode]]:
    for number in numbers:
        sizes = (5, MOST_TENSORS) if number < SMALL else LARGE_SIZES
        case = drawn(number, sizes, costs)
        found = modes or [DISTINCT_MODES[number % len(DISTINCT_MODES)]]
        yield from ((case, mode) for mode in found)


# Printing


def to_markdown(records: Sequence[Record]) -> str:
    rows: list[Sequence[str]] = []
    for is_exact in (True, False):
        some = [record for record in records if (record.oracle_ms is not None) is is_exact]
        for mode in [*(mode.value for mode in Mode), "all"]:
            if group := [record for record in some if mode in (record.mode, "all")]:
                rows.append(_row(mode, group))
    head = "mode | tensors | workloads > | mean gap > | worst > | at the optimum > | bound: median gap > | worst >"
    return table(head, rows) + "\n"


def _row(mode: str, group: Sequence[Record]) -> list[str]:
    sizes = sorted(record.tensors for record in group)
    gaps = [record.gap for record in group if record.gap is not None]
    cells = [mode, f"{sizes[0]} to {sizes[-1]}", str(len(group))]
    if gaps:
        at_best = sum(gap <= _AT_BEST for gap in gaps) / len(gaps)
        cells += [_percent(statistics.fmean(gaps)), _percent(max(gaps)), f"{at_best:.0%}"]
    else:
        cells += ["", "", ""]
    bounds = [record.bound_gap for record in group]
    return [*cells, _percent(statistics.median(bounds)), _percent(max(bounds))]


_AT_BEST = 1e-5  # relative; the oracle ignores improvements below 1e-6


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %"


def worst(records: Sequence[Record], count: int = 8) -> list[str]:
    far = [(record.gap, record) for record in records if record.gap is not None and record.gap > _AT_BEST]
    far.sort(key=lambda each: -each[0])
    return [
        f"{_percent(gap)}  {record.workload}, {record.mode}, {record.tensors} tensors" for gap, record in far[:count]
    ]


# The command


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--costs", choices=list(COSTS), help="prices (default: drawn too)")
    parser.add_argument("--modes", nargs="+", choices=[mode.value for mode in Mode], default=[])
    parser.add_argument("--only", nargs="+", type=int, help="the numbers of drawn workloads")
    parser.add_argument("--small", type=int, default=SMALL, help=f"workloads of 5 to 8 tensors (default: {SMALL})")
    parser.add_argument("--large", type=int, default=LARGE, help=f"larger ones (default: {LARGE})")
    parser.add_argument("--plans", action="store_true", help="show the plan that was chosen, and the best one")
    arguments = parser.parse_args()
    modes = [Mode(name) for name in arguments.modes]
    numbers = arguments.only or [*range(arguments.small), *range(SMALL, SMALL + arguments.large)]
    kept, records = Records(arguments.json), list[Record]()
    for case, mode in drawn_cases(numbers, modes, arguments.costs):
        is_exact = len(case.workload.gradients) <= MOST_TENSORS
        records.append(judge(case, mode, is_exact=is_exact, shows=arguments.plans))
        kept.add(records[-1])
    print(to_markdown(records))
    for line in worst(records):
        print(line)
    return verdict(records)


def verdict(records: Sequence[Record]) -> int:
    """Return the exit status: 1 if gaps exceed the limits."""
    gaps = [record.gap for record in records if record.gap is not None]
    if not gaps:
        return 0
    mean, largest = statistics.fmean(gaps), max(gaps)
    print(f"mean gap {_percent(mean)}, asked for {_percent(MEAN_BAR)} at most;", end=" ")
    print(f"worst {_percent(largest)}, asked for {_percent(WORST_BAR)} at most")
    return 0 if mean <= MEAN_BAR and largest <= WORST_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
