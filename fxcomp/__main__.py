"""The command line: explain a job on a cluster, dump its graph, calibrate costs, run the demo."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.cluster_file import INTRA_ALPHA_US, load_cluster, parse_ratio
from fxcomp.cluster.link import Link, parse_gb_per_s
from fxcomp.errors import BadOption, FxcompError
from fxcomp.gc_paused import gc_paused

if TYPE_CHECKING:
    from fxcomp.cost.table import CostTable

EXAMPLES = """examples:
  fxcomp explain train.py:job --inter 1gbit                     two hosts of one rank
  fxcomp explain train.py --cluster 8x4 --inter 25gbit          would it pay there?
  fxcomp explain train.py --cluster 8x4 --step-ms 120 --json    with your GPU's step, for a program
  fxcomp explain train.py --cluster 8x4 --device h100           estimated for GPUs that are not here
  fxcomp explain train.py --cluster my_cluster.toml             racks, uneven hosts: see docs/costs.md
  fxcomp dump train.py --after bucket_gradients                 the graph after a pass
  fxcomp dump train.py --source                                 the code that would run
  torchrun --nproc-per-node 2 -m fxcomp calibrate -o costs.json    measure links and compressors
  fxcomp explain train.py --costs costs.json --cluster 8x4      with what was measured, here or elsewhere
  fxcomp demo --inter 300mbit                                   train a GPT with DDP and with fxcomp
"""

MOST_STEPS = 1_000_000  # of the demo: some days (assumed)
CLUSTER, INTER, INTRA = "2x1", "10gbit", "100gbit"  # what is asked about if the user does not say


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for a mistake of the user, 130 if interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _short_warnings():
            status = _run(words)
        sys.stdout.flush()
    except FxcompError as error:
        _clear()
        print(f"fxcomp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _clear()
        return 130
    except BrokenPipeError:  # the reader has seen enough; Python must not complain when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def _run(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    for name, value in vars(arguments).items():
        if value == "" and name != "job":  # as a shell passes a variable that was never set
            raise BadOption(f"--{name.replace('_', '-')} is empty: say what it is, or leave it out")
    if arguments.command == "demo":
        return _demo(arguments)
    if arguments.command == "calibrate":
        return _calibrate(arguments)
    with gc_paused():
        status = _explain(arguments) if arguments.command == "explain" else _dump(arguments)
        gc.freeze()  # nor when Python ends
        return status


# Commands


def _explain(arguments: argparse.Namespace) -> int:
    from fxcomp.cost.table import CostTable
    from fxcomp.frontends.job import load_job
    from fxcomp.frontends.what_if import plan_named, what_if
    from fxcomp.plan.modes import Mode
    from fxcomp.report.as_json import to_json
    from fxcomp.report.terminal import print_report

    costs = CostTable.read(arguments.costs) if arguments.costs else None
    cluster, assumed = _cluster(arguments, costs)
    if costs is not None and (arguments.inter or arguments.intra or _says_links(arguments.cluster or "")):
        costs = costs.without_collectives()
        assumed = (*assumed, "Collectives are priced by the links that were named, not as the table measured them.")
    mode = Mode.parse(arguments.mode)
    plan = plan_named(arguments.plan, cluster) if arguments.plan else None
    _tell("loading the job")
    answer = what_if(
        load_job(arguments.job),
        cluster,
        mode=mode,
        plan=plan,
        step_ms=arguments.step_ms,
        device=arguments.device,
        costs=costs,
        tell=_tell,
    )
    _clear()
    if arguments.save_plan:
        _save(answer.plan.to_json(), arguments.save_plan)
    explanation = answer.explanation(*assumed)
    if arguments.json:
        print(json.dumps(to_json(explanation), indent=1))
    else:
        print_report(explanation, sys.stdout)
    return 0


def _dump(arguments: argparse.Namespace) -> int:
    from fxcomp.frontends.job import load_job
    from fxcomp.frontends.what_if import graph_after, plan_named, rewritten
    from fxcomp.graph.dump import dump
    from fxcomp.report.terminal import encodable

    cluster, _ = _cluster(arguments)
    plan = plan_named(arguments.plan, cluster) if arguments.plan else None
    program = rewritten(load_job(arguments.job), cluster, plan=plan)
    text = program.source if arguments.source else dump(graph_after(program, arguments.after))
    print(encodable(text, sys.stdout.encoding))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from fxcomp.commands.costs import run_calibrate

    return run_calibrate(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from fxcomp.commands.demo.run import run_demo

    if not 1 <= arguments.steps <= MOST_STEPS:
        raise BadOption(f"--steps is how many steps each takes, 1 to {MOST_STEPS:,}; it is {arguments.steps}")
    if arguments.inter is not None:
        parse_gb_per_s(arguments.inter)  # before a machine that cannot shape links makes it of no matter
    return run_demo(inter=arguments.inter, steps=arguments.steps, as_json=arguments.json)


def _save(plan: object, path: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(json.dumps(plan, indent=1) + "\n")
    except OSError as error:
        raise BadOption(f"cannot save the plan to {path}: {error.strerror}") from None


# Options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxcomp",
        description="Work out where gradient compression pays in a training step, and why.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fxcomp {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain | dump | calibrate | demo")
    explain = commands.add_parser("explain", help="predict a job's step on a cluster, and say whether to compress")
    _add_job(explain)
    explain.add_argument("--mode", default="balanced", help="lossless, balanced or aggressive (default: balanced)")
    explain.add_argument("--step-ms", type=float, metavar="MS", help="what a step takes there without communication")
    explain.add_argument("--device", metavar="NAME", help="estimate for such ranks: a100, h100, h200, l40s, ...")
    explain.add_argument("--costs", metavar="FILE", help="a table that fxcomp calibrate wrote, here or elsewhere")
    explain.add_argument("--save-plan", metavar="FILE", help="write the plan, for compile_step(plan=FILE)")
    explain.add_argument("--json", action="store_true", help="print data instead of a report")
    dump = commands.add_parser("dump", help="print a job's graph, with assumed costs: the same on every machine")
    _add_job(dump)
    dump.add_argument("--after", metavar="PASS", help="the graph after this pass (default: the last)")
    dump.add_argument("--source", action="store_true", help="print the emitted step instead of the graph")
    calibrate = commands.add_parser(
        "calibrate", help="measure collectives, compressors and memory into a table; under torchrun for collectives"
    )
    what = calibrate.add_mutually_exclusive_group()
    what.add_argument("--show", metavar="FILE", help="read a table instead of measuring")
    what.add_argument("--from-trace", metavar="TRACE", nargs="+", help="read torch.profiler's traces, one a rank")
    what.add_argument("--diff", metavar="FILE", nargs=2, help="tell how two tables differ, and do nothing else")
    calibrate.add_argument("-o", "--output", metavar="FILE", help="write the table as JSON; on rank 0 alone")
    calibrate.add_argument("--merge", metavar="FILE", help="add what another table knows; what is newer wins")
    calibrate.add_argument(
        "--compressors",
        metavar="NAME",
        nargs="+",
        help="which to time: int8 'topk(0.01)', or all",
    )
    calibrate.add_argument("--threads", metavar="N", type=int, nargs="+", help="time them with so many threads each")
    calibrate.add_argument("--json", action="store_true", help="print data instead of tables")
    demo = commands.add_parser("demo", help="train a small GPT with DDP and with fxcomp, in turns")
    demo.add_argument("--inter", metavar="RATE", help="the bandwidth between two hosts, like 300mbit; needs root")
    demo.add_argument("--steps", type=int, default=40, help="how many steps each takes (default: 40)")
    demo.add_argument("--json", action="store_true", help="print data instead of a table")
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="FILE.py[:job]", help="a file with a function that returns a fxcomp.Job")
    parser.add_argument(
        "--cluster", metavar="HxR", help=f"hosts x ranks per host, like 8x4 or 4+4+2, or a .toml (default: {CLUSTER})"
    )
    parser.add_argument("--inter", metavar="LINK", help=f"between hosts: 300mbit, 25gbit@8us (default: {INTER})")
    parser.add_argument("--intra", metavar="LINK", help=f"inside a host: nvlink4, pcie4, 12GB/s (default: {INTRA})")
    parser.add_argument("--rack", type=int, metavar="HOSTS", help="how many hosts each rack has (default: no racks)")
    parser.add_argument("--oversubscription", metavar="A:B", help="what hosts of a rack could send: its uplink (1:1)")
    parser.add_argument(
        "--plan", metavar="PLAN", help="a saved plan.json, or one compressor for all: dense, bf16, int8"
    )


def _says_links(cluster: str) -> bool:
    return cluster.endswith(".toml") or "," in cluster


def _cluster(arguments: argparse.Namespace, costs: CostTable | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that was asked about, and what the user did not say of it. Measured links go before usual ones."""
    text = arguments.cluster or CLUSTER
    inter = Link.parse(arguments.inter) if arguments.inter else None
    intra = Link.parse(arguments.intra, alpha_us=INTRA_ALPHA_US) if arguments.intra else None
    assumed: list[str] = []
    if text.endswith(".toml"):
        cluster = load_cluster(text, intra=intra, inter=inter)
    else:
        if not arguments.cluster:
            assumed.append(f"--cluster {CLUSTER}")
        named = {clause.split()[0] for clause in text.split(",")[1:] if clause.strip()}
        for name, link in (("inter", inter), ("intra", intra)):
            if link is not None and name in named:
                raise BadOption(f"--cluster {text!r} says {name}, and so does --{name}: keep one")
        usual = {"intra": Link.parse(INTRA, alpha_us=INTRA_ALPHA_US), "inter": Link.parse(INTER)}
        for name in usual:
            measured = costs and costs.link(between_hosts=name == "inter")
            if measured is not None:
                usual[name] = measured
                named.add(name)
        cluster = Cluster.parse(text, intra=intra or usual["intra"], inter=inter or usual["inter"])
        if inter is None and "inter" not in named and cluster.hosts > 1:
            assumed.append(f"--inter {INTER}")
        if intra is None and "intra" not in named and cluster.ranks_per_host > 1:
            assumed.append(f"--intra {INTRA}")
    cluster = _in_racks(cluster, arguments)
    return cluster, (f"Assumed, because it was not said: {', '.join(assumed)}.",) if assumed else ()


def _in_racks(cluster: Cluster, arguments: argparse.Namespace) -> Cluster:
    if arguments.rack is None:
        if arguments.oversubscription:
            raise BadOption("--oversubscription is about racks: say with --rack how many hosts each has")
        return cluster
    if cluster.above:
        raise BadOption(f"--rack: the cluster has {cluster.above[0].name}s already ({cluster.shape}); leave it out")
    return cluster.with_racks(arguments.rack, oversubscription=parse_ratio(arguments.oversubscription or "1:1"))


def _version() -> str:
    try:
        return version("fxcomp")
    except PackageNotFoundError:
        return "(not installed)"


# The terminal


def _tell(what: str) -> None:
    """Show on a terminal what takes time; the next message or the report replaces it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what} ...", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _short_warnings() -> Generator[None]:
    """Warnings as one line of ours, without the place in our code that gave them."""

    def show(message: Warning | str, *_: object) -> None:
        print(f"fxcomp: {str(message).removeprefix('fxcomp: ')}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
