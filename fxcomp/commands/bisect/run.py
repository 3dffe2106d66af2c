"""`fxcomp bisect`: find the tensors whose compression costs the loss, by short trainings on ranks of this machine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from fxcomp import status_line
from fxcomp.commands.bisect.rank import Request, search_on_ranks
from fxcomp.commands.bisect.result import Result, headline, sections_of, to_json
from fxcomp.commands.bisect.search import NOTHING_TO_SEARCH
from fxcomp.commands.job_options import add_plan_options, asked_compress, chosen_cluster, job_files
from fxcomp.commands.outputs import check_outputs, save_plan
from fxcomp.errors import BadOption
from fxcomp.frontends.job import load_job
from fxcomp.frontends.what_if import WhatIf, capture_job, what_if
from fxcomp.graph.update_kinds import update_kinds
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
    parser.add_argument(
        "--least",
        type=float,
        default=0.001,
        metavar="SHARE",
        help="a cost up to this share of the loss is not searched for (default: 0.001)",
    )
    parser.add_argument("--save-plan", metavar="FILE", help="write the plan with the tensors that are found dense")
    parser.add_argument("--json", action="store_true", help="print data instead of a report")


def run(arguments: argparse.Namespace) -> int:
    """Search, and print what was found."""
    check_outputs({"--save-plan": arguments.save_plan}, (*job_files(arguments), arguments.checkpoint))
    cluster, _ = chosen_cluster(arguments)
    _check(arguments, cluster.world_size)
    status_line.show("loading the job ...")
    job = load_job(arguments.job)
    if job.next_batch is None:
        raise BadOption(
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
    steps, seeds, least, saved = arguments.steps, arguments.seeds, arguments.least, arguments.save_plan
    found, kinds = NOTHING_TO_SEARCH, ()
    if not plan.is_dense:
        kinds = tuple(update_kinds(capture_job(job)[1].graph))
        checkpoint = arguments.checkpoint and str(Path(arguments.checkpoint).resolve())
        feedback = replace(compress.feedback, allow_diverging=True)  # finding what diverges is what it is for
        found = search_on_ranks(Request(arguments.job, plan, cluster, feedback, steps, seeds, checkpoint, least))
    status_line.clear()
    result = Result(explanation, found, compress, steps, seeds, least, kinds, saved)
    if saved:
        save_plan(result.mended_plan, saved)
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
    if not 0 <= arguments.least < 1:
        raise BadOption(f"--least is a share of the loss, from 0 to below 1, like 0.001; it is {arguments.least:g}")
    if arguments.checkpoint and not Path(arguments.checkpoint).is_file():
        raise BadOption(f"--checkpoint: there is no file {arguments.checkpoint}")
