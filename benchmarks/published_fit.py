"""Fit timings that others published, and judge the fit at sizes that it never saw.

    python benchmarks/published_fit.py --json published_fit.json --report docs/benchmarks/published_fit.md

The data are Espresso's CPU timings of four compressors in four runs: one time for each size, encoding and decoding. The
file is read where it lies (`--data`) and says itself where it is from. The code is the one that fits collectives and
compressors measured by fxcomp.

`in sample` is the median and the largest relative error at the sizes that the fit was made from. `left out` leaves one
size out, chooses pieces and fits again, and judges the error at that size; the smallest and the largest are left out
like the others, so two of the errors are of extrapolation. `interpolated` is what lines from point to point err there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from fxcomp.cost.fit import fit, left_out_errors
from fxcomp.cost.piecewise import Sample, interpolate

DATA = Path(__file__).parents[2] / "shared" / "data" / "espresso_cpu_compressor_microbench.json"
BAR = 0.10  # the median error that is asked for
NOISY, QUIET_FROM = "run_4", 2**19  # the run whose source says that its times are noise below this size


@dataclass(frozen=True)
class Record:
    """One compressor of one run, and one of its two halves."""

    run: str
    compressor: str
    work: str
    sizes: int
    pieces: int
    in_sample: float
    in_sample_worst: float
    left_out: float
    left_out_p90: float
    interpolated: float
    fit: dict[str, Any]


# Judging


def judge(run: str, compressor: str, work: str, samples: Sequence[Sample]) -> Record:
    """Fit all sizes, then all but one, each in turn."""
    fitted = fit(samples)
    errors = left_out_errors(samples, lambda rest: fit(rest).at)
    return Record(
        run=run,
        compressor=compressor,
        work=work,
        sizes=len(samples),
        pieces=len(fitted.pieces),
        in_sample=fitted.residual,
        in_sample_worst=fitted.worst,
        left_out=statistics.median(errors),
        left_out_p90=statistics.quantiles(errors, n=10)[-1],
        interpolated=statistics.median(left_out_errors(samples, lambda rest: lambda size: interpolate(rest, size))),
        fit=fitted.to_json(),
    )


def judge_all(runs: dict[str, dict[str, list[list[float]]]]) -> list[Record]:
    """Every run as published, and once more the noisy run where it is quiet."""
    records: list[Record] = []
    for run, compressors in runs.items():
        records += _judge_run(run, compressors, 0)
    if NOISY in runs:
        records += _judge_run(f"{NOISY}, from 2^19", runs[NOISY], QUIET_FROM)
    return records


def _judge_run(name: str, compressors: dict[str, list[list[float]]], smallest: int) -> list[Record]:
    return [
        judge(name, compressor, work, [(row[0], row[column]) for row in rows if row[0] >= smallest])
        for compressor, rows in compressors.items()
        for column, work in ((1, "encode"), (2, "decode"))
    ]


def summary(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """For each run, and for all of them, the median over its compressors of encoding and decoding."""
    runs = list(dict.fromkeys(record.run for record in records))
    groups = {run: [r for r in records if r.run == run] for run in runs}
    groups["all runs"] = [r for r in records if r.run in runs and "from" not in r.run]
    groups[f"all but {NOISY}"] = [r for r in groups["all runs"] if r.run != NOISY]
    return {
        name: {
            "series": len(group),
            "within_bar": sum(r.left_out <= BAR for r in group),
            "in_sample": statistics.median(r.in_sample for r in group),
            "left_out": statistics.median(r.left_out for r in group),
            "interpolated": statistics.median(r.interpolated for r in group),
        }
        for name, group in groups.items()
        if group
    }


# Printing


def to_markdown(records: Sequence[Record]) -> str:
    lines = [
        "| run | series | within 10 % | in sample | left out | interpolated |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in summary(records).items():
        errors = " | ".join(_percent(row[key]) for key in ("in_sample", "left_out", "interpolated"))
        lines.append(f"| {name} | {row['series']} | {row['within_bar']} | {errors} |")
    lines += [
        "",
        "| run | compressor | | pieces | in sample | worst | left out | 90 % | interpolated |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in records:
        errors = (r.in_sample, r.in_sample_worst, r.left_out, r.left_out_p90, r.interpolated)
        cells = " | ".join(_percent(error) for error in errors)
        lines.append(f"| {r.run} | {r.compressor} | {r.work} | {r.pieces} | {cells} |")
    return "\n".join(lines) + "\n"


def _percent(error: float) -> str:
    return f"{100 * error:.1f} %"


HEAD = """# Published timings, fitted

`benchmarks/published_fit.py` fits other people's timings with the code that fits ours (`fxcomp/cost/fit.py`), and
judges it at sizes that it never saw. The timings are those of Espresso's CPU compressors (zhuangwang93/Espresso at
a0294e3, `byteps/compressor_microbenchmark/log`); the errors below are ours.

"""

TAIL = f"""
A bar of 10 % is asked for, in the median over all series. The last run, {NOISY}, does not reach it by itself. Its
times are noise below 2^19 elements, as the file says (threads that are woken each time): encoding 1,024 elements with
randomk takes 6.5 ms and 262,144 takes 0.5 ms. No line that rises is near such times; the errors there are the scatter
of the data, and they are counted all the same. From 2^19 on seven sizes are left, and they still scatter by some 10 %.

Decoding of the smallest sizes is published as 1 or 2 µs, in whole microseconds: the largest errors of the other runs.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help=f"the published timings (default: {DATA})")
    parser.add_argument("--json", type=Path, help="write every series with its fit here")
    parser.add_argument("--report", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    try:
        data = json.loads(arguments.data.read_text())
    except (OSError, ValueError) as error:
        print(f"cannot read {arguments.data}: {error}; say with --data where the timings lie", file=sys.stderr)
        return 2
    records = judge_all(data["runs"])
    Console().print(Markdown(to_markdown(records)))
    overall = summary(records)["all runs"]["left_out"]
    print(f"median error at sizes left out, over all series: {_percent(overall)}; asked for: {_percent(BAR)} at most")
    if arguments.json:
        rows = {"summary": summary(records), "series": [asdict(r) for r in records]}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.report:
        arguments.report.write_text(HEAD + to_markdown(records) + TAIL)
    return 0 if overall <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
