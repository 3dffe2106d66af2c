"""Put the records of step_time.py for several models and links into one table, and count the verdicts.

python benchmarks/step_time_table.py mlp.json gpt.json resnet.json many.json
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from baselines import FXCOMP
from records import Record, read, table
from step_time_verdicts import AS_PRECISE, MARGIN, TWICE, Turns, Verdict, ratio, verdicts

HEAD = "hosts | model | link | contestant | ms > | predicted > | alternative | ratio, 95 % interval | A/A > | verdict"


def page(records: Iterable[Record]) -> str:
    """Write all comparisons of compiled steps as Markdown, and how many hold."""
    rows: list[Sequence[str]] = []
    alike: list[Verdict] = []
    slower: list[str] = []
    for (hosts, model, inter), group in itertools.groupby(records, lambda each: job_of(each)):
        by_name = {each["name"]: (turns_of(each), each) for each in group}
        turns = {name: turn for name, (turn, _) in by_name.items()}
        for name, (turn, record) in by_name.items():
            if name not in FXCOMP:
                continue
            found = verdicts(turn, turns, record["aa_spread"])
            alike += [each for each in found if each.found.to in AS_PRECISE[name]][:1]
            rows += [(hosts, model, inter, *cells(each, record)) for each in found]
            if TWICE in turns and ratio(turn, turns[TWICE]).low > MARGIN + record["aa_spread"]:
                slower.append(f"{name} on {model}, {hosts} hosts, {inter}")
    known = [each for each in alike if each.is_known]
    holding = sum(each.holds for each in known)
    return (
        f"{table(HEAD, rows)}\n\nOf {len(alike)} comparisons with the best alternative that loses no more, {len(known)}"
        f" have a verdict and {holding} hold. Slower than plain DDP: {', '.join(slower) or 'none'}.\n"
    )


def job_of(record: Record) -> tuple[str, str, str]:
    return str(record["hosts"]), record["model"], record["inter"]


def turns_of(record: Record) -> Turns:
    return Turns(record["name"], blocks=record["rounds_ms"], predicted_ms=record["predicted_ms"])


def cells(verdict: Verdict, record: Record) -> tuple[str, ...]:
    found, predicted = verdict.found, record["predicted_ms"]
    says = ("holds" if verdict.holds else "SLOWER") if verdict.is_known else "none"
    if found.to not in AS_PRECISE[found.name]:
        says += ", loses less"
    return (
        found.name,
        f"{record['measured_ms']['median']:.0f}",
        "" if predicted is None else f"{predicted:.0f}",
        found.to,
        f"{found.ratio:.3f} ({found.low:.3f}–{found.high:.3f})",
        "" if verdict.spread is None else f"{verdict.spread:.1%}",
        says,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Put records of step_time.py into one table.")
    parser.add_argument("records", nargs="+", type=Path, help="JSON files that step_time.py wrote")
    files = parser.parse_args().records
    print(page(record for path in files for record in read(path)))


if __name__ == "__main__":
    main()
