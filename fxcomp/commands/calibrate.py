"""`fxcomp calibrate`: measure costs into a table; show or merge tables.

Under a launcher such as torchrun, all ranks take part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fxcomp.cluster.link import MOST_RANKS
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.compressors.examples import examples
from fxcomp.cost.merge import merge
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.modes import MOMENTUM_COMPRESSORS, Mode, compressors_of
from fxcomp.planning.measure_machine import device_here, hardware
from fxcomp.planning.survey import survey
from fxcomp.ranks import Ranks
from fxcomp.report.terminal import headline, print_sections, sections_of

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CURE = (
    "  Start every rank with torchrun, which sets these variables; to measure this machine alone: unset RANK WORLD_SIZE"
)


@contextmanager
def launched_ranks() -> Generator[None]:
    """Create the process group if a launcher started this process. Raises BadOption."""
    local_rank = _local_rank()
    if local_rank is None:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise BadOption(
            f"the ranks did not meet at MASTER_ADDR:MASTER_PORT, {where}: {str(error).partition(chr(10))[0]}\n{_CURE}"
        ) from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def _local_rank() -> int | None:
    values = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    said = " and ".join(f"{name}={values[name]}" for name in ("RANK", "WORLD_SIZE") if name in values)
    if not said:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            raise BadOption(
                f"srun has started {tasks} tasks without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: each would"
                " measure alone.\n  Set them from SLURM_PROCID and SLURM_NTASKS (docs/recipes/clusters.md), or start"
                " one task."
            )
        return None
    missing = [name for name in _VARIABLES if name not in values]
    if missing:
        raise BadOption(f"the environment has {said}, as of a launcher, but not {', '.join(missing)}.\n{_CURE}")
    world_size = _variable("WORLD_SIZE", 1, MOST_RANKS)
    _variable("RANK", 0, world_size - 1)
    _variable("MASTER_PORT", 1, 65535)
    if not values["MASTER_ADDR"].strip():
        raise BadOption(f"MASTER_ADDR is empty; it names the host of rank 0.\n{_CURE}")
    most = torch.cuda.device_count() if torch.cuda.is_available() else MOST_RANKS
    return _variable("LOCAL_RANK", 0, most - 1) if "LOCAL_RANK" in os.environ else 0


def _variable(name: str, least: int, most: int) -> int:
    text = os.environ[name]
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= value <= most:
        raise BadOption(
            f"{name}={text[:40]!r} in the environment must be a whole number from {least} to {most}.\n{_CURE}"
        )
    return value


NAME = "calibrate"
HELP = "measure collectives, compressors and memory into a table; under torchrun for collectives"
EXAMPLES = """\
  torchrun --nproc-per-node 2 -m fxcomp calibrate -o costs.json    measure links and compressors
"""

MOST_THREADS = 1024
"""Maximum of `--threads` (assumed); torch has no limit."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show", metavar="FILE", help="read a table instead of measuring")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the table as JSON; on rank 0 alone")
    parser.add_argument("--merge", metavar="FILE", help="add the entries of another table; the newer of two wins")
    parser.add_argument("--compressors", metavar="NAME", nargs="+", help="which to time: int8 'topk(0.01)', or all")
    parser.add_argument(
        "--threads", metavar="N", type=int, nargs="+", help="time them with each of these numbers of threads"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of tables")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.show:
        return _measure(arguments)
    if arguments.compressors or arguments.threads:
        raise BadOption("--compressors and --threads are about measuring, which --show replaces")
    known = _checked_files(arguments)
    return _finish(arguments, CostTable.read(arguments.show), (), known)


def _measure(arguments: argparse.Namespace) -> int:
    """Measure on all ranks. Only rank 0 reads files, writes files and prints."""
    with launched_ranks():
        ranks = Ranks.join(None, "calibrate")
        known: list[CostTable | None] = []

        def mistake() -> str | None:
            try:
                _wanted(arguments)
                known.append(_checked_files(arguments))
                if known[0] is not None:  # raise for another machine's table before measuring
                    merge(known[0], CostTable(hardware=hardware(device_here())))
            except BadOption as error:
                return str(error)
            return None

        told = ranks.from_rank_0("reading options and files", mistake)
        is_first = ranks.rank == 0
        if told is not None:
            if ranks.world_size > 1:
                # Rank 0 may host the store, so it must not exit before all ranks have read.
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]  # untyped
            if is_first:
                raise BadOption(told)
            return 2  # rank 0 prints the error
        compressors, threads = ranks.attempt("reading options", lambda: _wanted(arguments))
        found = survey(compressors, threads=threads, tell=_tell if is_first else lambda _: None)
    return _finish(arguments, found.table, found.notes, known[0]) if is_first else 0


def _finish(arguments: argparse.Namespace, table: CostTable, notes: Sequence[str], known: CostTable | None) -> int:
    if known is not None:
        merged = merge(known, table)
        table, notes = merged.table, (*notes, *(f"Contradiction: {conflict}" for conflict in merged.conflicts))
    if arguments.output:
        try:
            table.save(arguments.output)
        except OSError as error:
            raise BadOption(f"cannot save the table to {arguments.output}: {error.strerror}") from None
    if arguments.json:
        print(json.dumps(table.to_json(), indent=1))
    else:
        print_sections(headline(table), sections_of(table, notes), sys.stdout)
    return 0


def _wanted(arguments: argparse.Namespace) -> tuple[list[Compressor], Sequence[int]]:
    threads = arguments.threads or ()
    if any(not 1 <= count <= MOST_THREADS for count in threads):
        raise BadOption(f"--threads are numbers of threads, 1 to {MOST_THREADS:,}")
    names = arguments.compressors
    if not names:
        return [*compressors_of(Mode.LOSSY), *MOMENTUM_COMPRESSORS], threads
    if names == ["all"]:
        return list(examples()), threads
    try:
        return [parse_compressor(name) for name in names], threads
    except ValueError as error:
        raise BadOption(f"--compressors: {error}") from None


def _checked_files(arguments: argparse.Namespace) -> CostTable | None:
    """Read the table of `--merge`, if given. Raises BadOption, also if the output file cannot be written."""
    known, path = CostTable.read(arguments.merge) if arguments.merge else None, arguments.output
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and not os.path.isdir(folder):
        raise BadOption(f"cannot save the table to {path}: there is no folder {folder}")
    if folder and (os.path.isdir(path) or not os.access(folder, os.W_OK)):
        what = "it is a folder" if os.path.isdir(path) else f"the folder {folder} may not be written to"
        raise BadOption(f"cannot save the table to {path}: {what}")
    return known


def _tell(what: str) -> None:
    print(f"fxcomp: {what}", file=sys.stderr, flush=True)
