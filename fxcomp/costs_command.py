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

from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.cost.compare import diff, merge
from fxcomp.cost.table import CostTable
from fxcomp.describe import examples
from fxcomp.errors import BadOption
from fxcomp.report import encodable, print_costs
from fxcomp.search.space import Mode, compressors_of
from fxcomp.survey import survey


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
    old = CostTable.read(arguments.merge) if arguments.merge else None
    _check_writable(arguments.output)
    if measures:
        table, notes, is_first = _measured(_compressors(arguments.compressors), arguments.threads or ())
        if not is_first:
            return 0
    elif arguments.show:
        table, notes = CostTable.read(arguments.show), ()
    else:
        table, notes = _traced(arguments.from_trace)
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


def _check_writable(path: str | None) -> None:
    """Say so before measuring, not after."""
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and not os.path.isdir(folder):
        raise BadOption(f"cannot save the table to {path}: there is no folder {folder}")


# Measuring


def _measured(compressors: Sequence[Compressor], threads: Sequence[int]) -> tuple[CostTable, tuple[str, ...], bool]:
    """The table, notes, and whether this is the rank that writes them."""
    if any(not 1 <= count <= MOST_THREADS for count in threads):
        raise BadOption(f"--threads are numbers of threads, 1 to {MOST_THREADS:,}")
    with _process_group() as is_first:
        found = survey(compressors, threads=threads, tell=_tell if is_first else _say_nothing)
    return found.table, found.notes, is_first


@contextmanager
def _process_group() -> Generator[bool]:
    """Join the launcher's ranks, if there is a launcher; gives whether this is rank 0."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield True
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _tell(what: str) -> None:
    print(f"fxcomp: {what}", file=sys.stderr, flush=True)


def _say_nothing(_: str) -> None:
    return


# Traces


def _traced(paths: Sequence[str]) -> tuple[CostTable, tuple[str, ...]]:
    from fxcomp.cost.trace import table_from_traces

    found = table_from_traces(paths)
    return found.table, found.notes
