"""`fxcomp bisect`: find the tensors whose compression costs the loss, by short trainings on ranks of this machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from fxcomp import status_line
from fxcomp.commands.bisect.partly_dense import compressed_names, partly_dense
from fxcomp.commands.bisect.rank import MARK, Request
from fxcomp.commands.bisect.result import Result, headline, sections_of, to_json
from fxcomp.commands.bisect.search import SearchFindings
from fxcomp.commands.demo.launch_ranks import run_ranks
from fxcomp.commands.job_options import add_plan_options, asked_compress, chosen_cluster
from fxcomp.errors import BadJob, BadOption
from fxcomp.frontends.job import load_job
from fxcomp.frontends.what_if import WhatIf, what_if
from fxcomp.plan.compress import Compress
from fxcomp.report.terminal import print_sections

NAME = "bisect"
HELP = "find the tensors whose compression costs the loss, by short trainings on this machine"
EXAMPLES = """\
  fxcomp bisect train.py --compress 'topk(0.01)'                which tensors that hurts, in short trainings here
"""

MOST_RANKS = 8
"""More processes on one machine would take too long (assumed)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)
    parser.set_defaults(job_steps=None)
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each training (default: 60)")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="trainings of a kind, 2 or more (default: 4)")
    parser.add_argument("--checkpoint", metavar="FILE", help="begin from a saved model.state_dict(), not from scratch")
    parser.add_argument("--save-plan", metavar="FILE", help="write the plan with the tensors that are found dense")
    parser.add_argument("--json", action="store_true", help="print data instead of a report")


def run(arguments: argparse.Namespace) -> int:
    """Search, and print what was found."""
    cluster, _ = chosen_cluster(arguments)
    _check(arguments, cluster.world_size)
    status_line.show("loading the job ...")
    job = load_job(arguments.job)
    if job.next_batch is None:
        raise BadJob(
            f"{arguments.job!r} has one batch, and bisect trains on many.\n"
            "  Give it next_batch=: fxcomp.Job(model, loss_fn, optimizer, batch, next_batch=draw), draw(step, rank)."
        )
    compress = asked_compress(arguments, job)
    explanation = what_if(job, cluster, WhatIf(compress=compress), lambda what: status_line.show(f"{what} ..."))
    plan = explanation.plan
    if plan.moves_exchange:
        raise BadOption(
            "the plan exchanges momenta, after a warm-up that is longer than the trainings of bisect.\n"
            "  Ask about gradients: --at gradient, or another --compress."
        )
    found = None
    if compressed_names(plan):
        checkpoint = arguments.checkpoint and str(Path(arguments.checkpoint).resolve())
        request = Request(arguments.job, plan, cluster, compress.feedback, arguments.steps, arguments.seeds, checkpoint)
        found = _searched(request)
    status_line.clear()
    result = Result(explanation, found, arguments.steps, arguments.seeds, *_named(compress))
    if arguments.save_plan:
        try:
            partly_dense(plan, result.names).save(arguments.save_plan)
        except OSError as error:
            raise BadOption(f"cannot save the plan to {arguments.save_plan}: {error.strerror}") from None
    if arguments.json:
        print(json.dumps(to_json(result), indent=1))
    else:
        print_sections(headline(result), sections_of(result), sys.stdout)
    return 0


def _check(arguments: argparse.Namespace, ranks: int) -> None:
    """Raise BadOption for what cannot be searched."""
    if not 2 <= ranks <= MOST_RANKS:
        raise BadOption(
            f"bisect trains on ranks of this machine, 2 to {MOST_RANKS}; the cluster has {ranks}.\n"
            "  Name a smaller one with the same levels, such as --cluster 2x2."
        )
    if arguments.seeds < 2:
        raise BadOption(f"--seeds are 2 or more, because one training has no noise; it is {arguments.seeds}")
    if arguments.steps < 1:
        raise BadOption(f"--steps is a number of steps, from 1; it is {arguments.steps}")
    if arguments.checkpoint and not Path(arguments.checkpoint).is_file():
        raise BadOption(f"--checkpoint: there is no file {arguments.checkpoint}")


def _searched(request: Request) -> SearchFindings:
    """Let ranks search, and show how far they are."""
    told: list[Any] = []

    def hear(_: int, line: str) -> None:
        if not line.startswith(MARK):
            return
        content = json.loads(line.removeprefix(MARK))
        if "note" in content:
            status_line.show(f"training: {content['note']}")
        else:
            told.append(content["found"])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request.to_json()))
        command = ["-m", "fxcomp.commands.bisect.rank", str(path)]
        run_ranks(command, ranks_per_host=request.cluster.world_size, timeout_s=math.inf, on_line=hear)
    return SearchFindings.from_json(told[0])


def _named(compress: Compress) -> tuple[str | None, str]:
    """Write how the plan was asked for: the plan that was named, or the limit of a choice."""
    within = compress.within
    return None if compress.plan is None else str(compress.plan), repr(within)
