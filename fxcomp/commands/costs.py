"""`fxcomp calibrate`: make a cost table by measuring or from traces, read one, put two together, compare two."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fxcomp.cluster.limits import MOST_RANKS
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.cost.compare import diff, merge
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.modes import Mode, compressors_of
from fxcomp.planning.measure_step import hardware
from fxcomp.planning.survey import device_here, survey
from fxcomp.ranks import Ranks
from fxcomp.report.terminal import encodable, print_costs
from fxcomp.testing.describe_compressors import examples

MOST_THREADS = 1024
"""No process computes with more (assumed): torch would start as many as it is told, until the system refuses."""


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Do what the command's options say; returns the exit status. Raises BadOption."""
    if arguments.diff:
        first, second = (CostTable.read(path) for path in arguments.diff)
        print(encodable(diff(first, second), sys.stdout.encoding))
        return 0
    measures = not (arguments.show or arguments.from_trace)
    if not measures and (arguments.compressors or arguments.threads):
        raise BadOption("--compressors and --threads are about measuring, which --show and --from-trace replace")
    if measures:
        return _measure(arguments)
    old = _files(arguments)
    table, notes = (CostTable.read(arguments.show), ()) if arguments.show else _traced(arguments.from_trace)
    return _finish(arguments, table, notes, old)


def _finish(arguments: argparse.Namespace, table: CostTable, notes: tuple[str, ...], old: CostTable | None) -> int:
    """Add what the old table knows, save and print."""
    if old is not None:
        merged = merge(old, table)
        table, notes = merged.table, (*notes, *(f"Contradiction: {conflict}" for conflict in merged.conflicts))
    if arguments.output:
        try:
            table.save(arguments.output)
        except OSError as error:
            raise BadOption(f"cannot save the table to {arguments.output}: {error.strerror}") from None
    if arguments.json:
        print(json.dumps(table.to_json(), indent=1))
    else:
        print_costs(table, notes, sys.stdout)
    return 0


def _compressors(names: Sequence[str] | None) -> list[Compressor]:
    if not names:
        return list(compressors_of(Mode.AGGRESSIVE))
    if list(names) == ["all"]:
        return list(examples())
    try:
        return [parse_compressor(name) for name in names]
    except ValueError as error:
        raise BadOption(f"--compressors: {error}") from None


def _files(arguments: argparse.Namespace) -> CostTable | None:
    """The table to merge with, if any. Raises BadOption for files that cannot be read, or written later."""
    old, path = CostTable.read(arguments.merge) if arguments.merge else None, arguments.output
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and not os.path.isdir(folder):
        raise BadOption(f"cannot save the table to {path}: there is no folder {folder}")
    if folder and (os.path.isdir(path) or not os.access(folder, os.W_OK)):
        what = "it is a folder" if os.path.isdir(path) else f"the folder {folder} may not be written to"
        raise BadOption(f"cannot save the table to {path}: {what}")
    return old


# Measuring


def _measure(arguments: argparse.Namespace) -> int:
    """Measure on all of the launcher's ranks. Rank 0 alone reads, writes and prints; the others end as it ends."""
    with _process_group():
        ranks = Ranks.join(None, "calibrate")
        old: list[CostTable | None] = []

        def trouble() -> str | None:
            try:
                _asked(arguments)
                old.append(_files(arguments))
                if old[0] is not None:  # whether both are of one machine is known before anything is measured
                    merge(old[0], CostTable(hardware=hardware(device_here())))
            except BadOption as error:
                return str(error)
            return None

        told = ranks.from_rank_0("reading options and files", trouble)
        is_first = ranks.rank == 0
        if told is not None:
            if ranks.world_size > 1:
                # The store may be rank 0's, which must not end before the others have read it.
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]  # untyped
            if is_first:
                raise BadOption(told)
            return 2  # told once, by rank 0
        compressors, threads = ranks.attempt("reading options", lambda: _asked(arguments))
        found = survey(compressors, threads=threads, tell=_tell if is_first else _say_nothing)
    return _finish(arguments, found.table, found.notes, old[0]) if is_first else 0


def _asked(arguments: argparse.Namespace) -> tuple[list[Compressor], Sequence[int]]:
    """What to measure. Raises BadOption."""
    threads = arguments.threads or ()
    if any(not 1 <= count <= MOST_THREADS for count in threads):
        raise BadOption(f"--threads are numbers of threads, 1 to {MOST_THREADS:,}")
    return _compressors(arguments.compressors), threads


@contextmanager
def _process_group() -> Generator[None]:
    """Join the launcher's ranks, if there is a launcher. Raises BadOption for an environment that no launcher makes."""
    local_rank = _launched()
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


_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CURE = (
    "  Start every rank with torchrun, which sets these variables; to measure this machine alone: unset RANK WORLD_SIZE"
)


def _launched() -> int | None:
    """This rank's number on its host, None without a launcher. Raises BadOption naming the variables that are wrong."""
    values = {name: os.environ[name] for name in _LAUNCHED if name in os.environ}
    if not ("RANK" in values or "WORLD_SIZE" in values):
        return None
    said = " and ".join(f"{name}={values[name]}" for name in ("RANK", "WORLD_SIZE") if name in values)
    missing = [name for name in _LAUNCHED if name not in values]
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
    """A whole number of the environment."""
    text = os.environ[name]
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= value <= most:
        raise BadOption(
            f"{name}={text[:40]!r} in the environment must be a whole number from {least} to {most}.\n{_CURE}"
        )
    return value


def _tell(what: str) -> None:
    print(f"fxcomp: {what}", file=sys.stderr, flush=True)


def _say_nothing(_: str) -> None:
    return


# Traces


def _traced(paths: Sequence[str]) -> tuple[CostTable, tuple[str, ...]]:
    from fxcomp.cost.trace import table_from_traces

    found = table_from_traces(paths)
    return found.table, found.notes
