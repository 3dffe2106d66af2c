"""Compare plans that are found under an error budget with uniform settings of the same error.

    python benchmarks/budget.py --json budget.json --report docs/benchmarks/budget.md

Small models are trained for 1,000 steps by four workers in one process: dense, under three uniform settings, and by
plans that are found and found again under the error of each setting and of two modes (budget_cells.py). There only
bytes cost. What found plans are worth in time is told by timelines of eight hosts at 1 Gbit/s (budget_timelines.py).

Every cell is saved as it ends, in `--cells`; another run goes on from there. About forty minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
from budget_cells import DENSE, MODES, OPTIMIZERS, REFERENCES, Cell, Outcome, run_cell
from budget_page import records_of, report
from budget_tasks import BUDGET_TASKS
from budget_timelines import Priced, cases, priced
from rich.console import Console
from rich.markdown import Markdown

from fxcomp.error_tables import ErrorTable

SETTINGS = (DENSE, *(f"{kind} {reference}" for reference in REFERENCES for kind in ("uniform", "found")))
MODE_SETTINGS = tuple(f"found {mode}" for mode in MODES)
SEEDS = {"logreg": 2}
"""By model; one of the others."""


def planned(models: Sequence[str]) -> Iterator[Cell]:
    """All cells, in the order of what is missed most."""
    for seed in range(max(SEEDS.values())):
        for settings in (SETTINGS, MODE_SETTINGS):
            for model in models:
                if seed < SEEDS.get(model, 1):
                    for optimizer in OPTIMIZERS:
                        yield from (Cell(model, optimizer, setting, seed) for setting in settings)


def key_of(outcome: Outcome | Cell) -> Cell:
    return Cell(outcome.model, outcome.optimizer, outcome.setting, outcome.seed)


def run_all(cells: Iterable[Cell], path: Path | None) -> list[Outcome]:
    """Run the cells that the file does not have, and save it after each."""
    found = {key_of(each): each for each in read_cells(path)} if path and path.exists() else {}
    for cell in cells:
        if cell in found:
            continue
        outcome = found[cell] = run_cell(cell)
        loss = "diverges" if outcome.loss is None else f"{outcome.loss:.5f}"
        print(f"{cell.model} {cell.optimizer} {cell.setting} {cell.seed}: {loss}, {outcome.bytes:,.0f} bytes,"
              f" error {outcome.error:.4f}, {outcome.seconds:.0f} s", flush=True)  # fmt: skip
        if path:
            path.write_text(json.dumps([asdict(each) for each in found.values()]))
    return list(found.values())


def read_cells(path: Path) -> list[Outcome]:
    names = {field.name for field in fields(Outcome)}
    return [
        Outcome(**{name: value for name, value in each.items() if name in names})
        for each in json.loads(path.read_text())
    ]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    outcomes = run_all(() if options.render else planned(options.model), options.cells)
    timelines: list[Priced] = options.timelines or [
        each for case, optimizer in cases(tables_of(outcomes)) for each in priced(case, optimizer)
    ]
    records, date = records_of(outcomes, timelines), time.strftime("%Y-%m-%d")
    if options.json:
        found = {
            "date": date,
            "torch": torch.__version__,
            "records": [asdict(each) for each in records],
            "timelines": [asdict(each) for each in timelines],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    text = report(records, timelines, date)
    if options.report:
        options.report.write_text(text)
    Console().print(Markdown(text))


def tables_of(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], ErrorTable]:
    """The error tables of dense training, by model and optimizer."""
    return {
        (each.model, each.optimizer): ErrorTable.from_json(each.table).lagging({})
        for each in outcomes
        if each.table is not None and each.seed == 0
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=BUDGET_TASKS, help="only this one; may be given again")
    parser.add_argument("--cells", type=Path, metavar="FILE", help="save each cell here, and go on from what is there")
    parser.add_argument("--render", action="store_true", help="train nothing: take what is in --cells")
    parser.add_argument("--timelines", type=Path, metavar="FILE", help="price nothing: take the timelines of this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the page here, as Markdown")
    arguments = parser.parse_args()
    arguments.model = arguments.model or list(BUDGET_TASKS)
    if arguments.timelines:
        try:
            found = json.loads(arguments.timelines.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--timelines takes a file that an earlier run wrote by --json: {error}")
        arguments.timelines = [Priced(**each) for each in (found["timelines"] if isinstance(found, dict) else found)]
    return arguments


if __name__ == "__main__":
    main()
