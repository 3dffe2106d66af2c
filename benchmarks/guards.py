"""What is asked before each step costs: this version beside an earlier one, each part timed alone, in turns.

    python benchmarks/guards.py                            a table
    python benchmarks/guards.py --json FILE --rounds 9     a record: part, model, case, version, median_us, spread_us

Times are of the processor, not of the clock. `guard_parts.py` has the parts and the cases. The earlier version is read
from git; each round runs both in processes of their own, one after the other.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

BEFORE = "f8a962b"
HERE = Path(__file__).resolve().parent

Key = tuple[str, str, str]
"""A model, a part and a case."""


def tree_of(commit: str, folder: Path) -> Path:
    """Unpack the package as it was at a commit."""
    archive = subprocess.run(["git", "archive", commit, "fxcomp"], cwd=HERE.parent, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def run(tree: Path) -> list[dict[str, Any]]:
    """Time the parts of the version in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "guard_parts.py")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert Path(found["fxcomp"]).is_relative_to(tree), f"{found['fxcomp']} was run, not what is in {tree}"
    return found["records"]


def measure(trees: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Run all versions in turns; returns a record for each model, part, case and version."""
    taken: dict[tuple[str, Key], list[float]] = {}
    absent: dict[tuple[str, str, str], str] = {}
    facts: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for version in sorted(trees, reverse=bool(number % 2)):
            for record in run(trees[version]):
                facts[record["model"]] = {key: record[key] for key in ("model", "parameters", "modules")}
                if "absent" in record:
                    absent[version, record["model"], record["part"]] = record["absent"]
                    continue
                key = record["model"], record["part"], record["case"]
                taken.setdefault((version, key), []).append(statistics.median(record["us"]))
        print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    records: list[dict[str, Any]] = []
    for key in dict.fromkeys(key for _, key in taken):
        model, part, case = key
        for version in trees:
            record = {**facts[model], "part": part, "case": case, "version": version}
            if (medians := taken.get((version, key))) is not None:
                spread = [round(min(medians), 1), round(max(medians), 1)]
                record |= {"median_us": round(statistics.median(medians), 1), "spread_us": spread}
            else:
                record |= {"absent": absent.get((version, model, part), "not measured")}
            records.append(record)
    measured = {(version, model, part) for version, (model, part, _) in taken}
    lost = [(*place, why) for place, why in absent.items() if all((v, *place[1:]) not in measured for v in trees)]
    return records + [{**facts[m], "part": part, "version": v, "absent": why} for v, m, part, why in lost]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Write the records as a table of a page."""
    lines = ["| model | part | between steps | before | now |", "|---|---|---|---:|---:|"]
    rows: dict[Key, dict[str, str]] = {}
    for record in records:
        key = record["model"], record["part"], record.get("case", "")
        rows.setdefault(key, {})[record["version"]] = _shown(record)
    lines += [f"| {' | '.join(key)} | {row.get('before', '')} | {row.get('now', '')} |" for key, row in rows.items()]
    return "\n".join(lines)


def _shown(record: dict[str, Any]) -> str:
    if "absent" in record:
        return "not there"
    low, high = record["spread_us"]
    return f"{record['median_us']:,.0f} ({low:,.0f}–{high:,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write records into a file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    arguments = parser.parse_args()
    load = [round(each, 1) for each in os.getloadavg()]
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": tree_of(arguments.before, Path(folder)), "now": HERE.parent}
        records = measure(trees, arguments.rounds)
    print(table(records))
    if arguments.json is not None:
        now = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, check=True, capture_output=True, text=True
        )
        facts = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.processor(),
            "processors": os.cpu_count(),
            "load": {"begin": load, "end": [round(each, 1) for each in os.getloadavg()]},
            "before": arguments.before,
            "now": now.stdout.strip(),
            "rounds": arguments.rounds,
        }
        arguments.json.write_text(json.dumps({**facts, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
