"""`fxcomp plot`: plot logged runs over steps and time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fxcomp import compat
from fxcomp.commands.outputs import check_outputs, check_page
from fxcomp.errors import BadOption
from fxcomp.report.document import count
from fxcomp.report.html.run_plots import METRICS, to_html
from fxcomp.report.runs import LoggedRun, read_run
from fxcomp.report.terminal import encodable

NAME = "plot"
HELP = "draw loss, bytes and residuals of several runs, as one page for a browser"
EXAMPLES = """\
  fxcomp plot dense.jsonl int4.jsonl -o plots.html              values of step.metrics(), over steps and time
"""

MOST_RUNS = 12
"""Maximum number of runs: six colors, each solid and dashed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", metavar="RUN.jsonl", nargs="+", help="a line of JSON a step: loss, seconds, metrics")
    parser.add_argument("-o", "--output", metavar="FILE", default="plots.html", help="the page (default: plots.html)")
    parser.add_argument("--metrics", metavar="A,B", help=f"numbers to draw (default: {','.join(METRICS)})")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="add means over N points, with a note")


def run(arguments: argparse.Namespace) -> int:
    paths: Sequence[str] = arguments.logs
    if len(paths) > MOST_RUNS:
        raise BadOption(f"a plot shows at most {MOST_RUNS} runs; these are {len(paths)}")
    if arguments.smooth < 1:
        raise BadOption(f"--smooth is a number of points, from 1; it is {arguments.smooth}")
    files = [Path(path).resolve() for path in paths]
    for path, file in zip(paths, files, strict=True):
        if files.count(file) > 1:
            raise BadOption(f"{path} is given twice: a run is drawn once")
    check_outputs({"--output": arguments.output}, paths)
    check_page("--output", arguments.output)
    folder = Path(arguments.output).resolve().parent
    if not folder.is_dir():
        raise BadOption(f"cannot write {arguments.output}: there is no folder {folder}")
    metrics = _metrics(arguments.metrics)
    runs = [_read(path, name, metrics) for path, name in zip(paths, _names(paths), strict=True)]
    try:
        compat.write_atomically(Path(arguments.output), to_html(runs, arguments.smooth))
    except OSError as error:
        raise BadOption(f"cannot write {arguments.output}: {error.strerror or error}") from None
    for note in (note for each in runs for note in each.notes):
        print(encodable(note, sys.stdout.encoding))
    lines = count(sum(len(each.steps) for each in runs), "line")
    print(f"{arguments.output}: {count(len(runs), 'run')}, {lines}")
    return 0


def _metrics(named: str | None) -> Sequence[str]:
    if named is None:
        return ()
    metrics = [name for name in dict.fromkeys(map(str.strip, named.split(","))) if name]
    if not metrics:
        raise BadOption(f"--metrics names no number: write --metrics loss,accuracy; it is {named!r}")
    return metrics


def _read(path: str, name: str, metrics: Sequence[str]) -> LoggedRun:
    run = read_run(path, name, metrics or list(METRICS))
    absent = [f"{path}: no line has {metric!r}" for metric in metrics if metric not in run.series]
    return replace(run, notes=[*run.notes, *absent])


def _names(paths: Sequence[str]) -> list[str]:
    """Return each file's name without suffix, or its path if another file has the same name."""
    stems = [Path(path).stem for path in paths]
    return [stem if stems.count(stem) == 1 else path for stem, path in zip(stems, paths, strict=True)]
