"""Measure training steps over shaped networks: fxcomp, DDP with and without hooks, and steps without a network.

    python benchmarks/step_time.py --hosts 2 --inter 100mbit,300mbit,1gbit,10gbit --json step_time.json
    python benchmarks/step_time.py --hosts 8 --inter 100mbit,300mbit --model benchmarks/models.py:mlp
    python benchmarks/step_time.py --names fxcomp,fxcomp_lossy --against ../before --inter 100mbit

All contestants share rank processes and take turns in short blocks, in a new order each round, so that drift of the
machine affects all. A step takes as long as its slowest rank. Plain DDP takes two turns per round; their difference is
the A/A spread, the error bar of all results. The JSON file has a record per contestant and bandwidth. Tables and
verdicts are printed, and written to `--report`.

`--against` compares with another checkout with built kernels (`git worktree add ../before COMMIT`). Its compiled steps
run in separate processes on the same hosts, in turns with the others, as `fxcomp_before` etc. `--against .` measures
the random deviation of a ratio from 1.

`benchmarks/sharded.py` measures sharded models.

Four bandwidths take about fifteen minutes. `--loss-steps` takes longer: it trains every contestant from the same seed
without shaping, to compare losses.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baselines import BASELINES, FREE, FXCOMP
from fixed_plans import FIXED
from records import Records, options
from shaped import UNSHAPED, ends_well, run
from step_time_ranks import Settings
from step_time_verdicts import Turns, analyse, records

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.errors import FxcompError
from fxcomp.frontends.job import load_job

HERE = Path(__file__).resolve().parent
EXAMPLE_GPT = HERE.parent / "examples" / "gpt.py"
NAMES = (*BASELINES, *FXCOMP, *FREE)
"""Default names; plans of `fixed_plans.py` are also allowed."""


def contest() -> None:
    arguments = parse_arguments()
    kept, sections = Records(arguments.json), list[str]()
    model = name_of(arguments.model)
    load_job(arguments.model)  # raise for a bad job before ranks start

    def hear(content: dict[str, Any]) -> None:
        turns = [Turns(**turn) for turn in content["turns"]]
        kept.add(*records(model, arguments.hosts, content["inter"], turns))
        sections.append(analyse(content["inter"], turns))
        print(sections[-1], flush=True)
        if arguments.report:
            title = f"# Step time: {model}, {arguments.hosts} hosts of {arguments.ranks_per_host}\n\n"
            arguments.report.write_text(title + "\n".join(sections))

    shaped = arguments.inter != [UNSHAPED]
    ranks_here = arguments.ranks_per_host if shaped else arguments.hosts * arguments.ranks_per_host
    settings = settings_of(arguments, ranks_here)
    command = [str(HERE / "step_time_start.py"), json.dumps(asdict(settings))]
    hosts, started = arguments.hosts if shaped else None, ranks_here * len(settings.checkouts)
    run(command, hear, hosts=hosts, ranks_per_host=started)


def name_of(model: str) -> str:
    """Return the function's name, or the file's if the function is `job`."""
    path, _, function = model.rpartition(":")
    return function if path and function != "job" else Path(path or model).stem


def settings_of(arguments: argparse.Namespace, ranks_here: int) -> Settings:
    return Settings(
        model=arguments.model,
        inter=arguments.inter,
        names=arguments.names,
        hosts=arguments.hosts,
        ranks_here=ranks_here,
        checkouts=[str(HERE.parent), *([str(arguments.against)] if arguments.against else [])],
        minutes=arguments.minutes,
        blocks=arguments.blocks,
        steps_per_block=arguments.steps_per_block,
        loss_steps=arguments.loss_steps,
    )


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument(
        "--inter", default="100mbit,300mbit,1gbit,10gbit", help=f"bandwidths between hosts, or {UNSHAPED}"
    )
    parser.add_argument("--model", default=f"{EXAMPLE_GPT}:job", metavar="FILE:FUNCTION")
    parser.add_argument("--names", default=",".join(NAMES), help="which contestants")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="measure another checkout's compiled steps too"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write tables and verdicts here, as Markdown")
    parser.add_argument("--minutes", type=float, default=15.0, help="for measuring, over all bandwidths (default 15)")
    parser.add_argument("--blocks", type=int, help="rounds at each bandwidth, instead of what fits the time")
    parser.add_argument("--steps-per-block", type=int)
    parser.add_argument("--loss-steps", type=int, default=0, help="train so many steps for the final loss (default 0)")
    parser.add_argument("--quick", action="store_true", help="four rounds of one step, to see that it works")
    arguments = parser.parse_args()
    arguments.inter = arguments.inter.split(",")
    arguments.names = arguments.names.split(",")
    unknown = [name for name in arguments.names if name not in (*NAMES, *FIXED)]
    if unknown:
        parser.error(f"unknown name {unknown[0]!r}, choose from {', '.join((*NAMES, *FIXED))}")
    for inter in arguments.inter:
        if inter == UNSHAPED and len(arguments.inter) > 1:
            parser.error(f"{UNSHAPED} cannot be mixed with shaped bandwidths")
        if inter != UNSHAPED:
            try:
                parse_gb_per_s(inter)
            except FxcompError as error:
                parser.error(str(error))
    if arguments.against:
        arguments.against = arguments.against.resolve()
        if (missing := why_no_checkout(arguments.against)) is not None:
            parser.error(missing)
    if arguments.quick:
        arguments.blocks, arguments.steps_per_block, arguments.loss_steps = 4, 1, 0
    return arguments


def why_no_checkout(path: Path) -> str | None:
    """Return the reason against measuring a folder, or None."""
    for name in ("fxcomp/__init__.py", "benchmarks/baselines.py"):
        if not (path / name).is_file():
            return f"--against needs a checkout of fxcomp, and there is no {name} in {path}"
    if not list((path / "fxcomp").glob("_kernels*.so")):
        return f"{path} has no built kernels: run `python setup.py build_ext --inplace` there"
    return None


if __name__ == "__main__":
    sys.exit(ends_well(contest))
